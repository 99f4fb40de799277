"""What `draftsmith bench` measures (decoding beside transformers, kernels beside other libraries, rounds of a large model), and benchmarks to run with `python -m`."""
