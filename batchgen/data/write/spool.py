"""Append-only files for data that a job keeps of every row: byte strings by index, and token ids."""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from batchgen.data.write.durable_files import output_errors, sync_file
from batchgen.request.columns import Columns

__all__ = ["BlobSpool", "TokenSpool"]

_BUFFER = 1 << 20


class _Spool:
    """An append-only file, removed on close unless it is kept for another run."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path
        with output_errors(path):
            self._file = path.open("w+b" if create else "r+b", buffering=_BUFFER)

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
        self._flush()
        sync_file(self.path)

    def close(self, *, keep: bool = False) -> None:
        """Close the file and remove it unless `keep`. Further calls do nothing."""
        if self._file.closed:
            return
        if keep:
            self._flush()
        with suppress(OSError):
            self._file.close()
        if not keep:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BlobSpool(_Spool, Columns):
    """Spool of byte strings or None, by index; 8 bytes of memory each.

    Args:
        path: path of the file.
        kept: `columns` of an earlier spool whose file was kept, and which this spool continues.

    Raises:
        OutputError: the disk is full, or the kept file cannot be read.
        ValueError: the kept file does not match `kept`.
    """

    _columns = ("_ends",)

    def __init__(self, path: Path, kept: Mapping[str, npt.NDArray[Any]] | None = None) -> None:
        super().__init__(path, create=kept is None)
        self._ends = array("q")
        """End offset of each blob; `~end` for None."""
        self._size = 0
        self._map: mmap.mmap | None = None
        if kept is not None:
            self.restore_columns(kept)
            last = self._ends[-1] if self._ends else 0
            self._size = last if last >= 0 else ~last
            if self._file.seek(0, os.SEEK_END) != self._size:
                self._file.close()
                raise ValueError(f"{path} has an unexpected size")

    def append(self, blob: bytes | None) -> int:
        """Append a blob and return its index."""
        if blob is not None:
            self._write(blob)
            self._size += len(blob)
        self._ends.append(self._size if blob is not None else ~self._size)
        return len(self._ends) - 1

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def size(self) -> int:
        """Total bytes of all blobs."""
        return self._size

    def get(self, index: int) -> bytes | None:
        """The blob at `index`.

        Raises:
            IndexError: the index is out of range.
        """
        if not 0 <= index < len(self._ends):
            raise IndexError(index)
        end = self._ends[index]
        if end < 0:
            return None
        previous = self._ends[index - 1] if index else 0
        start = previous if previous >= 0 else ~previous
        return self._mapped(end)[start:end] if end > start else b""

    def _mapped(self, end: int) -> mmap.mmap:
        if self._map is None or len(self._map) < end:
            self._flush()
            if self._map is not None:
                self._map.close()
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._map

    def close(self, *, keep: bool = False) -> None:
        """Close the file and remove it unless `keep`. Further calls do nothing."""
        if self._map is not None:
            self._map.close()
            self._map = None
        super().close(keep=keep)


class TokenSpool(_Spool):
    """Spool of the token ids of all prompts, concatenated.

    Raises:
        OutputError: the disk is full.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._count = 0

    def append(self, ids: Sequence[int] | npt.NDArray[np.int32]) -> int:
        """Append ids and return their start position."""
        # `array` is faster than numpy for lists, and much slower for numpy arrays.
        values = np.asarray(ids, np.int32) if isinstance(ids, np.ndarray) else array("i", ids)
        self._write(values.tobytes())
        start = self._count
        self._count += len(values)
        return start

    def __len__(self) -> int:
        return self._count

    def map(self) -> npt.NDArray[np.int32]:
        """[len(self)] int32: all ids so far, memory-mapped and read-only."""
        if self._count == 0:
            return np.zeros(0, np.int32)
        self._flush()
        return np.memmap(self.path, np.int32, mode="r", shape=(self._count,))
