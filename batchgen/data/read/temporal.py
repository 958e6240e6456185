"""Dates and times as text for JSON: ISO 8601 with a space between date and time and full precision.

Examples: `2024-02-29`, `2024-02-29 12:00:01.000000250Z`. Prompts, `extra`, exports and the terminal use the same form.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as pat


def temporal_to_text(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """The column with dates, times and durations, at any depth, converted to strings.

    Raises:
        pa.ArrowException: a value cannot be converted, such as one in an unknown time zone.
    """
    return column.cast(_as_text(column.type)) if _has_time(column.type) else column


def _has_time(kind: pa.DataType) -> bool:
    if pat.is_temporal(kind):
        return True
    return any(_has_time(kind.field(i).type) for i in range(kind.num_fields))


def _as_text(kind: pa.DataType) -> pa.DataType:
    """The type with dates, times and durations replaced by strings, as Python's types have no nanoseconds."""
    if pat.is_temporal(kind):
        return pa.string()
    if pat.is_struct(kind):
        return pa.struct([field.with_type(_as_text(field.type)) for field in kind])
    if pat.is_map(kind):
        return pa.map_(_as_text(kind.key_type), _as_text(kind.item_type))
    if pat.is_list(kind) or pat.is_large_list(kind):
        return pa.list_(_as_text(kind.value_type))
    if pat.is_fixed_size_list(kind):
        return pa.list_(_as_text(kind.value_type), kind.list_size)
    return kind
