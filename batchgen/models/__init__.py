"""Decoder models: tokens of a step in, hidden states and logits out."""
