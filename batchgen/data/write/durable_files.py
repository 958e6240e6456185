"""Durable file writes (temporary name, fsync, rename, fsync of the folder), Parquet writers, and I/O error messages."""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.files import (
    exists,
    is_file,
    open_named,
    open_new,
    remove_file,
    rename,
    status_of,
    sync_folder,
    sync_stream,
)
from batchgen.data.write.schema import READABLE_VERSIONS, RUN_KEY, VERSION_KEY
from batchgen.errors import OutputError
from batchgen.request.foreign_text import Kinds, read_json, typed

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_RECORD: Kinds = {
    "fingerprint": (str, NoneType),
    "shard": (list, NoneType),
    "clock": (str, NoneType),
    "job": (dict, NoneType),
    "row_shapes": (str, NoneType),
}
"""Types in the run record of a footer."""
STATE: Kinds = {
    "fingerprint": str,
    "info": dict,
    "overwrite": bool,
    "emptied_by": (str, NoneType),
    "replaces": (int, NoneType),
    "clock": (str, NoneType),
}
"""Types in the run.json of a work folder."""
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` while writing `path` into an `OutputError` with a remedy."""
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
    """Distinguish a damaged part from one that is intact but cannot be read now.

    Errors of the operating system have an errno; errors of Arrow and of this package about the content have none.

    Raises:
        OutputError: the part cannot be read: no permission, a failing disk or too little memory.
        OSError, pa.ArrowException, ValueError, KeyError: the part is damaged or missing.
    """
    try:
        yield
    except MemoryError as error:  # also the base class of ArrowMemoryError
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


def damaged_part(part: Path, error: BaseException) -> OutputError:
    """The error for a part that is damaged, with the remedy."""
    return OutputError(
        f"{part} is damaged ({error}). Remove it and run the same command again: its rows are computed again."
    )


def write_durably(
    path: Path,
    write: Callable[[BinaryIO], object],
    temporary: Path | None = None,
    before_rename: Callable[[], None] | None = None,
) -> None:
    """Write a temporary file with `write`, then rename it to `path`: at every moment `path` is the old file or the new.

    Args:
        path: the final name.
        write: writes the content; if it raises, the temporary file is removed and `path` is unchanged.
        temporary: the temporary name, on the same file system; `path` with `.tmp` if None.
        before_rename: called when the temporary file is durable, before the rename.

    Raises:
        OutputError: the disk is full, permissions are missing, or another I/O error.
    """
    with output_errors(path):
        replace_durably(path, write, temporary or path.with_name(path.name + ".tmp"), before_rename)


def replace_durably(
    path: Path,
    write: Callable[[BinaryIO], object],
    temporary: Path,
    before_rename: Callable[[], None] | None = None,
) -> None:
    """`write_durably`, which raises the errors of the operating system as they are.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        with open_new(temporary) as stream:
            write(stream)
            sync_stream(stream)
        if before_rename is not None:
            before_rename()
        rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            remove_file(temporary)
        raise
    sync_folder(path.parent)


def refuse_special(path: Path) -> None:
    """Refuse an output path that is not a regular file: a rename would replace even a device.

    Args:
        path: the path, from `followed`.

    Raises:
        OutputError: it is a folder, a device, a pipe or a socket, or a link that is not followed.
    """
    with output_errors(path):
        status = status_of(path, follow=False)
    if status is None or stat.S_ISREG(status.st_mode):
        return
    what = "is not a regular file"
    if stat.S_ISDIR(status.st_mode):
        what = "is a folder"
    elif stat.S_ISLNK(status.st_mode):
        what = "is a link that belongs to another user or leads in a circle"
    raise OutputError(f"{path} {what}. Name a file with -o.")


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Refuse an output path that exists, unless it is a regular file and `overwrite` is set.

    Raises:
        OutputError: it exists.
    """
    refuse_special(path)
    if exists(path) and not overwrite:
        raise OutputError(f"{path} exists. Replace it with --overwrite, or name another with -o.")


@contextmanager
def parquet_writer(stream: BinaryIO, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """A Parquet writer with the settings of results files; writes the footer on exit, unless there was an exception.

    Dictionaries only for short strings that repeat: for ids, texts and number lists they cost time and save no space.
    Statistics only for keys, so that one row can be found without reading the file.
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
    """A Parquet writer for hidden states: byte-stream-split values compress well in short formats."""
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
        # Otherwise the garbage collector would close the writer, which writes its footer into a closed stream.
        writer.is_open = False
        raise


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file by stream: Arrow accepts file names in UTF-8 only."""
    with open_named(path) as stream, pq.ParquetFile(stream) as file:
        yield file


def read_footer(path: Path, contents: str | None = None) -> dict[str, Any] | None:
    """The run record in the footer of a results file; None if the file is missing, incomplete or not batchgen's.

    With `contents`, the record of another file of a run, such as the hidden states.
    """
    try:
        if not is_file(path):
            return None  # opening a pipe would block
        with open_named(path) as stream:
            metadata: Mapping[bytes, bytes] = pq.ParquetFile(stream).metadata.metadata or {}
        if metadata.get(VERSION_KEY) not in READABLE_VERSIONS:
            return None
        footer = typed(read_json(metadata[RUN_KEY]), _RECORD)
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return None
    return footer if footer.get("contents") == contents else None
