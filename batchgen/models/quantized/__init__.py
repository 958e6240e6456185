"""Quantised checkpoints: which plain tensors one holds, and how each is computed from what is stored."""
