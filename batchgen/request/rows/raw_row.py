"""`RawRow`: one input row as read, before its fields are parsed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from batchgen.errors import ErrorCode, ErrorInfo, RowError
from batchgen.request.rows.row_ids import given_id

_EMPTY: Mapping[str, Any] = MappingProxyType({})


class UnreadableRow(RowError):
    """A row that cannot be read as a whole."""

    def __init__(self, error: ErrorInfo, readable: Mapping[str, Any]) -> None:
        """`readable`: the fields that can be read."""
        super().__init__(error.code, error.message, error.param)
        self.readable = readable


class RawRow(NamedTuple):
    """One input row and its place in the input. Exactly one of `value` and `error` is set."""

    index: int  # type: ignore[assignment]
    """0-based index among all rows of all files, without blank lines; independent of the selection."""
    source: str = ""
    """Name of the file as given by the user, in UTF-8; empty for a row that is not from a file."""
    line: int = 0
    """1-based line of a text file, or 1-based row of a Parquet file."""
    value: Mapping[str, Any] | None = None
    error: ErrorInfo | None = None
    displaced: Mapping[str, Any] = _EMPTY
    """Fields replaced by a named prompt or id column; they are carried as data and not parsed."""
    id: str | None = None
    """The id of a row that cannot be read, if that can be."""
    readable: Mapping[str, Any] = _EMPTY
    """Of a row that cannot be read as a whole: the fields that can be, among them its id and carried fields."""
    unit: Literal["line", "row"] = "line"
    """What `line` counts, for messages."""

    @classmethod
    def failed(cls, index: int, source: str, line: int, code: ErrorCode, problem: str) -> RawRow:
        """A row of a text file that cannot be read."""
        return cls(index, source, line).with_error(code, problem)

    def with_error(self, code: ErrorCode, problem: str) -> RawRow:
        """The row as one that cannot be read; the message names its place."""
        return self._replace(value=None, error=ErrorInfo(code, f"{self._place}{problem}"))

    @property
    def _place(self) -> str:
        return f"{self.source}, {self.unit} {self.line}: "

    @property
    def fields(self) -> Mapping[str, Any]:
        """The row's fields, as far as they can be read."""
        return self.readable if self.value is None else self.value

    def with_readable(self, fields: Mapping[str, Any]) -> RawRow:
        """The failed row with the fields that can be read."""
        return self._replace(readable=fields, id=given_id(fields))

    def locate(self, error: ErrorInfo) -> ErrorInfo:
        """The error with the row's file and line in front of its message, unless the reader has named them."""
        place = self._place
        return error if error.message.startswith(place) else replace(error, message=place + error.message)
