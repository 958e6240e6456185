"""Options of a run: their table, their sources, and the resolved configuration."""
