"""Input files: glob expansion, checks, hashes and opening.

Everything that makes a whole input unreadable is detected here, before any work is done.
"""

from __future__ import annotations

import glob
import hashlib
import io
import os
import stat
import sys
import tempfile
import weakref
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

from batchgen.data.read.streams import Compression, PositionedFile, decompressed, sniff_compression
from batchgen.errors import InputError, UsageError

__all__ = ["FileFormat", "InputFile", "check_inputs", "expand_inputs", "find_inputs"]

FileFormat = Literal["jsonl", "text", "parquet"]

_FORMATS: dict[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".parquet": "parquet",
}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
_SUFFIX_HELP = "batchgen reads .jsonl, .ndjson, .json, .txt (each also .gz or .zst) and .parquet"
_BLOCK = 1 << 20


class _Spool:
    """Content of a pipe in an unlinked temporary file, which is deleted with the last reference."""

    def __init__(self, file: BinaryIO) -> None:
        self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file, with the values that identify it in a fingerprint."""

    path: str
    """Path as given by the user; `-` is standard input."""
    format: FileFormat
    compression: Compression | None
    size: int
    """Size in bytes as stored."""
    sha256: str
    """SHA-256 of the stored bytes, in hexadecimal."""
    _spool: _Spool | None
    """Content of a pipe; None for a regular file."""
    _stamp: tuple[int, int, int]
    """Size, modification time in ns and inode at the time of hashing."""

    def open_raw(self) -> BinaryIO:
        """Stream of the stored bytes from the beginning; seekable for a regular file.

        Raises:
            InputError: the file can no longer be opened.
        """
        if self._spool is not None:
            return cast(BinaryIO, io.BufferedReader(PositionedFile(self._spool.descriptor), _BLOCK))
        try:
            return Path(self.path).open("rb", buffering=_BLOCK)
        except OSError as error:
            raise _unreadable(self.path, error) from None

    def open(self) -> BinaryIO:
        """Stream of the decompressed bytes from the beginning; reading may raise `streams.DamagedStream`."""
        return decompressed(self.open_raw(), self.compression)

    def check_unchanged(self) -> None:
        """Check that the file has not changed since it was hashed.

        Raises:
            InputError: the file has changed.
        """
        if self._spool is None and _stamp(Path(self.path).stat()) != self._stamp:
            raise InputError(f"{self.path} changed while it was read. Run again when nothing writes to it.")


def find_inputs(paths: Sequence[str], reserved: Container[str] = ()) -> list[InputFile]:
    """Expand globs as by `expand_inputs`, then check and hash every file.

    Raises:
        InputError: a file cannot be used; the message names the file and the remedy.
        UsageError: a named file is one of `reserved`.
    """
    return [_describe(path) for path in expand_inputs(paths, reserved)]


def check_inputs(paths: Sequence[str], reserved: Container[str] = ()) -> None:
    """Reject files that `find_inputs` rejects for their name or first bytes, without reading further.

    Raises:
        InputError: a file cannot be used; the message names the file and the remedy.
        UsageError: a named file is one of `reserved`.
    """
    for path in expand_inputs(paths, reserved):
        if path != "-":
            try:
                _inspect(path)
            except OSError as error:
                raise _unreadable(path, error) from None


def expand_inputs(paths: Sequence[str], reserved: Container[str] = ()) -> Iterator[str]:
    """Yield the named files in the order given, sorted within each glob; globs leave out `reserved` files.

    Raises:
        InputError: no file is named or matched, or standard input is named twice.
        UsageError: a named file is one of `reserved`.
    """
    if not paths:
        raise InputError("No input was named.")
    if list(paths).count("-") > 1:
        raise InputError("Standard input (-) is named twice; it can be read once.")
    for pattern in paths:
        yield from _expand(pattern, reserved)


def _expand(pattern: str, reserved: Container[str]) -> Iterator[str]:
    if pattern == "-" or not glob.has_magic(pattern) or os.path.lexists(pattern):
        if pattern != "-" and pattern in reserved:
            raise UsageError(f"{pattern} is a file of the job's own output; name another input, or another output (-o)")
        yield pattern
        return
    matches = glob.glob(pattern, recursive=True)  # noqa: PTH207 - absolute patterns and strings as given
    files = sorted(path for path in matches if not Path(path).is_dir())
    found = [path for path in files if path not in reserved]
    if not found:
        exception = " but the job's own output" if files else ""
        raise InputError(f"{pattern}: no file matches{exception}. Check the pattern and the working directory.")
    yield from found


def _describe(path: str) -> InputFile:
    if path == "-":
        if sys.stdin is None:
            raise InputError("Standard input (-) is closed. Name a file, or give the input with <.")
        return _spooled(path, sys.stdin.buffer)
    try:
        found = _inspect(path)
        with Path(path).open("rb") as stream:
            if found is None:
                return _spooled(path, stream)
            size, digest = _hash(stream)
    except OSError as error:
        raise _unreadable(path, error) from None
    status, file_format, compression = found
    return InputFile(path, file_format, compression, size, digest, None, _stamp(status))


def _inspect(path: str) -> tuple[os.stat_result, FileFormat, Compression | None] | None:
    """Status, format and compression of a regular file, by name and first bytes; None for a pipe."""
    status = Path(path).stat()
    if stat.S_ISDIR(status.st_mode):
        raise InputError(f"{path} is a folder. Name its files, for example '{path.rstrip('/')}/*.jsonl'.")
    if not stat.S_ISREG(status.st_mode):
        return None
    file_format, compression = _by_suffix(path)
    with Path(path).open("rb") as stream:
        _check_head(path, file_format, compression, stream.read(_BLOCK))
    return status, file_format, compression


def _by_suffix(path: str) -> tuple[FileFormat, Compression | None]:
    inner, last = os.path.splitext(path.lower())  # noqa: PTH122 - Path handles one suffix only
    compression = _COMPRESSIONS.get(last)
    file_format = _FORMATS.get(os.path.splitext(inner)[1] if compression else last)  # noqa: PTH122
    if file_format is None or (compression and file_format == "parquet"):
        raise InputError(f"{path}: unknown kind of file; {_SUFFIX_HELP}.")
    return file_format, compression


def _check_head(path: str, file_format: FileFormat, compression: Compression | None, head: bytes) -> None:
    """Reject a file whose first bytes contradict its name."""
    if file_format == "parquet":
        if not head.startswith(b"PAR1"):
            raise InputError(f"{path} is not a Parquet file. Check where it came from, or rename it.")
        return
    found = sniff_compression(head)
    if head and found != compression:
        claim = f"a {compression} file" if compression else "uncompressed"
        fact = f"it is {found}" if found else "it is not"
        raise InputError(f"{path} is named as {claim}, but {fact}. Rename it.")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{path} is UTF-16. Convert it: iconv -f UTF-16 -t UTF-8.")
    if path.lower().endswith(".json") and head.lstrip().startswith(b"["):
        raise InputError(f"{path} is one JSON array, not JSON lines. Convert it: jq -c '.[]'.")


def _spooled(path: str, stream: BinaryIO) -> InputFile:
    """Copy a pipe of JSON lines into an unlinked temporary file, since the input is read more than once."""
    try:
        with tempfile.TemporaryFile() as file:
            size, digest = _hash(stream, file)
            file.seek(0)
            head = file.read(_BLOCK)
            spool = _Spool(file)
    except OSError as error:
        name = "standard input" if path == "-" else path
        raise InputError(
            f"{name} could not be kept in {tempfile.gettempdir()} ({error.strerror}). "
            "Set TMPDIR to a folder with room, or save the input to a file."
        ) from None
    if head.startswith(b"PAR1"):
        raise InputError("Parquet cannot be read from a pipe. Name the file.")
    compression = sniff_compression(head)
    _check_head(path, "jsonl", compression, head)
    return InputFile(path, "jsonl", compression, size, digest, spool, (size, 0, 0))


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


def _unreadable(path: str, error: OSError) -> InputError:
    remedy = {
        FileNotFoundError: "Check the name and the working directory.",
        PermissionError: "Check its permissions.",
    }.get(type(error), "Check the disk, or copy the file.")
    return InputError(f"{path} cannot be read ({error.strerror or error}). {remedy}")
