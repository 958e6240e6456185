"""Memory of the values of a line or cell of JSON, estimated from its bytes before it is parsed.

Three bytes of text such as `[],` become a hundred bytes of values, and one character outside the basic plane makes all
others of its string four times as wide. Lines whose values would take more than `ROW_MEMORY` are refused.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from batchgen.errors import ErrorCode, RowError
from batchgen.request.json_text import is_cut, parse_json, parse_json_object

ROW_MEMORY: Final = 1 << 29
"""Most bytes that the values of one row may take, as estimated."""
_PER_BYTE: Final = 1 << 7
"""Most bytes of memory for a byte of text: shorter lines are not looked at."""
_BLOCK: Final = 1 << 20

_COSTS: Final = {b",": 32, b"[": 88, b"{": 232, b":": 32, b'"': 28}
"""Sign -> bytes of memory, of the value that it begins, ends or separates."""
_CONTINUED: Final = slice(0x80, 0xC0)
"""Bytes of UTF-8 that continue a character."""
_TWO_WIDE, _FOUR_WIDE = 0xC4, 0xF0
"""First bytes of characters that make all characters of their string two and four bytes wide."""


def check_memory(line: bytes) -> None:
    """Refuse a line whose values would take more than `ROW_MEMORY`.

    Raises:
        RowError: `invalid_json`.
    """
    if len(line) * _PER_BYTE > ROW_MEMORY and (size := estimated_memory(line)) > ROW_MEMORY:
        problem = f"its values take about {size >> 20} MiB; at most {ROW_MEMORY >> 20} MiB are allowed"
        raise RowError(ErrorCode.INVALID_JSON, f"{problem}: split the row")


def estimated_memory(line: bytes) -> int:
    """Bytes of memory that the values of a line take at most."""
    counts = np.zeros(256, np.int64)
    for start in range(0, len(line), _BLOCK):
        counts += np.bincount(np.frombuffer(line, np.uint8, min(_BLOCK, len(line) - start), start), minlength=256)
    width = 4 if counts[_FOUR_WIDE:].any() else 2 if counts[_TWO_WIDE:].any() else 1
    if counts[ord("\\")] and width < 4 and b"\\u" in line:
        width = 4 if b"\\ud" in line or b"\\uD" in line else 2
    characters = len(line) - int(counts[_CONTINUED].sum())
    return width * characters + sum(cost * int(counts[ord(sign)]) for sign, cost in _COSTS.items())


def parse_line(line: bytes) -> dict[str, Any]:
    """The object of a line, as by `parse_json_object`; refused by `check_memory` before it is parsed.

    Raises:
        RowError: see both.
    """
    check_memory(line)
    return parse_json_object(line)


def parse_cell(text: bytes) -> Any:
    """The JSON value of a table's cell, as by `parse_json`; refused by `check_memory` before it is parsed.

    Raises:
        RowError: see both.
    """
    check_memory(text)
    return parse_json(text)


def line_is_cut(line: bytes) -> bool:
    """As `is_cut`; a line that takes too much memory is not parsed again."""
    try:
        check_memory(line)
    except RowError:
        return False
    return is_cut(line)
