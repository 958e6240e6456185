"""A chat template that is built as published ones are, with the formats that it shows."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """A chat template, or several by name, and the formats of calls and of thoughts that its model has."""

    calls: str | None
    thoughts: str | None
    template: str | dict[str, str]
