"""Tasks of the demonstration model: questions with exact answers, generated from a seed."""
