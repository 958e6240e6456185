"""What runs inside a benchmark's processes: scripts that import nothing of the benchmark itself."""
