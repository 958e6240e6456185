r"""Rows of JSON lines, JSON documents and plain text. A bad row is an error row, never an exception.

Lines end at b"\n" only: U+2028 and similar are ordinary characters inside a JSON string.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO

from batchgen.data.read.json_elements import ElementScanner
from batchgen.data.read.pieces import BLANK, MAX_LINE_BYTES, Peeked, RowFilter, lines_of, piece_rows, raw_lines
from batchgen.errors import ErrorCode, RowError
from batchgen.request.json_text import decode_utf8
from batchgen.request.named_columns import UNNAMED, NamedColumns
from batchgen.request.raw_row import RawRow
from batchgen.request.row_ids import readable_id
from batchgen.request.row_memory import line_is_cut, parse_line

_ARRAY_OF_OBJECTS = re.compile(rb"\[[ \t\r\n]*[{\]]")
_BEFORE_VALUES = (b"[", b"{", b",", b":")
"""What a line of a JSON document ends with if the next one begins with a value."""
_LOOK = 1 << 20
"""Bytes that a file's form is known by."""


def json_line_rows(
    stream: BinaryIO,
    source: str,
    first_index: int = 0,
    keep: RowFilter | None = None,
    columns: NamedColumns = UNNAMED,
) -> Iterator[RawRow | None]:
    """Rows of JSON lines, one per line that is not blank; a stream that is an array of objects is read as a document.

    It is one if `[` and `{` are its first signs, unless its first line breaks off, as in `json_document_rows`.
    """
    return piece_rows(
        _json_pieces(stream, document=False), source, first_index, keep, parse_line, line_is_cut, readable_id
    )


def json_document_rows(
    stream: BinaryIO,
    source: str,
    first_index: int = 0,
    keep: RowFilter | None = None,
    columns: NamedColumns = UNNAMED,
) -> Iterator[RawRow | None]:
    """Rows of a JSON document, as `json_rows`.

    If its first line is an object, every line is read by itself: a bad line then spoils no other row. So it is if the
    first line breaks off, and the second one begins with an object where a document has none.
    """
    return piece_rows(
        _json_pieces(stream, document=True), source, first_index, keep, parse_line, line_is_cut, readable_id
    )


def text_rows(
    stream: BinaryIO,
    source: str,
    first_index: int = 0,
    keep: RowFilter | None = None,
    columns: NamedColumns = UNNAMED,
) -> Iterator[RawRow | None]:
    """Rows of plain text: `{"text": line}` per line that is not blank, with its spaces, whatever it holds."""
    return piece_rows(lines_of(raw_lines(stream)), source, first_index, keep, _parse_text, lambda line: False)


def prompt_line_rows(
    stream: BinaryIO,
    source: str,
    first_index: int = 0,
    keep: RowFilter | None = None,
    columns: NamedColumns = UNNAMED,
) -> Iterator[RawRow | None]:
    """As `text_rows`, but a line that is a JSON object is refused: the file most likely holds rows."""
    return piece_rows(lines_of(raw_lines(stream)), source, first_index, keep, _parse_prompt, lambda line: False)


def _json_pieces(stream: BinaryIO, *, document: bool) -> Iterator[tuple[int, bytes, bool]]:
    """The texts of JSON rows: lines, or elements of a document."""
    peeked = Peeked(stream)
    is_array = peeked.first == b"["
    head = peeked.peek(_LOOK) if is_array or document else b""
    is_broken = _is_broken_line(head)
    if is_array and not is_broken and (document or _ARRAY_OF_OBJECTS.match(head)):
        yield from ElementScanner(peeked.read, b"", 1, MAX_LINE_BYTES).pieces()
        return
    lines = lines_of(peeked.lines())
    first = next(lines, None)
    if first is None:
        return
    if document and not is_broken and len(first[1]) < MAX_LINE_BYTES and not _is_object(first[1]):
        yield from ElementScanner(peeked.read, first[1], first[0], MAX_LINE_BYTES).pieces()
        return
    yield first
    yield from lines


def _is_broken_line(head: bytes) -> bool:
    """Whether text is lines of which the first breaks off: the next begins with an object where a document has none."""
    first, _, rest = head.partition(b"\n")
    if not rest.lstrip(BLANK).startswith(b"{") or first.rstrip(BLANK).endswith(_BEFORE_VALUES):
        return False
    elements = ElementScanner(io.BytesIO(first).read, b"", 1, MAX_LINE_BYTES).pieces()
    return not all(element.ended and _is_object(element.text) for element in elements)


def _is_object(text: bytes) -> bool:
    with suppress(RowError):
        parse_line(text)
        return True
    return False


def _parse_text(line: bytes) -> dict[str, Any]:
    return {"text": decode_utf8(line).removesuffix("\n").removesuffix("\r")}


def _parse_prompt(line: bytes) -> dict[str, Any]:
    if line.lstrip(BLANK).startswith(b"{") and _is_object(line):
        problem = "the line is a JSON object, not a prompt; run the file with --input-format jsonl"
        raise RowError(ErrorCode.AMBIGUOUS_PROMPT, f"{problem}, or with --input-format txt if it is the prompt's text")
    return _parse_text(line)
