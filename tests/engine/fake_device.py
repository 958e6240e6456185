"""`LateDevice`: a device for tests that computes on the CPU and detects timing mistakes that a GPU would show.

It has the interface of `CudaDevice`, on CPU tensors: uploads are packed copies, downloads hold poison values until the
wait and only then read their sources, and graphs are tapes of launched operations (`fake_tape`). It counts everything,
so that tests can check the cost of a step. `fake_cuda.CountingDevice` does the same with simulated GPU tensors.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.device import Array, Download, Graph, Lane, as_array
from tests.engine.fake_tape import Tape, TapeGraph, poison

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Wait:
    """How late a download was waited for."""

    lane: Lane
    uploads: int
    """Number of uploads between its start and the wait; 0: the host waits for what it has just requested"""
    downloads: int
    """Number of downloads of its lane started in between"""
    overtook: bool
    """Whether an older download of its lane was still unread."""


@dataclass(slots=True)
class Counts:
    """Counts of transfers and graphs."""

    uploads: int = 0
    """Number of transfers with any number of arrays; empty ones do not count."""
    uploads_into: int = 0
    """Number of `upload_into` transfers, which `uploads` excludes."""
    downloads: Counter[Lane] = field(default_factory=Counter)
    waits: list[Wait] = field(default_factory=list)
    copied_ahead: int = 0
    """Bytes of the copies of `copy_ahead`."""
    captures: int = 0
    replays: int = 0
    releases: int = 0

    def waits_of(self, lane: Lane) -> list[Wait]:
        """The waits of one lane, in order."""
        return [wait for wait in self.waits if wait.lane == lane]

    def lateness(self, lane: Lane = "tokens") -> Counter[int]:
        """Number of uploads before the wait -> number of downloads of the lane."""
        return Counter(wait.uploads for wait in self.waits_of(lane))


class LateDevice:
    """CPU tensors with late transfers.

    Args:
        captures: whether graphs are supported.
        poison_uploads: overwrite uploaded arrays at the next `upload`, to prove that they are not used again. Read-only
            arrays are skipped.
    """

    asynchronous = True

    def __init__(self, *, captures: bool = False, poison_uploads: bool = False) -> None:
        self.captures = captures
        self.counts = Counts()
        self._poison_uploads = poison_uploads
        self._uploaded: list[Array] = []
        self._unread: dict[Lane, list[LateDownload]] = {"tokens": [], "outputs": []}
        self.capturing = False
        self.graphs: weakref.WeakSet[TapeGraph] = weakref.WeakSet()
        """Captured graphs that are alive."""
        self._ahead: list[LateArrival] = []
        """Copies of rows that are not made yet."""
        self._lock = threading.RLock()

    @property
    def torch_device(self) -> torch.device:
        """See `Device`."""
        return torch.device("cpu")

    def upload(self, *arrays: Array) -> list[Tensor]:
        """See `Device.upload`. The padding between the arrays is poison."""
        self._refuse_in_capture("upload")
        places, at = [], 0
        for array in arrays:
            places.append(at)
            at += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        packed = torch.full((at,), 0xFF, dtype=torch.uint8)
        staged = packed.numpy()
        for array, place in zip(arrays, places, strict=True):
            staged[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        with self._lock:
            self._poison_uploaded()
            self.counts.uploads += bool(at)
            self._uploaded += [array for array in arrays if self._poison_uploads and array.flags.writeable]
        packed = self._to_device(packed)
        return [
            packed[place : place + array.nbytes].view(_dtype_of(array)).view(array.shape)
            for array, place in zip(arrays, places, strict=True)
        ]

    def upload_into(self, array: Array, target: Tensor) -> None:
        """See `Device.upload_into`."""
        self._refuse_in_capture("upload_into")
        assert array.ndim == target.ndim == 1, f"a list into a list, not {array.shape} into {tuple(target.shape)}"
        assert len(array) <= len(target), f"{len(array)} numbers do not fit into {len(target)}"
        assert target.is_contiguous(), "the target's rows lie apart"
        assert _dtype_of(array) == target.dtype, f"{array.dtype} into {target.dtype}"
        with self._lock:
            self.counts.uploads_into += bool(len(array))
        target[: len(array)].copy_(self._to_device(torch.from_numpy(array.copy())))

    def staging(self, *shape: int) -> Tensor:
        """See `Device.staging`. The values are poison."""
        return poison(torch.empty(shape, dtype=torch.int32))

    def upload_staged(self, staged: Tensor) -> Tensor:
        """See `Device.upload_staged`."""
        return self.upload(staged.numpy())[0]

    def host_memory(self, nbytes: int) -> Tensor:
        """See `Device.host_memory`. The values are poison."""
        return poison(torch.empty(nbytes, dtype=torch.uint8))

    def in_host(self, memory: Tensor) -> Tensor:
        """See `Device.in_host`."""
        return self._to_device(memory)

    def copy_ahead(self, source: Tensor, target: Tensor, rows: Tensor | None = None) -> LateArrival:
        """See `Device.copy_ahead`. The target is poison until the copy is waited for, or another one needs it."""
        self._refuse_in_capture("copy_ahead")
        if rows is not None:
            source, rows = self._memory_of(source), self._memory_of(rows)
        target = self._memory_of(target)
        with self._lock:
            self.counts.copied_ahead += source.nbytes if rows is None else source[rows].nbytes
            for earlier in self._ahead:
                if earlier.precedes(source, target):
                    earlier.join()
            self._ahead = [earlier for earlier in self._ahead if not earlier.done]
            arrival = LateArrival(source, target, rows, list(self._ahead))
            self._ahead += [] if rows is None else [arrival]
        return arrival

    def download(self, *tensors: Tensor, lane: Lane = "tokens") -> Download:
        """See `Device.download`."""
        self._refuse_in_capture("download")
        found = LateDownload(self, lane, [self._memory_of(tensor) for tensor in tensors])
        with self._lock:
            self._unread[lane].append(found)
            self.counts.downloads[lane] += 1
        return found

    def capture(self, body: Callable[[], None]) -> Graph:
        """See `Device.capture`: the launches of `body` are recorded and undone."""
        if not self.captures:
            raise NotImplementedError("this device has no graphs")
        self._refuse_in_capture("capture")
        tape = Tape()
        self.capturing = True
        try:
            tape.record(body)
        finally:
            self.capturing = False
        self.counts.captures += 1
        graph = TapeGraph(tape)
        self.graphs.add(graph)
        return _CountedGraph(self, graph)

    def release_cache(self) -> None:
        """Only counts the call."""
        self.counts.releases += 1

    @property
    def unread(self) -> dict[Lane, int]:
        """Number of downloads of each lane without a wait; 0 after a job that has read all results."""
        return {lane: len(found) for lane, found in self._unread.items()}

    def _to_device(self, host: Tensor) -> Tensor:
        """A host tensor's copy on the device."""
        return host

    def _memory_of(self, tensor: Tensor) -> Tensor:
        """The memory behind a device tensor, not a copy."""
        return tensor

    def _refuse_in_capture(self, call: str) -> None:
        if self.capturing:
            raise RuntimeError(f"`{call}` inside a capture: the graph would not contain it")

    def _poison_uploaded(self) -> None:
        for array in self._uploaded:
            array.reshape(-1).view(np.uint8)[:] = 0xFF
        self._uploaded.clear()

    def _waited(self, download: LateDownload) -> None:
        with self._lock:
            unread = self._unread[download.lane]
            overtook = unread[0] is not download
            unread.remove(download)
            began = download.began
            uploads, downloads = (now - then for now, then in zip(self.clock(download.lane), began, strict=True))
            self.counts.waits.append(Wait(download.lane, uploads, downloads, overtook))

    def clock(self, lane: Lane) -> tuple[int, int]:
        """Number of uploads, and of downloads of a lane, so far."""
        return self.counts.uploads, self.counts.downloads[lane]


