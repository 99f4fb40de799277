"""Benchmarks of training, each run with `python -m`."""
