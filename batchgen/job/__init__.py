"""Jobs: one resumable run from input files to the output, and `check`, `verify`, `show` and `export`."""
