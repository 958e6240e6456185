"""A job on several devices: one process each, on parts of one plan."""
