"""`FeatureStore`: features of a job's items, in memory as far as they fit, the others in a file without a name."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batchgen.request.unnamed_file import UnnamedFile

Floats = npt.NDArray[np.float32]


class FeatureStore:
    """Features by item number, each kept until it is dropped.

    What was used goes to the file first: it is needed again only if keys and values are computed again.

    Args:
        budget: most bytes in memory, unless a single item has more.
        folder: where the file is created; None: the system's temporary folder.
    """

    def __init__(self, budget: int, folder: Path | None = None) -> None:
        self._budget = budget
        self._file = UnnamedFile("features of media", folder)
        self._held: OrderedDict[int, Floats] = OrderedDict()
        """Those in memory; the first ones are spilled first."""
        self._spilled: dict[int, tuple[int, tuple[int, int]]] = {}
        """Number -> where it begins in the file, and its shape."""
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        """Size in bytes -> places of the file that are free."""
        self.held_bytes = 0
        """Bytes in memory."""
        self.peak_bytes = 0
        """Most bytes that were in memory."""
        self.spilled_bytes = 0
        """Bytes that were written to the file."""

    def __contains__(self, number: int) -> bool:
        return number in self._held or number in self._spilled

    def __len__(self) -> int:
        return len(self._held) + len(self._spilled)

    def put(self, number: int, features: Floats) -> None:
        """Keep the features [F, W] of an item.

        Raises:
            OutputError: the disk is full or cannot be written.
        """
        assert number not in self
        self._hold(number, np.ascontiguousarray(features, np.float32))

    def get(self, number: int) -> Floats:
        """[F, W] features of an item."""
        found = self._held.get(number)
        if found is None:
            found = self._read(number)
            self._hold(number, found)
        self._held.move_to_end(number, last=False)
        return found

    def drop(self, number: int) -> None:
        """Forget an item."""
        found = self._held.pop(number, None)
        if found is not None:
            self.held_bytes -= found.nbytes
        place = self._spilled.pop(number, None)
        if place is not None:
            self._free[_size(place[1])].append(place[0])

    def _hold(self, number: int, features: Floats) -> None:
        while self._held and self.held_bytes + features.nbytes > self._budget:
            other, values = self._held.popitem(last=False)
            self.held_bytes -= values.nbytes
            if other not in self._spilled:
                self._write(other, values)
        self._held[number] = features
        self.held_bytes += features.nbytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _write(self, number: int, values: Floats) -> None:
        free = self._free[values.nbytes]
        at = self._file.write(values, free.pop() if free else None)
        self.spilled_bytes += values.nbytes
        self._spilled[number] = (at, (values.shape[0], values.shape[1]))

    def _read(self, number: int) -> Floats:
        return self._file.read_array(*self._spilled[number])


def _size(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1] * 4
