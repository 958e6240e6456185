"""`batchgen bench`: named workloads, hardware floors, peers in separate processes, results as JSON lines."""
