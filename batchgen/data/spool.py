"""What a job must remember of every row, on disk: ids, carried fields, prompts as blobs, and token ids."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from batchgen.data.files import output_errors

__all__ = ["BlobSpool", "TokenSpool"]

_BUFFER = 1 << 20


class _Spool:
    """An append-only scratch file, removed on close."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with output_errors(path):
            self._file = path.open("w+b", buffering=_BUFFER)

    def _write(self, data: bytes) -> None:
        try:  # twice for every row, so the context is entered only where there is something to say
            self._file.write(data)
        except OSError as error:
            with output_errors(self.path):
                raise error

    def _flush(self) -> None:
        with output_errors(self.path):
            self._file.flush()

    def close(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            self._file.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BlobSpool(_Spool):
    """Byte strings by index, any of them None; 8 bytes of memory each.

    Raises:
        OutputError: the disk is full.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._ends = array("q")
        """End offsets; `~end` marks None."""
        self._size = 0
        self._map: mmap.mmap | None = None

    def append(self, blob: bytes | None) -> int:
        """Add a blob and return its index."""
        if blob is not None:
            self._write(blob)
            self._size += len(blob)
        self._ends.append(self._size if blob is not None else ~self._size)
        return len(self._ends) - 1

    def __len__(self) -> int:
        return len(self._ends)

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

    def close(self) -> None:
        """Remove the file."""
        if self._map is not None:
            self._map.close()
            self._map = None
        super().close()


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
