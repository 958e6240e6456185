"""Input rows: their fields, validation, sampling parameters and parsed values. No file I/O, no torch."""
