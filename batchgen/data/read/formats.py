"""The formats of input files: one `InputFormat` each, in `FORMATS`. A further format is one more entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa

from batchgen.data.read.jsonl import RowFilter, json_rows, text_rows
from batchgen.data.read.parquet import parquet_rows, parquet_schema
from batchgen.errors import InputError
from batchgen.request.raw_row import RawRow

ReadRows = Callable[[BinaryIO, str, int, RowFilter | None, frozenset[str]], Iterator[RawRow | None]]
"""(stream, file name for messages, index of its first row, predicate of wanted rows, columns whose binary values must
be UTF-8) -> one item per row, None for a row that is not wanted. A bad row is an item with an error, never an
exception; damage that ends the file is one `truncated_input` row."""


@dataclass(frozen=True, slots=True)
class InputFormat:
    """How the files of one format are recognised and read."""

    name: str
    suffixes: tuple[str, ...]
    rows: ReadRows
    schema: Callable[[BinaryIO, str], pa.Schema | None] | None = None
    """(stream, file name) -> names and types of the columns, None if they cannot be read; None: rows may have any
    fields."""
    magic: bytes = b""
    """First bytes of every file that is not compressed."""
    compressed: bool = True
    """Whether files may also end in .gz or .zst; otherwise the stream is seekable."""


def _no_columns(stream: BinaryIO, source: str) -> pa.Schema:
    return pa.schema([])


JSON_LINES = InputFormat("JSON lines", (".jsonl", ".ndjson", ".json"), json_rows)
FORMATS = (
    JSON_LINES,
    InputFormat("text", (".txt",), text_rows, _no_columns),
    InputFormat("Parquet", (".parquet",), parquet_rows, parquet_schema, b"PAR1", compressed=False),
)
SUFFIXES = {suffix: format for format in FORMATS for suffix in format.suffixes}
"""File name suffix -> format."""


def format_of(path: str, suffix: str, compressed: bool) -> InputFormat:
    """The format of a file, by its suffix in lower case without that of a compression.

    Raises:
        InputError: there is no such format, or it cannot be compressed.
    """
    found = SUFFIXES.get(suffix)
    if found is None or (compressed and not found.compressed):
        plain, others = (
            ", ".join(name for name, format in SUFFIXES.items() if format.compressed == flag) for flag in (True, False)
        )
        raise InputError(f"{path}: unknown kind of file; batchgen reads {plain} (each also .gz or .zst) and {others}.")
    return found
