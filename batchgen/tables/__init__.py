"""Rows of tables: Arrow values as JSON values, and fields that tables hold as text. Uses pyarrow, not torch."""
