"""A device for tests that computes on the CPU and shows every mistake about time that a GPU would.

`LateDevice` has the shape of `CudaDevice`, on ordinary CPU tensors: uploads are packed copies, downloads hold poison
until they are waited for and read their sources only then, and graphs are tapes of what was launched (`fake_tape`).
It counts all of it, so that a test can say what a step costs. `fake_cuda.CountingDevice` is the same on tensors that
say they are on a GPU.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.device import Array, Download, Graph, Lane, as_array
from tests.engine.fake_tape import Tape, TapeGraph, poison

__all__ = ["Counts", "LateDevice", "LateDownload", "Wait"]

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Wait:
    """How late a download was first waited for."""

    lane: Lane
    uploads: int
    """Uploads between its beginning and the wait: 0 is a host that waits for what it has only just asked for."""
    downloads: int
    """Downloads of its lane begun meanwhile."""
    replays: int
    """Graphs started meanwhile."""
    steps: int
    """Calls of `LateDevice.mark` meanwhile."""
    overtook: bool
    """Whether an older download of its lane was still unread."""


@dataclass(slots=True)
class Counts:
    """What went through the door."""

    uploads: int = 0
    """Transfers, however many arrays are in one; none where all arrays are empty."""
    uploaded_arrays: int = 0
    uploaded_bytes: int = 0
    uploads_into: int = 0
    """Transfers of `upload_into`, not counted in `uploads`; their bytes are in `uploaded_bytes`."""
    downloads: Counter[Lane] = field(default_factory=Counter)
    downloaded_bytes: Counter[Lane] = field(default_factory=Counter)
    most_unread: Counter[Lane] = field(default_factory=Counter)
    """Largest number of downloads of a lane that were unread at the same time."""
    waits: list[Wait] = field(default_factory=list)
    captures: int = 0
    replays: int = 0
    releases: int = 0
    steps: int = 0

    def waits_of(self, lane: Lane) -> list[Wait]:
        """The waits of one lane, in order."""
        return [wait for wait in self.waits if wait.lane == lane]

    def lateness(self, lane: Lane = "tokens") -> Counter[int]:
        """How often a download of the lane was waited for how many uploads later."""
        return Counter(wait.uploads for wait in self.waits_of(lane))


class LateDevice:
    """Ordinary CPU tensors behind a door that is late.

    Args:
        captures: whether graphs are offered.
        strict: a source that changed between its download and the wait is an AssertionError; otherwise the wait gives
            the changed values, as a GPU might.
        poison_uploads: arrays that were uploaded are overwritten at the next `upload` or `mark`, to prove that nobody
            uses them again. Arrays that cannot be written to are left alone.
    """

    asynchronous = True

    def __init__(self, *, captures: bool = False, strict: bool = True, poison_uploads: bool = False) -> None:
        self.captures = captures
        self.strict = strict
        self.counts = Counts()
        self._poison_uploads = poison_uploads
        self._uploaded: list[Array] = []
        self._unread: dict[Lane, list[LateDownload]] = {"tokens": [], "outputs": []}
        self._capturing = False
        self._lock = threading.RLock()

    @property
    def torch_device(self) -> torch.device:
        """See `Device`."""
        return torch.device("cpu")

    def mark(self) -> None:
        """Tell that a step begins."""
        with self._lock:
            self.counts.steps += 1
            self._spoil()

    def upload(self, *arrays: Array) -> list[Tensor]:
        """See `Device.upload`. Whatever lies between the arrays in their transfer is poison."""
        self._outside_capture("upload")
        places, at = [], 0
        for array in arrays:
            places.append(at)
            at += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        packed = torch.full((at,), 0xFF, dtype=torch.uint8)
        staged = packed.numpy()
        for array, place in zip(arrays, places, strict=True):
            staged[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        with self._lock:
            self._spoil()
            self.counts.uploads += bool(at)
            self.counts.uploaded_arrays += len(arrays)
            self.counts.uploaded_bytes += sum(array.nbytes for array in arrays)
            self._uploaded += [array for array in arrays if self._poison_uploads and array.flags.writeable]
        packed = self._arrive(packed)
        return [
            packed[place : place + array.nbytes].view(_dtype_of(array)).view(array.shape)
            for array, place in zip(arrays, places, strict=True)
        ]

    def upload_into(self, array: Array, target: Tensor) -> None:
        """See `Device.upload_into`."""
        self._outside_capture("upload_into")
        assert array.ndim == target.ndim == 1, f"a list into a list, not {array.shape} into {tuple(target.shape)}"
        assert len(array) <= len(target), f"{len(array)} numbers do not fit into {len(target)}"
        assert target.is_contiguous(), "the target's rows lie apart"
        assert _dtype_of(array) == target.dtype, f"{array.dtype} into {target.dtype}"
        with self._lock:
            self.counts.uploads_into += bool(len(array))
            self.counts.uploaded_bytes += array.nbytes
        target[: len(array)].copy_(self._arrive(torch.from_numpy(array.copy())))

    def download(self, *tensors: Tensor, lane: Lane = "tokens") -> Download:
        """See `Device.download`."""
        self._outside_capture("download")
        found = LateDownload(self, lane, [self._leave(tensor) for tensor in tensors])
        with self._lock:
            counts, unread = self.counts, self._unread[lane]
            unread.append(found)
            counts.downloads[lane] += 1
            counts.downloaded_bytes[lane] += sum(tensor.nbytes for tensor in tensors)
            counts.most_unread[lane] = max(counts.most_unread[lane], len(unread))
        return found

    def capture(self, body: Callable[[], None]) -> Graph:
        """See `Device.capture`: what `body` launches is recorded, and has not happened when the call returns."""
        if not self.captures:
            raise NotImplementedError("this device has no graphs")
        self._outside_capture("capture")
        tape = Tape()
        self._capturing = True
        try:
            tape.record(body)
        finally:
            self._capturing = False
        self.counts.captures += 1
        return _CountedGraph(self, TapeGraph(tape))

    def release_cache(self) -> None:
        """Counted, and nothing else."""
        self.counts.releases += 1

    @property
    def unread(self) -> dict[Lane, int]:
        """Downloads of each lane that nobody has waited for: 0 after a job, unless it threw some away."""
        return {lane: len(found) for lane, found in self._unread.items()}

    def _arrive(self, host: Tensor) -> Tensor:
        """A host tensor's copy on the device."""
        return host

    def _leave(self, tensor: Tensor) -> Tensor:
        """The memory behind a device tensor, not a copy."""
        return tensor

    def _outside_capture(self, call: str) -> None:
        if self._capturing:
            raise RuntimeError(f"`{call}` inside a capture: the graph would not contain it")

    def _spoil(self) -> None:
        for array in self._uploaded:
            array.reshape(-1).view(np.uint8)[:] = 0xFF
        self._uploaded.clear()

    def _waited(self, download: LateDownload) -> None:
        with self._lock:
            unread = self._unread[download.lane]
            overtook = unread[0] is not download
            unread.remove(download)
            uploads, downloads, replays, steps = (
                now - then for now, then in zip(self._clock(download.lane), download.began, strict=True)
            )
            self.counts.waits.append(Wait(download.lane, uploads, downloads, replays, steps, overtook))

    def _clock(self, lane: Lane) -> tuple[int, int, int, int]:
        counts = self.counts
        return counts.uploads, counts.downloads[lane], counts.replays, counts.steps


