"""Reading of input files: finding, decompression, parsing into raw rows. Uses pyarrow, not torch."""
