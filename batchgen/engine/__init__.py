"""Runs a job's requests on a device and yields completions; no files."""
