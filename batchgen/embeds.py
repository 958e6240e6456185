"""`EmbedsStore`: prompts given as embeddings, on disk while a job runs, each distinct one once."""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batchgen.errors import OutputError

__all__ = ["EmbedsStore"]

Floats = npt.NDArray[np.float32]


class EmbedsStore:
    """Token embeddings by row, in a file without a name that goes when the store does, or the process.

    Equal prompts stand there once, so that whoever has the same first row and the same length has the same prompt.
    """

    def __init__(self, size: int, folder: Path | None = None) -> None:
        """`size`: numbers of an embedding, H. `folder`: where the file stands; None is the system's choice."""
        self.size = size
        self._folder = folder
        self._descriptor = -1
        self._rows = 0
        self._first: dict[bytes, int] = {}

    def __len__(self) -> int:
        return self._rows

    def add(self, values: Floats) -> int:
        """Keep a prompt's embeddings [P, H] and return the row at which they begin.

        Raises:
            OutputError: the disk is full.
        """
        assert values.ndim == 2
        assert values.shape[1] == self.size
        values = np.ascontiguousarray(values, np.float32)
        # The size is the same for all, so equal bytes are equal arrays.
        first = self._first.setdefault(hashlib.blake2b(values.data, digest_size=16).digest(), self._rows)
        if first == self._rows:
            data, at = values.reshape(-1).view(np.uint8).data, self._offset(first)
            try:
                if self._descriptor < 0:
                    self._open()
                while data:
                    count = os.pwrite(self._descriptor, data, at)
                    data, at = data[count:], at + count
            except OSError as error:
                raise _no_room(error) from None
            self._rows += len(values)
        return first

    def rows(self, start: int, end: int) -> Floats:
        """[end - start, H] the embeddings of these rows."""
        values = np.empty((end - start, self.size), np.float32)
        data, at = values.reshape(-1).view(np.uint8).data, self._offset(start)
        while data:
            count = os.preadv(self._descriptor, [data], at)
            assert count, "only rows that were added are read"
            data, at = data[count:], at + count
        return values

    def _open(self) -> None:
        # A bare descriptor: whole arrays go in and out, at places of our own.
        self._descriptor, name = tempfile.mkstemp(dir=self._folder)
        weakref.finalize(self, os.close, self._descriptor)
        Path(name).unlink()

    def _offset(self, row: int) -> int:
        return row * self.size * 4


def _no_room(error: OSError) -> OutputError:
    return OutputError(f"cannot keep embeddings on disk: {error.strerror or error}; free some space")