class LateDownload:
    """Results that are not there before `wait`."""

    def __init__(self, device: LateDevice, lane: Lane, sources: list[Tensor]) -> None:
        self.lane = lane
        self.arrays = [as_array(poison(torch.empty_like(x, memory_format=torch.contiguous_format))) for x in sources]
        """What `wait` returns, poison until then."""
        self._device = device
        self._sources = sources
        self._then = [as_array(source.clone()) for source in sources] if device.strict else []
        self._read = False
        uploads, downloads, replays, steps = device._clock(lane)
        self.began = (uploads, downloads + 1, replays, steps)

    def ready(self) -> bool:
        """Not before something else was uploaded or downloaded."""
        uploads, downloads, *_ = self._device._clock(self.lane)
        return self._read or (uploads, downloads) != self.began[:2]

    def wait(self) -> list[Array]:
        """The sources' values as they are now.

        Raises:
            AssertionError: strict, and a source is not what it was when the download began.
        """
        if self._read:
            return self.arrays
        self._read = True
        self._device._waited(self)
        for place, (array, source) in enumerate(zip(self.arrays, self._sources, strict=True)):
            now = as_array(source)
            if self._device.strict:
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
        self._device._outside_capture("replay")
        self._device.counts.replays += 1
        self._graph.replay()


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _dtype_of(array: Array) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
