"""batchgen: offline batch generation for large language models."""

__version__ = "0.1.0"
