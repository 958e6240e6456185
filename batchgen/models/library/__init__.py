"""Models that run in the code of transformers."""
