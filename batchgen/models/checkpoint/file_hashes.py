"""SHA-256 of whole files, computed in threads from the start of a command, while it does what needs no weights.

Digests of large files are kept in the user's cache folder, by device, inode, size and times of modification and of
change, so that a file is read again only when it may differ. No program can set the time of change (ctime): a file
whose size and modification time were kept is hashed again. An entry that is damaged or of another user is not used.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, NamedTuple, Self

from batchgen.errors import ModelError
from batchgen.library_settings import processors
from batchgen.user_cache import keep_value, kept_value

_PIECE: Final = 8 << 20
"""Bytes hashed at a time. Reading and hashing release Python's lock; small pieces would wait for it often."""
_CACHED_BYTES: Final = 16 << 20
"""Smallest file whose digest is kept: smaller ones are hashed in a few milliseconds."""
_SETTLED_NS: Final = 2_000_000_000
"""A file that changed later than this before it was hashed may change again within one tick of its file system's
clock, so its digest is not kept."""
_MOST_THREADS: Final = 8


class FileStamp(NamedTuple):
    """Identity of a file's content, known without reading it."""

    device: int
    inode: int
    size: int
    """In bytes."""
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """The stamp in a file's status."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def has_content_of(self, other: FileStamp) -> bool:
        """Whether the content is the same. Some network file systems number a file again each time it is opened."""
        return self[2:] == other[2:]


class FileHashes:
    """Digests of files, computed by threads that end with the process.

    Attributes:
        done: file -> SHA-256 in hex of each file; its exception is a `ModelError` if a file cannot be read, or has
            changed since it was stamped.
        size: bytes of all files that are hashed.
    """

    def __init__(self, stamps: Mapping[Path, FileStamp], files: Sequence[Path]) -> None:
        """Begin to hash `files`; `stamps` has those of all files that the model is read from, taken before that."""
        self.done: Future[dict[Path, str]] = Future()
        self._stamps = stamps
        self._left = deque(dict.fromkeys(files))
        self._count = len(self._left)
        self.size = sum(stamps[file].size for file in self._left)
        self._found: dict[Path, str] = {}
        self._lock = threading.Lock()
        if not self._left:
            self.done.set_result({})
        threads = min(self._count, max(1, processors() - 1), _MOST_THREADS)
        for _ in range(threads):
            threading.Thread(target=self._hash, name="hash", daemon=True).start()

    def _hash(self) -> None:
        while True:
            try:
                file = self._left.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                digest = hash_file(file, self._stamps[file])
            except BaseException as error:  # raised where the digests are waited for
                with self._lock:
                    self._left.clear()
                    if not self.done.done():
                        self.done.set_exception(error)
                return
            with self._lock:
                self._found[file] = digest
                if len(self._found) == self._count:
                    self.done.set_result(self._found)

    def check_unchanged(self) -> None:
        """Check that all files still are what they were when they were stamped, after the model was read from them.

        Raises:
            ModelError: a file has changed; the message names it.
        """
        for file, stamp in self._stamps.items():
            try:
                _check_same(file, stamp, file.stat())
            except OSError as error:
                raise unreadable(file, error) from None


def file_digests(folder: Path, patterns: Sequence[str]) -> list[tuple[str, str]]:
    """(name, SHA-256) of the files of a folder that match one of the patterns.

    Raises:
        ModelError: as `hash_file`.
    """
    files = sorted({file for pattern in patterns for file in folder.glob(pattern)})
    return [
        (str(file.relative_to(folder)), hash_file(file, FileStamp.of(file.stat()))) for file in files if file.is_file()
    ]


def hash_file(file: Path, stamp: FileStamp) -> str:
    """SHA-256 of a whole file in hex, from the cache if it holds that of the same file.

    Raises:
        ModelError: the file cannot be read, is not the one that `stamp` is of, or changes while it is read.
    """
    try:
        with file.open("rb", buffering=0) as stream:
            _check_same(file, stamp, status := os.fstat(stream.fileno()))
            opened, begun = FileStamp.of(status), time.time_ns()
            if (cached := opened.size >= _CACHED_BYTES) and (known := kept_value(*_entry(opened))) is not None:
                return known
            digest, piece = hashlib.sha256(), memoryview(bytearray(min(_PIECE, opened.size + 1)))
            while count := stream.readinto(piece):
                digest.update(piece[:count])
            _check_same(file, stamp, os.fstat(stream.fileno()))
    except OSError as error:
        raise unreadable(file, error) from None
    if cached and begun - opened.ctime_ns > _SETTLED_NS:
        keep_value(*_entry(opened), digest.hexdigest())
    return digest.hexdigest()


def _check_same(file: Path, stamp: FileStamp, status: os.stat_result) -> None:
    if not FileStamp.of(status).has_content_of(stamp):
        raise ModelError(
            f"{file} changed while the model was read. Run the command again when nothing writes to the file."
        )


def unreadable(file: Path, error: OSError) -> ModelError:
    """The error of a file that cannot be read."""
    return ModelError(f"Cannot read {file}: {error.strerror or error}. Check the file and its permissions.")


def _entry(stamp: FileStamp) -> tuple[str, str, FileStamp]:
    return "weights", f"{stamp.device:x}-{stamp.inode:x}", stamp
