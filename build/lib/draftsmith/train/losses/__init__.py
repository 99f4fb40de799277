"""Losses over large vocabularies, in chunks."""
