"""`UnnamedFile`: a temporary file without a name, which ends with its owner or the process."""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.errors import OutputError


class UnnamedFile:
    """Bytes at offsets, for more than memory should hold. Created at the first write; any thread may use it.

    Args:
        content: what is in it, for messages, such as `embeddings`.
        folder: where it is created; None: the system's temporary folder.
    """

    def __init__(self, content: str, folder: Path | None = None) -> None:
        self._content = content
        self._folder = folder
        self._descriptor = -1
        self._end = 0
        self._lock = Lock()

    def write(self, values: npt.NDArray[Any] | bytes, at: int | None = None) -> int:
        """Write an array's bytes, or bytes, at an offset or at the end; returns the offset.

        Raises:
            OutputError: the disk is full or cannot be written.
        """
        data = memoryview(values) if isinstance(values, bytes) else _bytes_of(np.ascontiguousarray(values))
        try:
            with self._lock:
                if self._descriptor < 0:
                    self._open()
                start = place = self._end if at is None else at
                self._end = max(self._end, start + len(data))
            while data:
                count = os.pwrite(self._descriptor, data, place)
                data, place = data[count:], place + count
        except OSError as error:
            problem = f"cannot write {self._content} to disk: {error.strerror or error}; free some space"
            raise OutputError(problem) from None
        return start

    def read(self, at: int, size: int) -> bytes:
        """Bytes that were written."""
        parts = []
        while size:
            parts.append(os.pread(self._descriptor, size, at))
            assert parts[-1], "only bytes that were written can be read"
            at, size = at + len(parts[-1]), size - len(parts[-1])
        return b"".join(parts)

    def read_array(self, at: int, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """An array that was written, in new memory."""
        values = np.empty(shape, dtype)
        data = _bytes_of(values)
        while data:
            count = os.preadv(self._descriptor, [data], at)
            assert count, "only bytes that were written can be read"
            data, at = data[count:], at + count
        return values

    def _open(self) -> None:
        # A raw descriptor, because whole arrays are read and written at explicit offsets.
        self._descriptor, name = tempfile.mkstemp(dir=self._folder)
        weakref.finalize(self, os.close, self._descriptor)
        Path(name).unlink()


def _bytes_of(values: npt.NDArray[Any]) -> memoryview:
    return values.reshape(-1).view(np.uint8).data
