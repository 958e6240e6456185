"""The reasons of row errors: how many rows each has, and its first row."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.errors import ErrorCode
from batchgen.request.completion import Completion
from batchgen.request.printable import printable

_MAX_REASONS = 1000
"""Most reasons that are counted apart: a reason is a code and a field, whose names come from rows."""
_MAX_MESSAGE = 400


@dataclass(slots=True)
class Reason:
    """One reason of row errors."""

    code: ErrorCode
    first_row: int
    first_id: str
    message: str
    """The message of the first row, with its file and line."""
    rows: int = 0

    def __str__(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows:,} rows"
        message = printable(self.message)
        if len(message) > _MAX_MESSAGE:
            message = f"{message[:_MAX_MESSAGE]}..."
        return f"most frequent: {self.code} in {rows}, first in row {self.first_row} (id {self.first_id!r}): {message}"


class Reasons:
    """Counts row errors by code and field."""

    def __init__(self) -> None:
        self._found: dict[tuple[ErrorCode, str | None], Reason] = {}

    def add(self, completion: Completion, row_id: str) -> None:
        """Count the error of a row."""
        error = completion.error
        assert error is not None
        key = (error.code, error.param)
        if key not in self._found:
            if len(self._found) >= _MAX_REASONS:
                return
            self._found[key] = Reason(error.code, completion.row_index, row_id, error.message)
        self._found[key].rows += 1

    def commonest(self) -> str | None:
        """The reason that most rows have, as text; None without an error. Of equal ones the earliest."""
        ranked = sorted(self._found.values(), key=lambda reason: (-reason.rows, reason.first_row))
        return str(ranked[0]) if ranked else None
