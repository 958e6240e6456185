"""The id of a line that is no valid row, for its error row in the output."""

from __future__ import annotations

import json
import re
from typing import Any

from batchgen.request.fields import ID_NAMES
from batchgen.request.parser import given_id

_MAX_BYTES = 1 << 20
"""Longest line that is read again."""
_FIRST_KEY = re.compile(rf'\s*\{{\s*"({"|".join(ID_NAMES)})"\s*:\s*("(?:[^"\\]|\\.)*"|-?\d+)\s*[,}}]')
"""An id at the beginning of an object."""


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
    except (ValueError, RecursionError):
        start = _FIRST_KEY.match(text)
        found = [(start[1], _value(start[2]))] if start else []
    return given_id(dict(found)) if len(found) == 1 else None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
