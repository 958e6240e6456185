"""Input files: found, checked, hashed and opened. What their rows are is for `read`.

Everything that makes an input unreadable as a whole is found here, before any work is done.
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

from batchgen.data.streams import Compression, PositionedFile, decompressed, sniff_compression
from batchgen.errors import InputError, UsageError

__all__ = ["InputFile", "Layout", "check_inputs", "find_inputs", "named_files"]

Layout = Literal["jsonl", "text", "parquet"]

_LAYOUTS: dict[str, Layout] = {
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
    """The bytes of a pipe in an unlinked temporary file, which goes with the last reference."""

    def __init__(self, file: BinaryIO) -> None:
        self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input: what it is, and what identifies it in a fingerprint."""

    path: str
    """As the user named it; `-` is standard input."""
    layout: Layout
    compression: Compression | None
    size: int
    """Bytes as stored."""
    sha256: str
    """Hex digest of the bytes as stored."""
    _spool: _Spool | None
    """The bytes of a pipe; None for a regular file."""
    _stamp: tuple[int, int, int]
    """Size, modification time in ns and inode when it was hashed."""

    def open_raw(self) -> BinaryIO:
        """The bytes as stored, from their beginning, seekable for a regular file.

        Raises:
            InputError: it cannot be opened any more.
        """
        if self._spool is not None:
            return cast(BinaryIO, io.BufferedReader(PositionedFile(self._spool.descriptor), _BLOCK))
        try:
            return Path(self.path).open("rb", buffering=_BLOCK)
        except OSError as error:
            raise _unreadable(self.path, error) from None

    def open(self) -> BinaryIO:
        """The bytes decompressed, from their beginning; reading may raise `streams.DamagedStream`."""
        return decompressed(self.open_raw(), self.compression)

    def check_unchanged(self) -> None:
        """Hold the file to what was hashed.

        Raises:
            InputError: it was written to since.
        """
        if self._spool is None and _stamp(Path(self.path).stat()) != self._stamp:
            raise InputError(f"{self.path} changed while it was read. Run again when nothing writes to it.")


def find_inputs(paths: Sequence[str], own: Container[str] = ()) -> list[InputFile]:
    """Expand globs, as `named_files` does, check every file and hash it.

    Raises:
        InputError: naming the file and the remedy.
        UsageError: a file that is named is one of `own`.
    """
    return [_examine(path) for path in named_files(paths, own)]


def check_inputs(paths: Sequence[str], own: Container[str] = ()) -> None:
    """Refuse what `find_inputs` would refuse for its name or its first bytes, without reading on.

    Raises:
        InputError: naming the file and the remedy.
        UsageError: a file that is named is one of `own`.
    """
    for path in named_files(paths, own):
        if path != "-":
            try:
                _look(path)
            except OSError as error:
                raise _unreadable(path, error) from None


def named_files(paths: Sequence[str], own: Container[str] = ()) -> Iterator[str]:
    """The files that are meant, in the order given, sorted within each glob; a glob does not mean the job's `own`.

    Raises:
        InputError: nothing is meant, or standard input twice.
        UsageError: a file that is named is one of `own`.
    """
    if not paths:
        raise InputError("No input was named.")
    if list(paths).count("-") > 1:
        raise InputError("Standard input (-) is named twice; it can be read once.")
    for pattern in paths:
        yield from _expand(pattern, own)


def _expand(pattern: str, own: Container[str]) -> Iterator[str]:
    if pattern == "-" or not glob.has_magic(pattern) or os.path.lexists(pattern):
        if pattern != "-" and pattern in own:
            raise UsageError(f"{pattern} is a file of the job's own output; name another input, or another output (-o)")
        yield pattern
        return
    matches = glob.glob(pattern, recursive=True)  # noqa: PTH207 - absolute patterns and strings as given
    files = sorted(path for path in matches if not Path(path).is_dir())
    found = [path for path in files if path not in own]
    if not found:
        besides = " but the job's own output" if files else ""
        raise InputError(f"{pattern}: no file matches{besides}. Check the pattern and the working directory.")
    yield from found


def _examine(path: str) -> InputFile:
    if path == "-":
        if sys.stdin is None:
            raise InputError("Standard input (-) is closed. Name a file, or give the input with <.")
        return _spooled(path, sys.stdin.buffer)
    try:
        found = _look(path)
        with Path(path).open("rb") as stream:
            if found is None:
                return _spooled(path, stream)
            size, digest = _hash(stream)
    except OSError as error:
        raise _unreadable(path, error) from None
    status, layout, compression = found
    return InputFile(path, layout, compression, size, digest, None, _stamp(status))


def _look(path: str) -> tuple[os.stat_result, Layout, Compression | None] | None:
    """What a regular file is, by its name and its first bytes; None for a pipe, which can be read once."""
    status = Path(path).stat()
    if stat.S_ISDIR(status.st_mode):
        raise InputError(f"{path} is a folder. Name its files, for example '{path.rstrip('/')}/*.jsonl'.")
    if not stat.S_ISREG(status.st_mode):
        return None
    layout, compression = _by_suffix(path)
    with Path(path).open("rb") as stream:
        _check_head(path, layout, compression, stream.read(_BLOCK))
    return status, layout, compression


def _by_suffix(path: str) -> tuple[Layout, Compression | None]:
    inner, last = os.path.splitext(path.lower())  # noqa: PTH122 - a Path has no second suffix to speak of
    compression = _COMPRESSIONS.get(last)
    layout = _LAYOUTS.get(os.path.splitext(inner)[1] if compression else last)  # noqa: PTH122
    if layout is None or (compression and layout == "parquet"):
        raise InputError(f"{path}: unknown kind of file; {_SUFFIX_HELP}.")
    return layout, compression


def _check_head(path: str, layout: Layout, compression: Compression | None, head: bytes) -> None:
    """Refuse a file whose first bytes say that its name is wrong."""
    if layout == "parquet":
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
    """Copy a pipe into an unlinked temporary file, since the input is read more than once. It is JSON lines."""
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
