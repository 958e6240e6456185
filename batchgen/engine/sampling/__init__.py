"""Sampling: logits processing, constraints, tokens and output logprobs."""
