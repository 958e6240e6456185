"""What is made of the states of rows that return vectors or scores."""
