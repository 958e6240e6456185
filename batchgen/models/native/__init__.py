"""batchgen's own decoder."""
