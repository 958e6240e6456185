"""Triton kernels: a file per operation, named as its plain-PyTorch twin one folder up. Imported only where they run."""
