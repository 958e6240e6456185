"""Command line: Typer commands that parse their arguments and call the job or bench package."""
