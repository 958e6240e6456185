"""Files: read rows, write results. pyarrow, no torch."""
