"""Typer commands: parse and delegate."""
