"""Options of the events of a row with `stream`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchgen.request.checks import boolean, invalid, mapping, show

_OTHERS = frozenset({"include_obfuscation"})
"""Keys that ask for nothing about the events: padding against eavesdroppers of a network."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Which events of a sample have token counts (`usage`)."""

    include_usage: bool = False
    """The last one."""
    continuous_usage_stats: bool = False
    """All."""


def stream_options(name: str, value: Any) -> StreamOptions | None:
    """Check an object of `include_usage` and `continuous_usage_stats`; None if it asks for nothing."""
    if type(value) is StreamOptions:
        return value
    given = {key: boolean(name, item) for key, item in mapping(name, value).items() if item is not None}
    known = StreamOptions.__dataclass_fields__
    odd = next((key for key in given if key not in known and key not in _OTHERS), None)
    if odd is not None:
        raise invalid(name, f"has the keys `include_usage` and `continuous_usage_stats`, got {show(odd)}")
    found = StreamOptions(**{key: item for key, item in given.items() if key in known})
    return found if found != StreamOptions() else None
