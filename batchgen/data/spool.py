"""What a job must remember of every row, on disk: ids, carried fields, prompts as blobs, and token ids."""

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

from batchgen.columns import Columns
from batchgen.data.files import output_errors, sync_file

__all__ = ["BlobSpool", "TokenSpool"]

_BUFFER = 1 << 20


class _Spool:
    """An append-only file beside a job, removed on close unless another run is to have it."""

    def __init__(self, path: Path, *, fresh: bool = True) -> None:
        self.path = path
        with output_errors(path):
            self._file = path.open("w+b" if fresh else "r+b", buffering=_BUFFER)

    def _write(self, data: bytes) -> None:
        try:  # twice for every row, so the context is entered only where there is something to say
            self._file.write(data)
        except OSError as error:
            with output_errors(self.path):
                raise error

    def _flush(self) -> None:
        with output_errors(self.path):
            self._file.flush()

    def sync(self) -> None:
        """Make what was written durable."""
        self._flush()
        sync_file(self.path)

    def close(self, *, keep: bool = False) -> None:
        """Remove the file, or `keep` it for another run; then it stays where this is called again."""
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
    """Byte strings by index, any of them None; 8 bytes of memory each.

    Args:
        path: of the file.
        kept: `columns` of an earlier spool, which kept its file: this one begins with its blobs.

    Raises:
        OutputError: the disk is full, or the kept file cannot be read.
        ValueError: that file is not what `kept` says.
    """

    _columns = ("_ends",)

    def __init__(self, path: Path, kept: Mapping[str, npt.NDArray[Any]] | None = None) -> None:
        super().__init__(path, fresh=kept is None)
        self._ends = array("q")
        """End offsets; `~end` marks None."""
        self._size = 0
        self._map: mmap.mmap | None = None
        if kept is not None:
            self.fill(kept)
            last = self._ends[-1] if self._ends else 0
            self._size = last if last >= 0 else ~last
            if self._file.seek(0, os.SEEK_END) != self._size:
                self._file.close()
                raise ValueError(f"{path} has another size")

    def append(self, blob: bytes | None) -> int:
        """Add a blob and return its index."""
        if blob is not None:
            self._write(blob)
            self._size += len(blob)
        self._ends.append(self._size if blob is not None else ~self._size)
        return len(self._ends) - 1

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def size(self) -> int:
        """Bytes of all blobs."""
        return self._size

    def get(self, index: int) -> bytes | None:
        """The blob at `index`.

        Raises:
            IndexError: there is none.
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
        """Remove the file, or `keep` it for another run; then it stays where this is called again."""
        if self._map is not None:
            self._map.close()
            self._map = None
        super().close(keep=keep)


class TokenSpool(_Spool):
    """Token ids of all prompts, one after the other.

    Raises:
        OutputError: the disk is full.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._count = 0

    def append(self, ids: Sequence[int] | npt.NDArray[np.int32]) -> int:
        """Add ids and return where they start."""
        # An array takes a list in half the time that numpy does, and an array of numpy's in many times as much.
        values = np.asarray(ids, np.int32) if isinstance(ids, np.ndarray) else array("i", ids)
        self._write(values.tobytes())
        start = self._count
        self._count += len(values)
        return start

    def __len__(self) -> int:
        return self._count

    def map(self) -> npt.NDArray[np.int32]:
        """All ids so far, [len(self)], read-only, paged in from disk as they are used."""
        if self._count == 0:
            return np.zeros(0, np.int32)
        self._flush()
        return np.memmap(self.path, np.int32, mode="r", shape=(self._count,))
