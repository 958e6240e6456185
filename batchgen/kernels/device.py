"""The one door through which a step's arrays go to the device and its results come back, none of them waited for.

A GPU works through a queue: what is uploaded, launched or downloaded happens in the order of the calls, later. Only
`Download.wait` waits, and it is called a step late, when there is nothing left to wait for. `HOST` is the same for a
CPU, where everything has happened when a call returns, and costs nothing. Tests have a third kind, which computes on a
CPU but shows every mistake about time that a GPU would: see tests/engine/fake_device.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["HOST", "Array", "CudaDevice", "Device", "Download", "Graph", "HostDevice", "Lane", "as_array", "device_for"]

Array = npt.NDArray[Any]

Lane = Literal["tokens", "outputs"]
"""Streams that results come back on: `tokens` for what the next step's plan waits for, `outputs` for everything else,
which may be large."""

_ALIGNMENT: Final = 16


class Download(Protocol):
    """Results on their way to the host."""

    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> list[Array]:
        """The values, once they have arrived, in the order they were asked for; bfloat16 as its bits in uint16."""
        ...


class Graph(Protocol):
    """Work recorded once, to be started again as a whole."""

    def replay(self) -> None:
        """Queue it again: it reads and writes the tensors it was recorded with."""
        ...


class Device(Protocol):
    """Where a run computes."""

    @property
    def torch_device(self) -> torch.device:
        """What tensors are made on."""
        ...

    @property
    def asynchronous(self) -> bool:
        """Whether calls return before the device is done, so that it pays to plan the next step meanwhile."""
        ...

    @property
    def captures(self) -> bool:
        """Whether `capture` is there."""
        ...

    def upload(self, *arrays: Array) -> list[Tensor]:
        """Copies of host arrays as contiguous tensors of the same dtypes and shapes, in one transfer.

        The arrays may be changed as soon as the call returns.
        """
        ...

    def upload_into(self, array: Array, target: Tensor) -> None:
        """Overwrite the beginning of a contiguous tensor [n] with `array` [m <= n] of its dtype, in stream order."""
        ...

    def download(self, *tensors: Tensor, lane: Lane = "tokens") -> Download:
        """Copy tensors to the host. No later work may write to them: what a graph will overwrite is cloned first."""
        ...

    def capture(self, body: Callable[[], None]) -> Graph:
        """Record what `body` launches, without running it; see `captures`.

        `body` must have run before (kernels compiled, libraries warm), and neither uploads nor downloads.
        """
        ...

    def release_cache(self) -> None:
        """Give memory back that is held for later allocations."""
        ...


class _Here:
    """Values that are on the host already."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def ready(self) -> bool:
        """Always."""
        return True

    def wait(self) -> list[Array]:
        """The values, without a copy."""
        return [as_array(tensor) for tensor in self._tensors]


class HostDevice:
    """A CPU: all calls are done when they return, and nothing is copied."""

    torch_device: Final = torch.device("cpu")
    asynchronous: Final = False
    captures: Final = False

    def upload(self, *arrays: Array) -> list[Tensor]:
        """The arrays themselves where they are contiguous: the caller leaves them alone while the step runs."""
        # Kernels read them as they lie: of an array that was broadcast they would read what lies behind it.
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]

    def upload_into(self, array: Array, target: Tensor) -> None:
        """See `Device.upload_into`."""
        target[: len(array)] = torch.from_numpy(array)

    def download(self, *tensors: Tensor, lane: Lane = "tokens") -> Download:
        """See `Device.download`; the values are those at the time of `wait`, which the caller must not write to."""
        return _Here(tensors)

    def capture(self, body: Callable[[], None]) -> Graph:
        """Never: see `captures`."""
        raise NotImplementedError("a CPU has no graphs")

    def release_cache(self) -> None:
        """Nothing is held."""


HOST: Final[Device] = HostDevice()
"""The CPU."""


