"""The engine: runs a job's requests on a device and yields completions. No file I/O."""
