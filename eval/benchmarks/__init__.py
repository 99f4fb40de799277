"""What `draftsmith bench` measures: decoding beside transformers, kernels beside other libraries, rounds of a large model."""
