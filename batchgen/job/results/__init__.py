"""Commands on the results of a job."""
