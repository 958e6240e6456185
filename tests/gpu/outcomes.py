"""Exceptions of cases that cannot run."""

from __future__ import annotations


class Absent(Exception):
    """Something optional is not on this machine: reported, but not a failure."""


class Missing(Exception):
    """A required operation does not exist: a failure."""