class LateArrival:
    """A copy to the device that is made when it is waited for."""

    def __init__(
        self, source: Tensor, target: Tensor, rows: Tensor | None = None, earlier: Sequence[LateArrival] = ()
    ) -> None:
        self._source, self._target, self._rows, self._earlier, self.done = source, target, rows, earlier, False
        self._then = self._read().clone()
        if rows is None:
            poison(target)
        else:
            target[rows] = poison(torch.empty_like(self._then))

    def precedes(self, source: Tensor, target: Tensor) -> bool:
        """Whether a later copy reads what this one writes, or writes what this one reads or writes."""
        used = (self._target, source), (self._source, target), (self._target, target)
        return any(a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a, b in used)

    def join(self) -> None:
        """See `Arrival.join`.

        Raises:
            AssertionError: the source has changed since the copy started.
        """
        if self.done:
            return
        for each in self._earlier:
            each.join()
        self._earlier = ()
        now, self.done = self._read(), self._rows is not None
        same = torch.equal(now.contiguous().view(torch.uint8), self._then.contiguous().view(torch.uint8))
        assert same, "the source of a copy was overwritten before it was read"
        if self._rows is None:
            self._target.copy_(now)
        else:
            self._target[self._rows] = now

    def _read(self) -> Tensor:
        return self._source if self._rows is None else self._source[self._rows]


class LateDownload:
    """Results that are only available after `wait`."""

    def __init__(self, device: LateDevice, lane: Lane, sources: list[Tensor]) -> None:
        self.lane = lane
        self.arrays = [as_array(poison(torch.empty_like(x, memory_format=torch.contiguous_format))) for x in sources]
        """The result of `wait`; poison until then."""
        self._device = device
        self._sources = sources
        self._then = [as_array(source.clone()) for source in sources]
        self._read = False
        uploads, downloads = device.clock(lane)
        self.began = (uploads, downloads + 1)

    def ready(self) -> bool:
        """True after another upload or download."""
        return self._read or self._device.clock(self.lane) != self.began

    def wait(self) -> list[Array]:
        """The current values of the sources.

        Raises:
            AssertionError: a source has changed since the download started.
        """
        if self._read:
            return self.arrays
        self._read = True
        self._device._waited(self)
        for place, (array, source) in enumerate(zip(self.arrays, self._sources, strict=True)):
            now = as_array(source)
            same = np.array_equal(_bits(now), _bits(self._then[place]))
            assert same, f"tensor {place} of a download was overwritten before it was read; download a clone of it"
            array[...] = now
        self._sources, self._then = [], []
        return self.arrays


class _CountedGraph:
    def __init__(self, device: LateDevice, graph: TapeGraph) -> None:
        self._device = device
        self._graph = graph

    def replay(self) -> None:
        self._device._refuse_in_capture("replay")
        self._device.counts.replays += 1
        self._graph.replay()


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _dtype_of(array: Array) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
