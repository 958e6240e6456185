r"""Rows of JSON lines, JSON documents and plain text. A bad row is an error row, never an exception.

Lines end at b"\n" only: U+2028 and similar are ordinary characters inside a JSON string.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO

from batchgen.data.read.json_elements import ElementScanner
from batchgen.data.read.pieces import BLANK, MAX_LINE_BYTES, Peeked, Piece, PieceReader, lines_of, raw_lines
from batchgen.errors import ErrorCode, RowError
from batchgen.request.json_text import decode_utf8
from batchgen.request.rows.row_ids import readable_id
from batchgen.request.rows.row_memory import line_is_cut, parse_line

_ARRAY_OF_OBJECTS = re.compile(rb"\[[ \t\r\n]*[{\]]")
_BEFORE_VALUES = (b"[", b"{", b",", b":")
"""What a line of a JSON document ends with if the next one begins with a value."""
_LOOK = 1 << 20
"""Bytes that a file's form is known by."""


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


def _elements(stream: BinaryIO) -> Iterator[Piece]:
    yield from ElementScanner(Peeked(stream).read, b"", 1, MAX_LINE_BYTES).pieces()


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    return lines_of(raw_lines(stream))


_json = partial(PieceReader, parse=parse_line, is_cut=line_is_cut, id_of=readable_id)
json_rows = _json(_elements)
"""Rows of JSON text: an array of objects, or objects one after another, whatever is between them."""
json_line_rows = _json(partial(_json_pieces, document=False))
"""Rows of JSON lines, one per line that is not blank; a stream that is an array of objects is read as a document.

It is one if `[` and `{` are its first signs, unless its first line breaks off, as in `json_document_rows`.
"""
json_document_rows = _json(partial(_json_pieces, document=True))
"""Rows of a JSON document, as `json_rows`.

If its first line is an object, every line is read by itself: a bad line then spoils no other row. So it is if the first
line breaks off, and the second one begins with an object where a document has none.
"""
text_rows = PieceReader(_lines, _parse_text)
"""Rows of plain text: `{"text": line}` per line that is not blank, with its spaces, whatever it holds."""
prompt_line_rows = PieceReader(_lines, _parse_prompt)
"""As `text_rows`, but a line that is a JSON object is refused: the file most likely holds rows."""
