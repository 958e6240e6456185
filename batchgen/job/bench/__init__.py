"""`batchgen bench`: named workloads, the machine's floor, peers in processes of their own, figures as JSON lines."""
