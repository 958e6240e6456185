"""Checks with real weights, which packages on the index hold. They are not part of the tests."""
