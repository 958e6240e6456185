"""Objects of JSON documents of any length, found without reading a document whole: arrays of objects, and objects one
after another, with or without white space or commas between them.

The scanner finds where an element ends, and nothing more; each element is parsed by itself. JSON allows no line end in
a string, so an element with such a string ends there, and one bad row does not swallow those after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from batchgen.data.read.pieces import BOM, Piece

_TOKEN = re.compile(rb'"[^"\\\n]*+(?:\\[^\n][^"\\\n]*+)*+"|["{}\[\],\n]')
"""A whole string, or a sign of structure; a quotation mark alone begins a string that the buffer does not end."""
_BLANK = b" \t\r\n,"
_LEADING = re.compile(rb"[ \t\r\n,]*+")
_FIRST_READ = 1 << 16


class ElementScanner:
    """Cuts the text of JSON documents into elements, in bounded memory."""

    def __init__(self, read: Callable[[int], bytes], head: bytes, line: int, limit: int) -> None:
        """`read`: reads up to so many bytes; `head`: text read before, from line `line` on; `limit`: longest element.

        A longer element is cut to `limit` bytes.
        """
        self._read = read
        self._buffer = head
        self._start = self._at = 0
        """Where the current element begins, and where scanning goes on."""
        self._line, self._start_line = line, line
        self._limit = limit
        self._depth = self._top = 0
        """Open brackets, and how many of them are open between elements: 1 in an array."""

    def pieces(self) -> Iterator[Piece]:
        """The elements, in order. An array that is not closed gives one more piece, which has not ended."""
        while True:
            yield from self._scan()
            if len(self._buffer) - self._start >= self._limit:
                text = self._buffer[self._start : self._start + self._limit]
                yield Piece(self._start_line + self._blank_lines(), text, True)
                self._start = len(self._buffer)
                self._skip_line()
                continue
            kept = self._buffer[self._start :]
            more = self._read(max(_FIRST_READ, len(kept)))
            self._buffer, self._at, self._start = kept + more, self._at - self._start, 0
            if not more:
                break
        rest = self._buffer.strip(_BLANK)
        if rest or self._top:
            yield Piece(self._start_line + self._blank_lines(), rest, False)
        if rest and self._top and self._depth == self._top:
            yield Piece(self._line, b"", False)

    def _scan(self) -> Iterator[Piece]:
        """Elements that end in the buffer."""
        buffer = self._buffer
        while match := _TOKEN.search(buffer, self._at):
            sign, self._at = match[0], match.end()
            if sign == b"\n":
                self._line += 1
                if self._depth == 0:
                    yield from self._cut(self._at, self._at)
            elif sign == b'"':
                end = buffer.find(b"\n", self._at)
                if end < 0:
                    self._at -= 1
                    return
                yield from self._cut(end, end)  # the string has a line end in it
                self._depth, self._at = self._top, end
            elif sign in b"{[":
                yield from self._open(sign == b"[")
            elif sign in b"}]":
                yield from self._close()
            elif sign == b"," and self._depth == self._top:
                yield from self._cut(self._at - 1, self._at)
        self._at = len(buffer)

    def _open(self, is_list: bool) -> Iterator[Piece]:
        if self._depth == 0:
            yield from self._cut(self._at - 1, self._at - 1)  # text before it
            if is_list:
                self._top = 1
                self._start = self._at
        self._depth += 1

    def _close(self) -> Iterator[Piece]:
        if self._depth == self._top == 1:
            yield from self._cut(self._at - 1, self._at)
            self._depth = self._top = 0
        elif self._depth > self._top:
            self._depth -= 1
            if self._depth == 0:
                yield from self._cut(self._at, self._at)

    def _cut(self, end: int, after: int) -> Iterator[Piece]:
        """The element before `end`, unless it is blank; the next one begins at `after`."""
        text = self._buffer[self._start : end].strip(_BLANK)
        if text and text != BOM:  # as between documents that were joined
            yield Piece(self._start_line + self._blank_lines(), text, True)
        self._start, self._start_line = after, self._line

    def _blank_lines(self) -> int:
        """Line ends before the current element's text."""
        leading = _LEADING.match(self._buffer, self._start)
        return leading[0].count(b"\n") if leading else 0

    def _skip_line(self) -> None:
        """Go on at the next line end, where no string can be open."""
        while (end := self._buffer.find(b"\n", self._start)) < 0:
            self._start = self._at = 0
            self._buffer = self._read(_FIRST_READ)
            if not self._buffer:
                return
        self._start, self._at, self._depth = end, end, self._top
        self._start_line = self._line
