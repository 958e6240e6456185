"""Attention over the paged cache in PyTorch: the reference, the fallback backend, and the deterministic backend."""
