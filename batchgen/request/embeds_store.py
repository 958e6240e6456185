"""On-disk store of prompts given as embeddings, each distinct prompt stored once."""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batchgen.errors import OutputError

Floats = npt.NDArray[np.float32]


class EmbedsStore:
    """Token embeddings by row, in an unnamed temporary file that is removed with the store or the process.

    Equal prompts are stored once, so prompts with the same first row and length are equal.
    """

    def __init__(self, size: int, folder: Path | None = None) -> None:
        """Create an empty store.

        Args:
            size: numbers in an embedding, H.
            folder: where the file is created; None uses the system's temporary folder.
        """
        self.size = size
        self.folder = folder
        """Where files without a name are created; None: the system's temporary folder."""
        self._descriptor = -1
        self._rows = 0
        self._first: dict[bytes, int] = {}

    def __len__(self) -> int:
        return self._rows

    def add(self, values: Floats) -> int:
        """Store a prompt's embeddings [P, H] and return the index of their first row.

        Raises:
            OutputError: the disk is full or cannot be written.
        """
        assert values.ndim == 2
        assert values.shape[1] == self.size
        values = np.ascontiguousarray(values, np.float32)
        # All embeddings have the same size, so equal bytes mean equal arrays.
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
                raise _disk_error(error) from None
            self._rows += len(values)
        return first

    def rows(self, start: int, end: int) -> Floats:
        """[end - start, H] embeddings of rows `start` to `end`."""
        values = np.empty((end - start, self.size), np.float32)
        data, at = values.reshape(-1).view(np.uint8).data, self._offset(start)
        while data:
            count = os.preadv(self._descriptor, [data], at)
            assert count, "only rows that were added can be read"
            data, at = data[count:], at + count
        return values

    def _open(self) -> None:
        # A raw descriptor, because whole arrays are read and written at explicit offsets.
        self._descriptor, name = tempfile.mkstemp(dir=self.folder)
        weakref.finalize(self, os.close, self._descriptor)
        Path(name).unlink()

    def _offset(self, row: int) -> int:
        return row * self.size * 4


def _disk_error(error: OSError) -> OutputError:
    return OutputError(f"cannot write embeddings to disk: {error.strerror or error}; free some space")
