"""Rows of CSV and TSV files, whose first row names the columns. Every value is text; an empty cell is absent.

Quoting is that of RFC 4180: a cell in quotation marks may hold separators, line ends and doubled quotation marks. In
fields of numbers, booleans, lists and objects the text is read as JSON.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, BinaryIO, Protocol

import pyarrow as pa

from batchgen.data.read.parquet import named_twice
from batchgen.data.read.pieces import RowFilter
from batchgen.data.read.streams import DamagedStream
from batchgen.errors import ErrorCode, InputError, RowError, row_error
from batchgen.request.fields.named_columns import UNNAMED, NamedColumns
from batchgen.request.rows.raw_row import RawRow, UnreadableRow
from batchgen.tables.text_fields import TextFields

TAB = "\t"
MAX_CELL_CHARACTERS = 1 << 26
"""Longest cell, so that a quotation mark without its other half does not fill the memory."""
MAX_ROW_CHARACTERS = 1 << 27
"""Longest row, with all its cells."""
_CUT = "unexpected end of data"
"""What the `csv` module says of a quoted cell that the file ends in."""


_CELL = r'(?:"([^"]*+(?:""[^"]*+)*+)"|((?!")[^{0}\r\n]*+)){0}'
"""A whole cell, quoted or plain, with the separator after it."""


class _Reader(Protocol):
    """A reader of the `csv` module."""

    line_num: int

    def __next__(self) -> list[str]: ...

    def __iter__(self) -> Iterator[list[str]]: ...


class _Lines(Iterator[str]):
    """Lines that go on after an error, which a generator does not."""

    def __init__(self, first: str, read: Callable[[], str]) -> None:
        self._first = first
        self._read = read

    def __next__(self) -> str:
        line, self._first = self._first or self._read(), ""
        if not line:
            raise StopIteration
        return line


class _Cells:
    """The rows of a file as lists of cells, the header first."""

    def __init__(self, stream: BinaryIO, delimiter: str | None) -> None:
        """`delimiter`: None for a comma, or a semicolon if the first line has no comma."""
        csv.field_size_limit(max(MAX_CELL_CHARACTERS, csv.field_size_limit()))
        # Bytes that are not UTF-8 become surrogates, so that they spoil their own row only.
        self._text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
        self._delimiter = delimiter
        self._reader: _Reader | None = None
        self._read: list[str] = []
        """Lines of the last row, as far as they have been read."""
        self.ended = True
        """Whether the last row ends in a line end."""
        self._row_characters = 0
        self.line = 1
        """Line that the last row begins in."""

    def _next_line(self) -> str:
        """The next line; an empty text at the end.

        Raises:
            csv.Error: the row is too long; a longer line is skipped.
        """
        line = self._text.readline(MAX_ROW_CHARACTERS + 1)
        self.ended = line.endswith(("\n", "\r"))
        self._row_characters += len(line)
        if self._row_characters <= MAX_ROW_CHARACTERS:
            if not self._read:  # the first of a row; files that were joined have a byte order mark at the begin of each
                line = line.removeprefix("\ufeff")
            self._read.append(line)
            return line
        del line
        while not self.ended and (rest := self._text.readline(1 << 20)):
            self.ended = rest.endswith(("\n", "\r"))
        raise csv.Error(f"it is longer than {MAX_ROW_CHARACTERS} characters")

    def close(self) -> None:
        """Leave the stream to its owner."""
        self._text.detach()

    def next(self) -> list[str] | None:
        """The next row that is not blank; None at the end.

        Raises:
            csv.Error: the row is malformed; the next one may be read.
            DamagedStream: the file ends early.
        """
        self._row_characters = 0
        if self._reader is None:
            first = self._next_line()
            self._delimiter = self._delimiter or (";" if ";" in first and "," not in first else ",")
            self._reader = csv.reader(_Lines(first, self._next_line), delimiter=self._delimiter, strict=True)
        while True:
            self.line = self._reader.line_num + 1
            self._read.clear()
            cells = next(self._reader, None)
            if cells is None or cells:
                return cells

    def before_break(self) -> list[str]:
        """The cells of a malformed row before the one that it breaks in."""
        cell = re.compile(_CELL.format(re.escape(self._delimiter or ",")))
        text, at, cells = "".join(self._read), 0, list[str]()
        while match := cell.match(text, at):
            quoted, plain = match.groups()
            cells.append(plain if quoted is None else quoted.replace('""', '"'))
            at = match.end()
        return cells


def _header(cells: _Cells, source: str) -> list[str]:
    """Names of the columns; none for an empty file. A malformed header, or a column named twice, is refused."""
    try:
        names = [name.strip() for name in cells.next() or ()]
    except csv.Error as error:
        raise InputError(f"{source}: the first row, which names the columns, cannot be read ({error}).") from None
    if any(_undecoded(name) for name in names):
        raise InputError(f"{source} is not UTF-8. Convert it, for example: iconv -f WINDOWS-1252 -t UTF-8.")
    if (twice := named_twice(names)) is not None:
        raise InputError(f"{source}: two columns are named {twice!r}; rename one of them.")
    return names


def _undecoded(text: str) -> bool:
    return not text.isascii() and any("\udc80" <= character <= "\udcff" for character in text)


def delimited_schema(stream: BinaryIO, source: str, *, delimiter: str | None = None) -> pa.Schema | None:
    """Names of the columns, all of them strings; None if the file ends before them.

    Raises:
        InputError: the first row is malformed, or names a column twice.
    """
    try:
        with closing(_Cells(stream, delimiter)) as cells:
            return pa.schema([(name, pa.string()) for name in _header(cells, source)])
    except DamagedStream:
        return None


def delimited_rows(
    stream: BinaryIO,
    source: str,
    first_index: int = 0,
    keep: RowFilter | None = None,
    columns: NamedColumns = UNNAMED,
    *,
    delimiter: str | None = None,
) -> Iterator[RawRow | None]:
    """Rows of a CSV stream, as a `RowsOfStream`, read in bounded memory.

    A row with another number of cells than the header is an error row; so is a last row that the file ends in.
    `delimiter`: separator of the cells; None for a comma, or a semicolon if the header has no comma.
    """
    with closing(_Cells(stream, delimiter)) as cells:
        yield from _raw_rows(cells, source, first_index, keep, columns)


def _raw_rows(
    cells: _Cells, source: str, index: int, keep: RowFilter | None, columns: NamedColumns
) -> Iterator[RawRow | None]:
    names, fields = list[str](), None
    while True:
        wanted = keep is None or keep(index)
        try:
            if fields is None:
                names = _header(cells, source)
                fields = TextFields(names, scalars=True, named=columns.fields())
            row = cells.next()
            if row is None:
                return
            if wanted:
                yield RawRow(index, source, cells.line, _value(names, row, cells.ended, fields))
        except DamagedStream as damage:
            problem = f"{damage}; rows from here on are missing"
            yield RawRow.failed(index, source, cells.line, ErrorCode.TRUNCATED_INPUT, problem) if wanted else None
            return
        except csv.Error as error:
            if wanted:
                failed = RawRow.failed(index, source, cells.line, *_described(error))
                yield failed.with_readable(_readable(names, cells.before_break()))
        except UnreadableRow as error:
            failed = RawRow.failed(index, source, cells.line, error.info.code, error.info.message)
            yield failed.with_readable(error.readable)
        if not wanted:
            yield None
        index += 1


def _described(error: csv.Error) -> tuple[ErrorCode, str]:
    if str(error) == _CUT:
        return ErrorCode.TRUNCATED_INPUT, "the file ends inside a quoted cell of this row; a quotation mark is missing"
    return ErrorCode.INVALID_JSON, f"the row is not CSV ({error}); quote cells as RFC 4180 says"


def _value(names: list[str], cells: list[str], ended: bool, fields: TextFields) -> dict[str, Any]:
    """The fields of a row; `UnreadableRow` if a cell cannot be read, or there are too many or too few."""
    try:
        return fields.read(_row(names, cells, ended))
    except Exception as error:
        raise UnreadableRow(row_error(error, "reading the row's cells"), _sure(names, cells, ended)) from None


def _sure(names: list[str], cells: list[str], ended: bool) -> dict[str, str]:
    """The cells of a row that are those of their columns, whatever is wrong with the others."""
    sure = cells
    if len(cells) != len(names):  # a cell may be missing, or too many, from the second on; a cut row lacks its end
        sure = cells[:1] if ended or len(cells) > len(names) else cells[:-1]
    return _readable(names, sure)


def _readable(names: list[str], cells: list[str]) -> dict[str, str]:
    """The values of the first columns."""
    return {name: cell for name, cell in zip(names, cells, strict=False) if cell and not _undecoded(cell)}


def _row(names: list[str], cells: list[str], ended: bool) -> dict[str, str]:
    if any(map(_undecoded, cells)):
        raise RowError(ErrorCode.INVALID_UNICODE, "a cell of this row is not UTF-8")
    if len(cells) != len(names):
        problem = f"the row has {len(cells)} cells for {len(names)} columns"
        if not ended and len(cells) < len(names):
            raise RowError(ErrorCode.TRUNCATED_INPUT, f"the file ends inside this row ({problem})")
        raise RowError(ErrorCode.INVALID_JSON, problem)
    return {name: cell for name, cell in zip(names, cells, strict=True) if cell}
