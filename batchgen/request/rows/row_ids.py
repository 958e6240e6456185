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
from batchgen.request.foreign_text import ForeignTextError, has_surrogate, read_json

_MAX_BYTES = 1 << 20
"""Longest line that is read again."""
_FIRST_KEY = re.compile(rf'\s*\{{\s*"({"|".join(ID_NAMES)})"\s*:\s*("(?:[^"\\]|\\.)*"|-?\d+)\s*[,}}]')
"""An id at the beginning of an object."""


def row_id(value: Any, row_index: int) -> str:
    """Id of an output row, also for an invalid input row: the row's id if valid, otherwise `row-<index>`."""
    own = given_id(value) if isinstance(value, Mapping) else None
    return f"row-{row_index}" if own is None else own


def given_id(row: Mapping[str, Any]) -> str | None:
    """The id that a valid or invalid row gives; None if it has no valid one, or two."""
    with suppress(RowError):
        ids = {field_checks.row_id(name, row[name]) for name in ID_NAMES if row.get(name) is not None}
        if len(ids) == 1 and ((text := ids.pop()).isascii() or not has_surrogate(text)):
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
        pairs = [pair for pair in value if pair[0] in ID_NAMES] if type(value) is _Pairs else []
    except (ValueError, RecursionError):  # whatever is wrong with it: only its id is looked for
        start, pairs = _FIRST_KEY.match(text), []
        with suppress(ForeignTextError):
            pairs = [(start[1], read_json(start[2]))] if start else []
    return given_id(dict(pairs)) if len(pairs) == 1 else None
