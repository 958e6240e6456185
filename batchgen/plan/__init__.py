"""Decide what to compute: prefix tree, pages, steps. numpy and lists, no torch."""
