"""Results: finished, joined, exported, compared."""
