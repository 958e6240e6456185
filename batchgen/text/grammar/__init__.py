"""Structured output: from a row's schema, pattern or grammar to a compiled matcher."""
