"""Triton kernels: one file per operation, named as in PyTorch one folder up. Imported only where they run."""
