"""Wires files, text and engine into one resumable run."""
