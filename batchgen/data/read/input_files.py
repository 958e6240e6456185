"""Input files: glob expansion, checks, hashes and opening.

Everything that makes a whole input unreadable is detected here, before any work is done.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import sys
import tempfile
import weakref
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import pyarrow as pa

from batchgen.config.units import STDIN
from batchgen.config.urls import is_url, shown_url
from batchgen.data.read.formats import BY_KEY, FORMATS, JSON_LINES, InputFormat, format_of
from batchgen.data.read.input_paths import expand, suffix_of, unreadable
from batchgen.data.read.streams import Compression, PositionedFile, decompressed, sniff_compression
from batchgen.data.remote.files import open_url
from batchgen.data.remote.service import gives_ranges, request, state_of
from batchgen.errors import InputError

AUTO_FORMAT = "auto"
"""Value of `--input-format` that leaves the format of a file to its suffix."""
_BLOCK = 1 << 20
_HEAD = 1 << 12
"""Bytes of a file at a URL by which its name is checked."""


class _Spool:
    """Content of a pipe in an unlinked temporary file, which is deleted with the last reference."""

    def __init__(self, file: BinaryIO) -> None:
        self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)


class FoundInput(NamedTuple):
    """An input whose name and first bytes have been checked."""

    path: str
    """Path as given by the user; `STDIN` is standard input."""
    format: InputFormat | None
    """None for standard input and other pipes, of which nothing has been read, unless `--input-format` names it."""
    compression: Compression | None = None
    is_pipe: bool = False


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file, with the values that identify it in a fingerprint."""

    path: str
    """Path as given by the user; `STDIN` is standard input."""
    format: InputFormat
    compression: Compression | None
    size: int
    """Size in bytes as stored."""
    sha256: str | None
    """SHA-256 of the stored bytes, in hexadecimal; None at a URL, where the ETag tells contents apart."""
    _spool: _Spool | None
    """Content of a pipe; None for a regular file."""
    _stamp: tuple[int, int, int] | tuple[int | None, str]
    """Size, modification time in ns and inode at the time of hashing; at a URL, size and ETag."""

    @property
    def content(self) -> str:
        """Text that tells contents apart, with the size: the SHA-256, or the ETag."""
        return self.sha256 or f"ETag {self._stamp[1]}"

    def record(self) -> dict[str, Any]:
        """The entry of a record: name, size and what tells contents apart."""
        found = {"etag": self._stamp[1]} if self.sha256 is None else {"sha256": self.sha256}
        return {"path": shown_url(self.path), "size": self.size, **found}

    def open_raw(self) -> BinaryIO:
        """Stream of the stored bytes from the beginning; seekable for a regular file.

        Raises:
            InputError: the file can no longer be opened.
        """
        if self._spool is not None:
            return cast(BinaryIO, io.BufferedReader(PositionedFile(self._spool.descriptor), _BLOCK))
        if is_url(self.path):
            return cast(BinaryIO, open_url(self.path, self.size))
        try:
            return Path(self.path).open("rb", buffering=_BLOCK)
        except OSError as error:
            raise unreadable(self.path, error) from None

    def open(self) -> BinaryIO:
        """Stream of the decompressed bytes from the beginning; reading may raise `streams.DamagedStream`."""
        return decompressed(self.open_raw(), self.compression)

    def schema(self) -> pa.Schema | None:
        """Names and types of the columns; None if they cannot be read, or if rows may have any fields.

        Raises:
            InputError: two columns have the same name, or the file cannot be read.
        """
        if self.format.schema is None:
            return None
        try:
            with self.open() as stream:
                return self.format.schema(stream, shown_url(self.path))
        except OSError as error:
            raise unreadable(self.path, error) from None

    def check_unchanged(self) -> None:
        """Check that the file has not changed since it was hashed.

        Raises:
            InputError: the file has changed.
        """
        if self._spool is not None:
            return
        now = state_of(self.path)[:2] if is_url(self.path) else _stamp(Path(self.path).stat())
        if now != self._stamp:
            raise InputError(f"{shown_url(self.path)} changed while it was read. Run again when nothing writes to it.")


def find_inputs(
    paths: Sequence[str], reserved: Container[str] = (), input_format: str = AUTO_FORMAT
) -> list[FoundInput]:
    """Expand globs and folders, and check the name and the first bytes of every file without reading further.

    Files are in the order given, sorted within each glob and folder, which leave out `reserved` files.

    Args:
        paths: the paths as the user gives them.
        reserved: the job's own files.
        input_format: key of the format of all files, whatever their suffix; "auto": by suffix.

    Raises:
        InputError: no file is matched, or a file cannot be used; the message names the file and the remedy.
        UsageError: a URL is not supported, or a named file is one of `reserved`.
    """
    format = None if input_format == AUTO_FORMAT else BY_KEY[input_format]
    if format is not None and format.named_rows is not None:
        format = replace(format, rows=format.named_rows)
    return [_inspect(path, format) for path in expand(paths, reserved, format and BY_KEY[format.key])]


