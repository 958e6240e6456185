"""`RawRow`: one input row as read, before its fields are parsed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from batchgen.errors import ErrorCode, ErrorInfo

__all__ = ["RawRow"]

_EMPTY: Mapping[str, Any] = MappingProxyType({})


class RawRow(NamedTuple):
    """One input row. Exactly one of `value` and `error` is set."""

    index: int  # type: ignore[assignment]
    """0-based index among all rows of all files, without blank lines; independent of the selection."""
    source: str
    """Name of the file as given by the user, in UTF-8."""
    line: int
    """1-based line of a text file, or 1-based row of a Parquet file."""
    value: dict[str, Any] | None = None
    error: ErrorInfo | None = None
    displaced: Mapping[str, Any] = _EMPTY
    """Fields replaced by a named prompt or id column; they are carried as data and not parsed."""

    @classmethod
    def failed(cls, index: int, source: str, line: int, code: ErrorCode, problem: str) -> RawRow:
        """A row that cannot be read; the message names its file and line."""
        return cls(index, source, line, None, ErrorInfo(code, f"{source}, line {line}: {problem}"))
