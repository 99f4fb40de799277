"""`draftsmith bench`: decoding beside transformers, kernels beside their rivals, whole rounds."""
