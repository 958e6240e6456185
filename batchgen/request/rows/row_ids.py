"""Ids of rows, also of those that are not valid, for their error rows in the output."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from batchgen.errors import RowError
from batchgen.request.fields import field_checks
from batchgen.request.fields.declared import ID_NAMES
from batchgen.request.foreign_text import ForeignTextError, read_json

_MAX_BYTES = 1 << 20
"""Longest line that is read again."""
_FIRST_KEY = re.compile(rf'\s*\{{\s*"({"|".join(ID_NAMES)})"\s*:\s*("(?:[^"\\]|\\.)*"|-?\d+)\s*[,}}]')
"""An id at the beginning of an object."""


def row_id(value: Any, row_index: int) -> str:
    """Id of an output row, also for an invalid input row: the row's id if valid, otherwise `row-<index>`."""
    found = given_id(value) if isinstance(value, Mapping) else None
    return f"row-{row_index}" if found is None else found


def given_id(row: Mapping[str, Any]) -> str | None:
    """The id that a valid or invalid row gives; None if it has no valid one, or two."""
    with suppress(RowError):
        found = {field_checks.row_id(name, row[name]) for name in ID_NAMES if row.get(name) is not None}
        if len(found) == 1 and not _has_surrogate(text := found.pop()):
            return text
    return None


class _Pairs(list[Any]):
    """The (key, value) pairs of an object, in which repeated keys stay apart."""


def readable_id(line: bytes) -> str | None:
    """The id in a line that cannot be used: of an object with NaN or repeated keys, or before the place of an error."""
    if len(line) > _MAX_BYTES:
        return None
    text = line.decode(errors="surrogateescape")
    try:
        value = json.loads(text, object_pairs_hook=_Pairs)
        found = [pair for pair in value if pair[0] in ID_NAMES] if type(value) is _Pairs else []
    except (ValueError, RecursionError):  # whatever is wrong with it: only its id is looked for
        start = _FIRST_KEY.match(text)
        found = [(start[1], _value(start[2]))] if start else []
    return given_id(dict(found)) if len(found) == 1 else None


def _value(text: str) -> Any:
    try:
        return read_json(text)
    except ForeignTextError:
        return None


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text) if not text.isascii() else False
