"""Where a text ends."""
