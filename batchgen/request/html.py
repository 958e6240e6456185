"""Tables for notebooks. Every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from batchgen.request.printable import printable

_CHARACTERS = 2000
"""Most characters of a cell."""
_ITEMS = 8
"""Most numbers of a list that are shown."""
_STYLE = "text-align: left; vertical-align: top; white-space: pre-wrap"


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> str:
    """A table, and a line of text below it."""
    lines = ["".join(f"<th style='{_STYLE}'>{_cell(each)}</th>" for each in head)] if head else []
    lines += ["".join(f"<td style='{_STYLE}'>{_cell(each)}</td>" for each in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>{body}</table>{f'<p>{_cell(note)}</p>' if note else ''}"


def _cell(value: object) -> str:
    text = printable(shown(value), keep="\n\t")
    return escape(text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS - 1]}…")


def shown(value: object) -> str:
    """A value as text; of a long list its first items and its length."""
    if value is None:
        return ""
    if isinstance(value, np.ndarray | list | tuple) and len(value) > _ITEMS:
        return f"{', '.join(map(str, value[:_ITEMS]))}, … ({len(value):,})"
    return ", ".join(map(str, value)) if isinstance(value, np.ndarray | list | tuple) else str(value)


def one_line(value: object, most: int = 60) -> str:
    """The `repr` of a value, shortened to `most` characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"
