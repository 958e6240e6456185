"""The formats of input files: one `InputFormat` each, in `FORMATS`. A further format is one more entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

import pyarrow as pa

from batchgen.data.read.delimited import TAB, delimited_rows, delimited_schema
from batchgen.data.read.jsonl import json_document_rows, json_line_rows, json_rows, prompt_line_rows, text_rows
from batchgen.data.read.parquet import arrow_rows, arrow_schema, parquet_rows, parquet_schema
from batchgen.data.read.pieces import RowsOfStream
from batchgen.errors import InputError


@dataclass(frozen=True, slots=True)
class InputFormat:
    """Recognition and readers of the files of one format."""

    key: str
    """Its name as the value of `--input-format`."""
    name: str
    suffixes: tuple[str, ...]
    rows: RowsOfStream
    """Reader of a file that the suffix says is of this format."""
    named_rows: RowsOfStream | None = None
    """Reader of a file that `--input-format` says is; None: the same."""
    schema: Callable[[BinaryIO, str], pa.Schema | None] | None = None
    """(stream, file name) -> names and types of the columns, None if they cannot be read; None: rows may have any
    fields."""
    magic: bytes = b""
    """First bytes of every file that is not compressed."""
    compressed: bool = True
    """Whether files may also end in .gz or .zst; otherwise the stream is seekable."""


JSON_LINES = InputFormat("jsonl", "JSON lines", (".jsonl", ".ndjson"), json_line_rows)
FORMATS = (
    JSON_LINES,
    InputFormat("json", "JSON", (".json",), json_document_rows, json_rows),
    InputFormat("csv", "CSV", (".csv",), delimited_rows, schema=delimited_schema),
    InputFormat(
        "tsv", "TSV", (".tsv",), partial(delimited_rows, delimiter=TAB), schema=partial(delimited_schema, delimiter=TAB)
    ),
    InputFormat("txt", "text", (".txt",), prompt_line_rows, text_rows, lambda stream, source: pa.schema([])),
    InputFormat("parquet", "Parquet", (".parquet",), parquet_rows, None, parquet_schema, b"PAR1", compressed=False),
    InputFormat("arrow", "Arrow", (".arrow",), arrow_rows, None, arrow_schema, compressed=False),
)
SUFFIXES = {suffix: format for format in FORMATS for suffix in format.suffixes}
"""File name suffix -> format."""
BY_KEY = {format.key: format for format in FORMATS}
"""Value of `--input-format` -> format."""


def format_of(path: str, suffix: str, compressed: bool) -> InputFormat:
    """The format of a file, by its suffix in lower case without that of a compression.

    Raises:
        InputError: there is no such format, or it cannot be compressed.
    """
    known = SUFFIXES.get(suffix)
    if known is None or (compressed and not known.compressed):
        plain, others = (
            ", ".join(name for name, format in SUFFIXES.items() if format.compressed == flag) for flag in (True, False)
        )
        raise InputError(
            f"{path}: unknown kind of file; batchgen reads {plain} (each also .gz or .zst) and {others}. "
            f"Name its format with --input-format {'|'.join(BY_KEY)}."
        )
    return known
