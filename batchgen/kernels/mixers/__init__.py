"""Mixers: layers that keep a state of fixed size instead of keys and values."""
