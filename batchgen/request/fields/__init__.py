"""The fields of a row, declared once, and their values."""
