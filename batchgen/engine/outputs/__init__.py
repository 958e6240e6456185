"""What steps give to completions."""
