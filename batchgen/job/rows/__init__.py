"""The rows of a job: read, named by hashes, found again."""
