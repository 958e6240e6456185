"""Why something did not run."""

from __future__ import annotations

__all__ = ["Absent", "Missing"]


class Absent(Exception):
    """Something optional is not on this machine: not a failure, but told."""


class Missing(Exception):
    """An operation that must be there is not, which is a failure."""
