"""Rows of files to requests."""
