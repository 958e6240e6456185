"""Durable files: written under a temporary name, fsynced, renamed, the folder fsynced. And their errors in words."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.schema import RUN_KEY, SCHEMA_VERSION, VERSION_KEY
from batchgen.errors import OutputError

__all__ = [
    "open_parquet",
    "output_errors",
    "parquet_writer",
    "part_errors",
    "read_footer",
    "refuse_existing",
    "refuse_special",
    "states_writer",
    "sync_file",
    "sync_folder",
    "write_durably",
]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says about writing `path` into an `OutputError` with its remedy."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            remedy = "Free some space and run the same command again: committed rows are kept."
        elif error.errno in _FORBIDDEN:
            remedy = "Check the permissions, or name another place with -o."
        else:
            remedy = "Check the disk and run the same command again: committed rows are kept."
        raise OutputError(f"{path} cannot be written ({reason}). {remedy}") from error


@contextmanager
def part_errors(part: Path) -> Iterator[None]:
    """Tell a committed part that is damaged from one that cannot be read now, whose rows are as good as ever.

    What the operating system says of reading has an errno, what Arrow and this package say of the content has none.

    Raises:
        OutputError: no permission, a failing disk or too little memory: it says nothing of the part.
        OSError, pa.ArrowException, ValueError, KeyError: the part is damaged, or is not there.
    """
    try:
        yield
    except MemoryError as error:  # Arrow's own is one too
        raise OutputError(
            f"{part} cannot be read (not enough memory). Free some and run the same command again: committed rows "
            "are kept."
        ) from error
    except OSError as error:
        if error.errno is None or error.errno == errno.ENOENT:
            raise
        remedy = "Check the permissions" if error.errno in _FORBIDDEN else "Check the disk"
        raise OutputError(
            f"{part} cannot be read ({error.strerror or error}). {remedy} and run the same command again: committed "
            "rows are kept."
        ) from error


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make what was written to a file durable.

    Raises:
        OutputError: the disk is full, and the like.
    """
    with output_errors(path), path.open("rb") as stream:
        os.fsync(stream.fileno())


def write_durably(
    path: Path,
    write: Callable[[BinaryIO], None],
    temporary: Path | None = None,
    before: Callable[[], None] | None = None,
) -> None:
    """Let `write` fill a temporary file, then put it in `path`'s place: at every moment the old content or the new.

    Args:
        path: the final name.
        write: fills the file; when it raises, the temporary file is removed and `path` is as it was.
        temporary: the name meanwhile, on the same file system; `path` with `.tmp` when None.
        before: called when the whole file is durable, before it takes its place.

    Raises:
        OutputError: disk full, no permission and the like.
    """
    temporary = temporary or path.with_name(path.name + ".tmp")
    with output_errors(path):
        try:
            with temporary.open("wb") as stream:
                write(stream)
                stream.flush()
                os.fsync(stream.fileno())
            if before is not None:
                before()
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def refuse_special(path: Path) -> None:
    """Refuse a name that no file can take the place of: even --overwrite would replace a device by a file.

    Raises:
        OutputError: it is a folder, a device, a pipe or a socket.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a folder. Name a file with -o.")
    if path.exists() and not path.is_file():
        raise OutputError(f"{path} is not a regular file, and cannot be replaced by one. Name a file with -o.")


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Refuse a name that something stands under, unless it is a file that may be replaced.

    Raises:
        OutputError: it exists.
    """
    refuse_special(path)
    if path.exists() and not overwrite:
        raise OutputError(f"{path} exists. Replace it with --overwrite, or name another with -o.")


@contextmanager
def parquet_writer(stream: BinaryIO, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """A writer with the settings of every results file; leaving the block writes the footer, unless by an exception.

    Dictionaries only for the few short strings that repeat: on ids, texts and number lists they cost time and save
    nothing. Statistics only for keys, so that one row is found without reading the file.
    """
    writer = pq.ParquetWriter(
        stream,
        schema,
        compression="zstd",
        use_dictionary=["status", "finish_reason", "stop_kind", "error.code"],
        write_statistics=["row_index", "prompt_index", "sample_index", "status"],
        write_page_checksum=True,
    )
    with _closing(writer):
        yield writer


@contextmanager
def states_writer(stream: BinaryIO, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """A writer for files of hidden states: values split by byte, so that zstd finds the zeros of short formats."""
    writer = pq.ParquetWriter(
        stream,
        schema,
        compression="zstd",
        use_dictionary=["span", "dtype"],
        column_encoding={"values.list.element": "BYTE_STREAM_SPLIT"},
        write_statistics=["row_index", "prompt_index", "sample_index", "layer"],
        write_page_checksum=True,
    )
    with _closing(writer):
        yield writer


@contextmanager
def _closing(writer: pq.ParquetWriter) -> Iterator[None]:
    try:
        yield
        writer.close()
    except BaseException:
        # Left open it would write its footer when collected, into a stream that is closed by then.
        writer.is_open = False
        raise


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """A Parquet file, to read from inside the block. Given its name, Arrow would take only one in UTF-8."""
    with path.open("rb") as stream, pq.ParquetFile(stream) as file:
        yield file


def read_footer(path: Path, contents: str | None = None) -> dict[str, Any] | None:
    """What the footer of a results file says of its run; None when there is no such file, or it is not a whole one.

    With `contents`, that of another file of a run, such as the hidden states.
    """
    if not path.is_file():
        return None  # a pipe would be waited for
    try:
        with path.open("rb") as stream:
            metadata: Mapping[bytes, bytes] = pq.ParquetFile(stream).metadata.metadata or {}
        if metadata.get(VERSION_KEY) != SCHEMA_VERSION.encode():
            return None
        footer = json.loads(metadata[RUN_KEY])
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return None
    return footer if isinstance(footer, dict) and footer.get("contents") == contents else None
