"""Tensor parallelism: several processes of a machine that compute one model together."""
