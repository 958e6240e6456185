"""The page of a job: its figures, the choice of its rows, and the HTML file."""
