"""The work folder of a job: committed rows, and who may write."""
