"""Rows of files of text: each row is a piece of it, which ends where a line or an element ends."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, NamedTuple, Protocol

from batchgen.data.read.streams import DamagedStream
from batchgen.errors import ErrorCode, ErrorInfo, RowError, row_error
from batchgen.request.fields.named_columns import UNNAMED, NamedColumns
from batchgen.request.rows.raw_row import RawRow

MAX_LINE_BYTES = 1 << 28
"""Longest line in bytes; a longer one is an error row, so that a file without line ends does not fill the memory."""

BLANK = b" \t\r\n"
BOM = b"\xef\xbb\xbf"
_HEAD = 1 << 12

RowFilter = Callable[[int], bool]
"""Predicate of row indexes: rows that are not wanted are counted, but not parsed."""


class RowsOfStream(Protocol):
    """A reader of the rows of one file."""

    def __call__(
        self,
        stream: BinaryIO,
        source: str,
        first_index: int = 0,
        keep: RowFilter | None = None,
        columns: NamedColumns = UNNAMED,
    ) -> Iterator[RawRow | None]:
        """One item per row, None for a row that is not wanted.

        A bad row is an item with an error, never an exception; damage that ends the file is one `truncated_input` row.

        Args:
            stream: the file, from its beginning.
            source: name of the file in messages.
            first_index: index of the file's first row.
            keep: predicate of wanted row indexes; None for all rows.
            columns: the fields that options name.
        """


class Piece(NamedTuple):
    """Text of one row."""

    line: int
    """1-based line that it begins in."""
    text: bytes
    ended: bool
    """Whether its end was seen; otherwise the file ends with it."""


class Peeked:
    """A stream whose first bytes can be seen before they are read, without a byte order mark."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._read_some = stream.read1 if isinstance(stream, io.BufferedIOBase) else stream.read
        head = b""
        # One read at a time: a damaged stream first gives what comes before the damage.
        while not head.removeprefix(BOM).strip(BLANK) and (more := self._read_some(_HEAD)):
            head += more
        self._head = io.BytesIO(head.removeprefix(BOM))
        self._damage: DamagedStream | None = None
        """What ends the stream after the head."""
        self.first = head.removeprefix(BOM).lstrip(BLANK)[:1]
        """First byte that is not blank; empty for a blank stream."""

    def peek(self, size: int) -> bytes:
        """The beginning of the text, without blanks before it: about `size` bytes, or less where the stream ends."""
        head = bytearray(self._head.getvalue())
        try:
            while len(head) < size and (more := self._read_some(size - len(head))):
                head += more
        except DamagedStream as damage:
            self._damage = damage
        self._head = io.BytesIO(head)
        return bytes(head).lstrip(BLANK)

    def lines(self) -> Iterator[bytes]:
        """Lines with their ends; a longer one is cut into pieces of `MAX_LINE_BYTES`."""
        for line in iter(partial(self._head.readline, MAX_LINE_BYTES), b""):
            yield line if line.endswith(b"\n") else line + self._rest().readline(MAX_LINE_BYTES - len(line))
        yield from raw_lines(self._rest())

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; empty at the end only."""
        if data := self._head.read(size):
            return data
        self._rest()
        return self._read_some(size)

    def _rest(self) -> BinaryIO:
        """The stream after the head; raises the damage that was found while the head was read."""
        if self._damage is not None:
            raise self._damage
        return self._stream


def raw_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Lines with their ends; a longer one is cut into pieces of `MAX_LINE_BYTES`."""
    return iter(partial(stream.readline, MAX_LINE_BYTES), b"")


def lines_of(lines: Iterator[bytes]) -> Iterator[tuple[int, bytes, bool]]:
    """The lines that are not blank. A line that is too long is cut to `MAX_LINE_BYTES` and the rest skipped.

    A line loses a byte order mark at its begin: files that were joined have one at the begin of each.
    """
    for number, line in enumerate(lines, start=1):
        ended = line.endswith(b"\n")
        if not ended and len(line) == MAX_LINE_BYTES:
            for rest in lines:
                if rest.endswith(b"\n"):
                    break
        content = line.removeprefix(BOM)
        if content.strip(BLANK):
            yield number, content, ended  # the fields of a `Piece`, which takes longer to make


@dataclass(frozen=True, slots=True)
class PieceReader:
    """Reader of files whose rows are pieces of text, as a `RowsOfStream`."""

    pieces: Callable[[BinaryIO], Iterator[tuple[int, bytes, bool]]]
    """The texts of a file's rows, in order."""
    parse: Callable[[bytes], dict[str, Any]]
    """Gives a row's value, or raises its error."""
    is_cut: Callable[[bytes], bool] = lambda line: False
    """Whether a text that cannot be parsed ends too early."""
    id_of: Callable[[bytes], str | None] = lambda line: None
    """The id that can be read in a text that cannot be parsed."""

    def __call__(
        self,
        stream: BinaryIO,
        source: str,
        first_index: int = 0,
        keep: RowFilter | None = None,
        columns: NamedColumns = UNNAMED,
    ) -> Iterator[RawRow | None]:
        """The rows of a file."""
        pieces, parse = self.pieces(stream), self.parse
        index, number = first_index, 0
        while True:
            try:
                number, line, ended = next(pieces)
            except StopIteration:
                return
            except DamagedStream as damage:
                problem = f"{damage}; rows from here on are missing"
                wanted = keep is None or keep(index)
                yield RawRow.failed(index, source, number + 1, ErrorCode.TRUNCATED_INPUT, problem) if wanted else None
                return
            if keep is not None and not keep(index):
                yield None
            elif len(line) >= MAX_LINE_BYTES:
                problem = f"the line is longer than {MAX_LINE_BYTES >> 20} MiB"
                yield RawRow.failed(index, source, number, ErrorCode.INVALID_JSON, problem)
            else:
                try:
                    row = RawRow(index, source, number, parse(line))
                except Exception as error:
                    info = row_error(error, "reading the line")
                    info = _cut_short(info, line, ended) if isinstance(error, RowError) and self.is_cut(line) else info
                    row = RawRow.failed(index, source, number, info.code, info.message)._replace(id=self.id_of(line))
                yield row
            index += 1


def _cut_short(info: ErrorInfo, line: bytes, ended: bool) -> ErrorInfo:
    """Error of a row whose text ends too early: with its line, or, most likely because it was cut, with the file."""
    if ended:
        remedy = "write each object in one line, or run the file with --input-format json"
        return ErrorInfo(info.code, f"{info.message}; the line ends inside the object: {remedy}")
    if not line:
        return ErrorInfo(ErrorCode.TRUNCATED_INPUT, "the file ends before the array does; rows may be missing")
    return ErrorInfo(ErrorCode.TRUNCATED_INPUT, f"the file ends inside this row ({info.message})")
