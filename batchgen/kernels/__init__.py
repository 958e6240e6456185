"""Tensors in, tensors out: one file per operation."""
