"""Device memory: the KV budget, the dummy run that measures the largest step, and out-of-memory recovery."""
