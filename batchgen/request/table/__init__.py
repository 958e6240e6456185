"""The requests of a job, in columns."""
