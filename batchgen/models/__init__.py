"""Decoders behind one seam: tokens of a step in, hidden states and logits out."""
