"""On-disk store of prompts given as embeddings, each distinct prompt stored once."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batchgen.request.table.unnamed_file import UnnamedFile

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
        self._file = UnnamedFile("embeddings", folder)
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
            self._file.write(values, self._offset(first))
            self._rows += len(values)
        return first

    def rows(self, start: int, end: int) -> Floats:
        """[end - start, H] embeddings of rows `start` to `end`."""
        return self._file.read_array(self._offset(start), (end - start, self.size))

    def _offset(self, row: int) -> int:
        return row * self.size * 4
