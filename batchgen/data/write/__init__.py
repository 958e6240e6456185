"""Writing results: schema, committed parts, resume and the atomic finish. pyarrow, no torch."""
