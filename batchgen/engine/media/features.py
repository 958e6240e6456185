"""`FeatureStore`: features of a job's items, in the memory of the device and the host as far as they fit, the others in
files.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from batchgen.errors import OutputError
from batchgen.kernels.device import HOST, Device, Download, to_float32
from batchgen.request.table.unnamed_file import UnnamedFile

Floats = npt.NDArray[np.float32]


class KeptFeatures(Protocol):
    """Features by item number in files that outlive the process, as far as there is room for them."""

    def __contains__(self, number: int) -> bool: ...

    def add(self, number: int, values: Floats) -> None:
        """Keep the features [F, W] of an item, if possible."""
        ...

    def read(self, number: int) -> Floats | None:
        """[F, W] features; None, and they are kept no more, if they are damaged."""
        ...

    def remove(self, number: int) -> None:
        """Keep the features of an item no longer, if they are kept."""
        ...


class FeatureStore:
    """Features by item number, each until it is dropped.

    What was used leaves a memory first: it is needed again only if keys and values are computed again.

    Args:
        budget: most bytes in the memory of the host, unless a single item has more; others are in a file in `folder`.
        device_budget: most bytes in the memory of the device that computes features, if it is another one.
    """

    def __init__(self, budget: int, folder: Path | None, device: Device = HOST, device_budget: int = 0) -> None:
        self._budget = budget
        self._device = device
        self._device_budget = device_budget
        self._on_device: OrderedDict[int, Tensor] = OrderedDict()
        """Those in the memory of the device; the first ones leave it first."""
        self._arriving: OrderedDict[int, Download] = OrderedDict()
        """Those on their way to the files that are kept."""
        self._file = UnnamedFile("features of media", folder)
        self.kept: KeptFeatures | None = None
        """Where features of an earlier run are found, and others are left for a later one; set at most once."""
        self._held: OrderedDict[int, Floats] = OrderedDict()
        """Those in the memory of the host; the first ones leave it first."""
        self._spilled: dict[int, tuple[int, tuple[int, int]]] = {}
        """Number -> where it begins in the file without a name, and its shape."""
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        """Size in bytes -> places of that file that are free."""
        self._known: set[int] = set()
        """Those that were put."""
        self.held_bytes = 0
        """Bytes in the memory of the host."""
        self.peak_bytes = 0
        """Most bytes that were in the memory of the host."""
        self.device_bytes = 0
        """Bytes in the memory of the device."""
        self.device_peak_bytes = 0
        """Most bytes that were in the memory of the device."""
        self.spilled_bytes = 0
        """Bytes that left the memory of the host for a file."""
        self.reused = 0
        """Items whose features an earlier run has left."""

    def __contains__(self, number: int) -> bool:
        in_memory = number in self._on_device or number in self._held
        return in_memory or number in self._spilled or (self.kept is not None and number in self.kept)

    def put(self, number: int, features: Floats) -> None:
        """Store the features [F, W] of an item.

        Raises:
            OutputError: the disk is full or cannot be written.
        """
        assert number not in self
        self._known.add(number)
        self._hold(number, np.ascontiguousarray(features, np.float32))

    def put_computed(self, number: int, features: Tensor) -> None:
        """Store the features [F, W] of an item as the device computes them, for later runs as well.

        Raises:
            OutputError: the disk is full or cannot be written.
        """
        if not self._device.asynchronous:
            self.put(number, self._on_host(features))
            if self.kept is not None:
                self.kept.add(number, self._held[number])
            return
        assert number not in self
        self._known.add(number)
        if self.kept is not None:
            self._arriving[number] = self._device.download(features, lane="outputs")
        if features.nbytes > self._device_budget:
            self._hold(number, self._on_host(features))
            return
        while self.device_bytes + features.nbytes > self._device_budget:
            other, values = self._on_device.popitem(last=False)
            self.device_bytes -= values.nbytes
            self._hold(other, self._on_host(values))
        self._on_device[number] = features
        self.device_bytes += features.nbytes
        self.device_peak_bytes = max(self.device_peak_bytes, self.device_bytes)

    def keep_arrived(self) -> None:
        """Write to the files that are kept what has arrived from the device."""
        while self._arriving and next(iter(self._arriving.values())).ready():
            number, download = self._arriving.popitem(last=False)
            assert self.kept is not None
            self.kept.add(number, to_float32(download.wait()[0]))

    def load(self, number: int) -> bool:
        """Have the features of an item in a memory; False if there are none, or a file that has them is damaged."""
        if number in self._on_device or number in self._held:
            return True
        features = self._read(number)
        if features is None:
            return False
        if number not in self._known:
            self._known.add(number)
            self.reused += 1
        self._hold(number, features)
        return True

    def get(self, number: int) -> Floats | Tensor:
        """[F, W] features of an item: on the device in the model's dtype, or on the host.

        Raises:
            OutputError: what was written is not what is read back.
        """
        if number in self._on_device:
            self._on_device.move_to_end(number, last=False)
            return self._on_device[number]
        if not self.load(number):
            raise OutputError("features of media were read back and are damaged; run the same command again")
        self._held.move_to_end(number, last=False)
        return self._held[number]

    def drop(self, number: int) -> None:
        """Forget an item; a later run may still need what is kept of it."""
        values = self._on_device.pop(number, None)
        if values is not None:
            self.device_bytes -= values.nbytes
        features = self._held.pop(number, None)
        if features is not None:
            self.held_bytes -= features.nbytes
        place = self._spilled.pop(number, None)
        if place is not None:
            self._free[4 * math.prod(place[1])].append(place[0])

    def forget(self, number: int) -> None:
        """Let no later run have an item."""
        self._arriving.pop(number, None)
        if self.kept is not None:
            self.kept.remove(number)

    def _on_host(self, values: Tensor) -> Floats:
        return to_float32(self._device.download(values, lane="outputs").wait()[0])

    def _hold(self, number: int, features: Floats) -> None:
        while self._held and self.held_bytes + features.nbytes > self._budget:
            other, values = self._held.popitem(last=False)
            self.held_bytes -= values.nbytes
            self.spilled_bytes += values.nbytes
            if other not in self:
                free = self._free[values.nbytes]
                at = self._file.write(values, free.pop() if free else None)
                self._spilled[other] = (at, (values.shape[0], values.shape[1]))
        self._held[number] = features
        self.held_bytes += features.nbytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _read(self, number: int) -> Floats | None:
        if number in self._spilled:
            return self._file.read_array(*self._spilled[number])
        return self.kept.read(number) if self.kept is not None and number in self.kept else None