class _CudaDownload:
    """Pinned copies and the event behind them."""

    __slots__ = ("_event", "_pinned")

    def __init__(self, pinned: list[Tensor], event: torch.cuda.Event) -> None:
        self._pinned = pinned
        self._event = event

    def ready(self) -> bool:
        """Asks the event."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[Array]:
        """The pinned copies, which nobody else writes to while they are held."""
        self._event.synchronize()
        return [as_array(tensor) for tensor in self._pinned]


class _GraphPool:
    """Memory that graphs share, for as long as one of them is there."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()


class _CudaGraph:
    __slots__ = ("_graph", "_pool")

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: _GraphPool) -> None:
        self._graph = graph
        self._pool = pool

    def replay(self) -> None:
        """One launch."""
        self._graph.replay()


class CudaDevice:
    """A GPU: copies go through pinned memory, downloads on streams of their own beside the computation.

    Pinned blocks come from PyTorch's host cache, which hands a block out again only after the copies it took part in
    are done: as many buffers as are in flight, and no more.
    """

    asynchronous: Final = True
    captures: Final = True

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._lanes: dict[Lane, torch.cuda.Stream] = {}
        self._graph_pool: Callable[[], _GraphPool | None] = lambda: None

    def upload(self, *arrays: Array) -> list[Tensor]:
        """See `Device.upload`."""
        at, places = 0, []
        for array in arrays:
            places.append(at)
            at += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        pinned = torch.empty(at, dtype=torch.uint8, pin_memory=True)
        staged = pinned.numpy()
        for array, place in zip(arrays, places, strict=True):
            staged[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        packed = pinned.to(self.torch_device, non_blocking=True)
        return [
            packed[place : place + array.nbytes].view(_dtype_of(array)).view(array.shape)
            for array, place in zip(arrays, places, strict=True)
        ]

    def upload_into(self, array: Array, target: Tensor) -> None:
        """See `Device.upload_into`."""
        pinned = torch.empty(len(array), dtype=target.dtype, pin_memory=True)
        pinned.copy_(torch.from_numpy(array))
        target[: len(array)].copy_(pinned, non_blocking=True)

    def download(self, *tensors: Tensor, lane: Lane = "tokens") -> Download:
        """See `Device.download`."""
        stream = self._lanes.get(lane)
        if stream is None:
            stream = self._lanes[lane] = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        computing = torch.cuda.current_stream(self.torch_device)
        stream.wait_stream(computing)
        pinned = []
        with torch.cuda.stream(stream):
            for tensor in tensors:
                target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                target.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
                pinned.append(target)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return _CudaDownload(pinned, event)

    def capture(self, body: Callable[[], None]) -> Graph:
        """See `Device.capture`. All graphs share one pool of memory: they never run at the same time.

        PyTorch's allocator refuses a pool whose graphs are all gone, as those of a rehearsal are when the job begins,
        as long as it has not freed it, and a library's workspace may keep it. So the next graph gets another.
        """
        graph = torch.cuda.CUDAGraph()
        pool = self._graph_pool()
        if pool is None:
            pool = _GraphPool()
            self._graph_pool = weakref.ref(pool)
        try:
            # A capture that cannot be ended leaves its stream the current one.
            with (
                torch.cuda.stream(torch.cuda.current_stream(self.torch_device)),
                torch.cuda.graph(graph, pool=pool.handle, capture_error_mode="thread_local"),
            ):
                body()
        except RuntimeError:
            # Older versions of torch leave their allocator in such a capture: it frees nothing that was downloaded, and
            # fails when it is to empty its cache. Others say that there is nothing to end.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool.handle)
            raise
        return _CudaGraph(graph, pool)

    def release_cache(self) -> None:
        """Give the caching allocator's free blocks back."""
        torch.cuda.empty_cache()


def device_for(device: torch.device) -> Device:
    """The door to a torch device."""
    return CudaDevice(device) if device.type == "cuda" else HOST


def as_array(tensor: Tensor) -> Array:
    """A host tensor's values as an array without a copy; bfloat16, which numpy lacks, as its bits in uint16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    found: Array = tensor.numpy()
    return found


def _dtype_of(array: Array) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
