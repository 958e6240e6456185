"""Parquet files of a job: one writer and one reader, with checksums over every byte and counts of nulls.

A reader never repairs: a byte that was not written, or a column that is missing, is an error of the file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, Self

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.checksums import CheckedStream, ChecksumWriter, read_checksums
from batchgen.data.durable_files import NO_FILE, part_errors
from batchgen.data.files import is_file, open_named, open_own
from batchgen.data.joined_groups import MAGIC, EncodedGroup, encode_group, joined_footer, metadata_at
from batchgen.data.lines import is_lines
from batchgen.data.schema import READABLE_VERSIONS, RUN_KEY, VERSION_KEY
from batchgen.errors import InputError
from batchgen.request.foreign_text import ForeignTextError, Kinds, read_json, typed

_RECORD: Kinds = {
    "fingerprint": (str, NoneType),
    "shard": (list, NoneType),
    "clock": (str, NoneType),
    "job": (dict, NoneType),
    "row_shapes": (str, NoneType),
    "timeline": (list, NoneType),
}
"""Types in the run record of a footer."""
NULLS_KEY = b"batchgen.nulls"
"""Footer key: the number of nulls of each column, a JSON object, as counted when the rows were written."""

_CHECKSUMS_KEY = b"batchgen.checksums"
"""Footer key: the number of bytes before the table of checksums, which are those of the row groups."""
_OF_WRITER = {NULLS_KEY, _CHECKSUMS_KEY}
"""Footer keys that a writer makes, which the schema of a file that was read has as well."""


class DamagedFile(InputError, OSError):
    """A file whose bytes are not those that were written. Like an error of Arrow about content it has no `errno`."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path} is damaged ({reason}). Put a good copy in its place, or run its command again (for hidden states "
            "with --retry-errors): the damaged file is then set aside, and its rows are computed again."
        )
        self.path = path
        self.reason = reason


class TableWriter:
    """Writer of tables of one schema to a Parquet file, which counts their nulls."""

    def __init__(self, stream: BinaryIO, schema: pa.Schema, **options: Any) -> None:
        """`options`: those of `encode_group` for the tables of `write_table`."""
        about = {key: value for key, value in (schema.metadata or {}).items() if key not in _OF_WRITER}
        self.schema: pa.Schema = schema.with_metadata(about)
        self._options = options
        self._stream = ChecksumWriter(stream)
        self._stream.write(MAGIC)
        self._groups: list[pq.FileMetaData] = []
        self.nulls: Counter[str] = Counter(dict.fromkeys(schema.names, 0))
        """Column -> number of nulls so far."""

    def write_table(self, table: pa.Table) -> None:
        """Write the rows of a table as one row group.

        Raises:
            ValueError: it has another schema. Types of one form in Parquet would be read as each other.
        """
        if not table.schema.equals(self.schema):
            raise ValueError(f"a table of {table.schema.names} has another schema than the file")
        self.write_group(encode_group(table, **self._options))

    def write_group(self, group: EncodedGroup) -> None:
        """Write a row group that is encoded already."""
        metadata = metadata_at(group, self._stream.tell())
        if self._groups:
            self._groups[0].append_row_groups(metadata)  # which keeps less than the whole
        else:
            self._groups.append(metadata)
        self._stream.write(group.data)
        self.nulls.update(group.nulls)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            keys = {NULLS_KEY: json.dumps(self.nulls).encode(), _CHECKSUMS_KEY: str(self._stream.tell()).encode()}
            with self._stream.footer():
                self._stream.write(joined_footer(self.schema, keys, self._groups))


