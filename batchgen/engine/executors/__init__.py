"""Executors: the ways to run a step on a device."""
