"""Dates and times as text, in one form for prompts, `extra`, exports and the terminal.

It is ISO 8601 with a space between date and time, and the digits of the type.

Examples: `2024-02-29`, `12:00:01.000250`, `2024-02-29 12:00:01.000000250`; a time stamp with a zone in UTC,
`2024-02-29 12:00:01Z`; a duration `PT90.500S`, and with months and days `P1M2DT0.000000000S`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.types as pat

_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}


def temporal_to_text(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """The column as strings if it holds dates, times, durations or intervals; any other column unchanged."""
    kind = column.type
    if pat.is_timestamp(kind):
        # In UTC: text with the offset of a zone depends on the zone tables of the machine.
        return (column if kind.tz is None else column.cast(pa.timestamp(kind.unit, "UTC"))).cast(pa.string())
    if pat.is_duration(kind):
        return _mapped(column.cast(pa.int64()), lambda ticks: "P" + _seconds(ticks, _DIGITS[kind.unit]))
    if pat.is_interval(kind):
        digits = _DIGITS["ns"]
        return _mapped(column, lambda value: f"P{value.months}M{value.days}D{_seconds(value.nanoseconds, digits)}")
    return column.cast(pa.string()) if pat.is_temporal(kind) else column


def _mapped(column: pa.Array | pa.ChunkedArray, text: Callable[[Any], str]) -> pa.Array:
    return pa.array([None if value is None else text(value) for value in column.to_pylist()], pa.string())


def _seconds(ticks: int, digits: int) -> str:
    whole, rest = divmod(abs(ticks), 10**digits)
    fraction = f".{rest:0{digits}}" if digits else ""
    return f"T{'-' if ticks < 0 else ''}{whole}{fraction}S"