def _end_of_groups(metadata: pq.FileMetaData) -> int:
    """Bytes of a file up to the end of its row groups: others if another program has rewritten it."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    columns = (group.column(number) for group in groups for number in range(group.num_columns))
    starts = ((each.dictionary_page_offset or each.data_page_offset, each.total_compressed_size) for each in columns)
    return max((start + size for start, size in starts), default=len(MAGIC))


def parquet_writer(stream: BinaryIO, schema: pa.Schema) -> TableWriter:
    """A writer with the settings of results files.

    Dictionaries only for short strings that repeat: for ids, texts and number lists they cost time and save no space.
    Statistics only for keys, so that one row can be found without reading the file.
    """
    return TableWriter(
        stream,
        schema,
        use_dictionary=["status", "finish_reason", "stop_kind", "error.code"],
        write_statistics=["row_index", "prompt_index", "sample_index", "status"],
    )


def states_group(table: pa.Table) -> EncodedGroup:
    """A row group of hidden states: byte-stream-split values compress well in short formats."""
    return encode_group(
        table,
        use_dictionary=["span", "dtype"],
        column_encoding={"values.list.element": "BYTE_STREAM_SPLIT"},
        write_statistics=["row_index", "prompt_index", "sample_index", "layer"],
    )


class StoredTable:
    """An open Parquet file, of which every byte is checked before it is used. Made by `open_parquet`.

    Raises:
        DamagedFile: (every method) the file is damaged.
        OSError: (every method) the file cannot be read; it has an `errno`.
    """

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path = path
        with _damage(path):
            checksums = read_checksums(stream)
            self.has_checksums = checksums is not None
            """Whether every byte has a checksum: not if an earlier version or another program wrote the file."""
            self._stream = CheckedStream(stream, checksums)
            self._file = pq.ParquetFile(self._stream, pre_buffer=False, page_checksum_verification=True)
            self.metadata: pq.FileMetaData = self._file.metadata
            self.schema: pa.Schema = self._file.schema_arrow
            self.about: Mapping[bytes, bytes] = self.metadata.metadata or {}
            """Footer keys with their values."""
            if checksums is None and self.about.get(_CHECKSUMS_KEY) == str(_end_of_groups(self.metadata)).encode():
                raise DamagedFile(path, "its table of checksums is missing")

    def __len__(self) -> int:
        rows: int = self.metadata.num_rows
        return rows

    @property
    def nulls(self) -> Counter[str] | None:
        """Column -> number of nulls, as counted when the file was written; None if it does not say."""
        with suppress(ValueError, TypeError, KeyError):
            return Counter(read_json(self.about[NULLS_KEY]))
        return None

    def group(self, number: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of one row group."""
        with _damage(self._path):
            return self._file.read_row_group(number, columns=columns, use_threads=False)

    def groups(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The rows, a row group at a time."""
        return (self.group(number, columns) for number in range(self.metadata.num_row_groups))

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows."""
        with _damage(self._path):
            return self._file.read(columns)

    def check(self) -> None:
        """Check every byte that has a checksum."""
        with _damage(self._path):
            self._stream.check()


@contextmanager
def open_parquet(path: Path) -> Iterator[StoredTable]:
    """Open a Parquet file, by stream: Arrow accepts file names in UTF-8 only.

    Raises:
        DamagedFile: its footer is damaged.
        OSError: it cannot be read.
    """
    with open_named(path) as stream:
        yield StoredTable(path, stream)


@contextmanager
def open_part(path: Path) -> Iterator[StoredTable]:
    """Open a committed part; a link is not followed.

    Raises:
        DamagedFile: the part is missing or damaged.
        OutputError: it cannot be read now.
    """
    try:
        with part_errors(path), open_own(path) as stream:
            yield StoredTable(path, stream)
    except NO_FILE as error:
        raise DamagedFile(path, "it is missing") from error


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except MemoryError:  # also the base class of ArrowMemoryError
        raise
    except OSError as error:
        if error.errno is not None or isinstance(error, DamagedFile):
            raise
        raise DamagedFile(path, _line(error)) from error
    except (pa.ArrowException, ValueError) as error:
        raise DamagedFile(path, _line(error)) from error


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def read_footer(path: Path, contents: str | None = None) -> dict[str, Any] | None:
    """The run record in the footer of a results file; None if there is no such file, or it is not batchgen's.

    With `contents`, the record of another file of a run, such as the hidden states.

    Raises:
        DamagedFile: the file was a Parquet file, and its footer is damaged.
        OutputError: the file cannot be read now.
    """
    with part_errors(path):
        if not is_file(path):
            return None  # opening a pipe would block
        with open_named(path) as stream:
            if stream.read(4) != MAGIC and not _ends_as_parquet(stream):
                return None
            about = StoredTable(path, stream).about
    if about.get(VERSION_KEY) not in READABLE_VERSIONS:
        return None
    with suppress(ForeignTextError, KeyError):
        footer = typed(read_json(about[RUN_KEY], unwritable=True), _RECORD)
        return footer if footer.get("contents") == contents else None
    return None


def intact_footer(path: Path, contents: str | None = None) -> dict[str, Any] | None:
    """As `read_footer`, and None if the footer is damaged."""
    try:
        return read_footer(path, contents)
    except DamagedFile:
        return None


def refuse_columns(path: Path, record: Mapping[str, Any] | None) -> None:
    """Refuse to read an output whose other columns are not there.

    Raises:
        InputError: `--columns` wrote it.
    """
    if columns := (record or {}).get("columns"):
        raise InputError(
            f"{path} holds only the columns that --columns named ({', '.join(columns)}), which any Parquet tool reads. "
            "batchgen show, export, verify, merge and --reuse need all: run its command without --columns."
        )


def keeps_rows(path: Path) -> bool:
    """Whether rows can be read back from an output: it is not JSON lines, nor made with `--columns`."""
    return not is_lines(path) and not (intact_footer(path) or {}).get("columns")


def _ends_as_parquet(stream: BinaryIO) -> bool:
    stream.seek(max(0, stream.seek(0, 2) - 4))
    return stream.read() == MAGIC
