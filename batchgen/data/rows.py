"""`RawRow`: one input row as read, before anything is made of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from batchgen.errors import ErrorCode, ErrorInfo

__all__ = ["RawRow"]

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class RawRow(NamedTuple):
    """One input row: a value, or the reason why there is none. Exactly one of `value` and `error` is set."""

    index: int  # type: ignore[assignment]
    """Place among all rows of all files, from 0, blank lines not counted. A selection leaves it as it is."""
    source: str
    """The file, as the user named it, in UTF-8."""
    line: int
    """1-based line of a text file, 1-based row of a Parquet file."""
    value: dict[str, Any] | None = None
    error: ErrorInfo | None = None
    displaced: Mapping[str, Any] = _NOTHING
    """Fields that gave way to a named prompt or id column. They are data to carry, not fields to obey."""

    @classmethod
    def failed(cls, index: int, source: str, line: int, code: ErrorCode, problem: str) -> RawRow:
        """A row that cannot be read; the message says where it stands."""
        return cls(index, source, line, None, ErrorInfo(code, f"{source}, line {line}: {problem}"))
