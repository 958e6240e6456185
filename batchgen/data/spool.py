"""Append-only files for data that a job keeps of every row: byte strings by index, and token ids.

A spool continues the file of an earlier run if it is given the size that the file must have.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from batchgen.data.durable_files import output_errors
from batchgen.data.files import open_new, open_own_to_change, remove_file, sync_stream, system
from batchgen.request.table.columns import Column, Columns

_BUFFER = 1 << 20
_DROP_EVERY = 1 << 10
"""Number of reads after which the pages of a mapped file leave the process again; the system still caches them."""


class _Spool:
    """An append-only file, removed on close unless it is kept for another run.

    Raises:
        OutputError: the disk is full, or the kept file cannot be read.
        ValueError: the kept file does not have `kept_bytes`.
    """

    def __init__(self, path: Path, kept_bytes: int | None) -> None:
        self.path = path
        with output_errors(path):
            self._file = (open_new if kept_bytes is None else open_own_to_change)(path, _BUFFER)
        if kept_bytes is not None and self._file.seek(0, os.SEEK_END) != kept_bytes:
            self._file.close()
            raise ValueError(f"{path} has an unexpected size")

    def _write(self, data: bytes) -> None:
        try:  # called twice for every row, so the context manager is entered only on an error
            self._file.write(data)
        except OSError as error:
            with output_errors(self.path):
                raise error

    def _flush(self) -> None:
        with output_errors(self.path):
            self._file.flush()

    def sync(self) -> None:
        """Flush and fsync the file."""
        with output_errors(self.path):
            sync_stream(self._file)

    def close(self, *, keep: bool = False) -> None:
        """Close the file and remove it unless `keep`. Further calls do nothing."""
        if self._file.closed:
            return
        if keep:
            self._flush()
        with suppress(OSError):
            self._file.close()
        if not keep:
            remove_file(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Mapped:
    """Memory map of a file, of which few pages stay in the process however much is read."""

    def __init__(self, descriptor: int) -> None:
        self.map = system.mmap(descriptor)
        self._reads = 0

    def read(self) -> mmap.mmap:
        """The map, for one read."""
        self._reads += 1
        if self._reads % _DROP_EVERY == 0 and hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED)
        return self.map


class BlobSpool(_Spool, Columns):
    """Spool of byte strings, by index; 4 bytes of memory each, 8 in a file of more than 2 GiB.

    Args:
        path: path of the file.
        kept: `columns` of an earlier spool whose file was kept, and which this spool continues.
    """

    _columns = ("_ends",)

    def __init__(self, path: Path, kept: Mapping[str, npt.NDArray[Any]] | None = None) -> None:
        self._ends = Column("q", narrowest="i")
        """End offset of each blob."""
        self.size = 0
        """Total bytes of all blobs."""
        self._map: _Mapped | None = None
        if kept is not None:
            self.restore_columns(kept)
            self.size = self._ends[len(self) - 1] if len(self) else 0
        super().__init__(path, None if kept is None else self.size)

    def append(self, blob: bytes) -> int:
        """Append a blob and return its index."""
        self.pack(self._ends)
        self._write(blob)
        self.size += len(blob)
        self._ends.append(self.size)
        return len(self._ends) - 1

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> bytes:
        """The blob at `index`.

        Raises:
            IndexError: the index is out of range.
        """
        if not 0 <= index < len(self._ends):
            raise IndexError(index)
        start, end = self._ends[index - 1] if index else 0, self._ends[index]
        return self._mapped(end)[start:end] if end > start else b""

    def _mapped(self, end: int) -> mmap.mmap:
        if self._map is None or len(self._map.map) < end:
            self._flush()
            if self._map is not None:
                self._map.map.close()
            self._map = _Mapped(self._file.fileno())
        return self._map.read()

    def close(self, *, keep: bool = False) -> None:
        """Close the file and remove it unless `keep`. Further calls do nothing."""
        if self._map is not None:
            self._map.map.close()
            self._map = None
        super().close(keep=keep)


class TokenSpool(_Spool):
    """Token ids of all prompts, concatenated as int32 in a file: a `TokenStore` that needs no memory.

    Args:
        path: path of the file.
        kept: number of ids in the file of an earlier run, which this spool continues.
    """

    def __init__(self, path: Path, kept: int | None = None) -> None:
        super().__init__(path, None if kept is None else 4 * kept)
        self._count = kept or 0
        self._map: _Mapped | None = None
        self._ids = np.zeros(0, np.int32)

    def append(self, ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Append the ids of a prompt."""
        # `array` is faster than numpy for lists, and much slower for numpy arrays.
        values = array("i", ids) if isinstance(ids, list) else np.asarray(ids, np.int32)
        self._write(values.tobytes())
        self._count += len(values)

    def ids(self) -> npt.NDArray[np.int32]:
        """[total] int32: all ids so far, memory-mapped and read-only; they stay readable after `close`."""
        if len(self._ids) != self._count:
            self._flush()
            self._map = _Mapped(self._file.fileno())
            self._ids = np.frombuffer(self._map.map, np.int32)
        elif self._map is not None:
            self._map.read()
        return self._ids
