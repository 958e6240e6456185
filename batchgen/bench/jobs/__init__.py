"""Workloads that run no engines: planning, the start of the command, the cost of a row, the time left."""