def describe_input(source: FoundInput) -> InputFile:
    """Hash an input, or ask for its ETag at a URL; the content of a pipe is kept.

    Raises:
        InputError: the input cannot be read.
    """
    path = source.path
    if path == STDIN:
        if sys.stdin is None:
            raise InputError("Standard input (-) is closed. Name a file, or give the input with <.")
        return _spooled(source, sys.stdin.buffer)
    try:
        if is_url(path) and source.is_pipe:
            return request(path, partial(_fetched, source))
        if is_url(path):
            state, format = state_of(path), source.format
            assert format is not None
            return InputFile(path, format, source.compression, state.size or 0, None, None, state[:2])
        with Path(path).open("rb") as stream:
            if source.is_pipe:
                return _spooled(source, stream)
            stamp = _stamp(os.fstat(stream.fileno()))
            size, digest = _hash(stream)
    except OSError as error:
        raise unreadable(path, error) from None
    assert source.format is not None
    return InputFile(path, source.format, source.compression, size, digest, None, stamp)


def _inspect(path: str, format: InputFormat | None) -> FoundInput:
    """Format and compression of a regular file, by its first bytes, and by its name unless `format` is given."""
    if path == STDIN:
        return FoundInput(path, format, is_pipe=True)
    try:
        if is_url(path):
            return _inspect_url(path, format)
        if not stat.S_ISREG(Path(path).stat().st_mode):
            return FoundInput(path, format, is_pipe=True)
        with Path(path).open("rb") as stream:
            head = stream.read(_BLOCK)
        return _by_name(path, format, head)
    except OSError as error:
        raise unreadable(path, error) from None


def _inspect_url(url: str, format: InputFormat | None) -> FoundInput:
    """A file at a URL, which is as a pipe if its server gives only the whole, or nothing that tells contents apart."""
    state = state_of(url)
    if state.size is None or not state.etag or not gives_ranges(url, state.size):
        return FoundInput(url, format or _by_name(url, None, None).format, is_pipe=True)
    with open_url(url, state.size) as stream:
        return _by_name(url, format, stream.read(_HEAD))


def _by_name(path: str, format: InputFormat | None, head: bytes | None) -> FoundInput:
    """The format and compression that a name says, unless a format is given; checked by the first bytes, if given."""
    if format is not None:
        file = FoundInput(path, format, sniff_compression(head or b"") if format.compressed else None)
    else:
        suffix, compression = suffix_of(path)
        file = FoundInput(path, format_of(path, suffix, compression is not None), compression)
    if head is not None:
        _check_head(file, head)
    return file


def _fetched(source: FoundInput, service: Any, path: str) -> InputFile:
    with service.open(path, block_size=0) as stream:
        return _spooled(source, stream)


def _check_head(file: FoundInput, head: bytes) -> None:
    """Reject a file whose first bytes contradict its name."""
    path, format, compression = shown_url(file.path), file.format, file.compression
    assert format is not None
    if not compression and not head.startswith(format.magic):
        raise InputError(f"{path} is not a {format.name} file. Check where it came from, or rename it.")
    if not format.compressed:
        return
    actual = sniff_compression(head)
    if head and actual != compression:
        claim = f"a {compression} file" if compression else "uncompressed"
        fact = f"it is {actual}" if actual else "it is not"
        raise InputError(f"{path} is named as {claim}, but {fact}. Rename it.")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{path} is UTF-16. Convert it: iconv -f UTF-16 -t UTF-8.")


def _spooled(source: FoundInput, stream: BinaryIO) -> InputFile:
    """Copy a pipe into an unlinked temporary file, since the input is read more than once.

    It holds JSON lines, unless its format is named, or its first bytes are those of another one.
    """
    path = source.path
    try:
        with tempfile.TemporaryFile() as file:
            size, digest = _hash(stream, file)
            file.seek(0)
            head = file.read(_BLOCK)
            spool = _Spool(file)
    except OSError as error:
        if is_url(path):
            raise  # most likely of the network
        name = "standard input" if path == STDIN else path
        raise InputError(
            f"{name} could not be kept in {tempfile.gettempdir()} ({error.strerror}). "
            "Set TMPDIR to a folder with room, or save the input to a file."
        ) from None
    known = next((format for format in FORMATS if format.magic and head.startswith(format.magic)), JSON_LINES)
    format = source.format or known
    compression = sniff_compression(head) if format.compressed else None
    _check_head(FoundInput(path, format, compression), head)
    return InputFile(path, format, compression, size, digest, spool, (size, 0, 0))


def _hash(stream: BinaryIO, copy: BinaryIO | None = None) -> tuple[int, str]:
    digest = hashlib.sha256()
    size = 0
    while block := stream.read(_BLOCK):
        digest.update(block)
        size += len(block)
        if copy is not None:
            copy.write(block)
    return size, digest.hexdigest()


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return (status.st_size, status.st_mtime_ns, status.st_ino)
