"""Files: reading rows and writing results. pyarrow, no torch."""
