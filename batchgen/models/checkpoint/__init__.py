"""Checkpoints: folder, configuration, stored forms and weights."""
