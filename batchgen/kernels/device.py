"""The device of a run: uploads, downloads and CUDA graphs, none of which wait for the device, and the CPU quota.

A GPU works through a queue: uploads, launches and downloads are executed in the order of the calls, later. Only
`Download.wait` waits, and the engine calls it a step late, when the results are there. `HOST` is the same interface for
a CPU, where every call is complete when it returns. Tests have a third implementation, which computes on a CPU but
shows every ordering mistake that a GPU would: see tests/engine/fake_device.py.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

Lane = Literal["tokens", "outputs"]
"""Streams of downloads: `tokens` for results that the next step's plan waits for, `outputs` for everything else, which
may be large."""

_ALIGNMENT: Final = 16
_TOGETHER: Final = 32 << 20
"""Bytes of rows that are copied at once."""


class Download(Protocol):
    """Results in transfer to the host."""

    def ready(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> list[Array]:
        """The values in the order of the `download` call, once they have arrived; bfloat16 as its bits in uint16."""


class Graph(Protocol):
    """Captured work that can be replayed as a whole."""

    def replay(self) -> None:
        """Queue the work again; it reads and writes the tensors of the capture."""


class Arrival(Protocol):
    """A copy to the device that work launched later waits for."""

    def join(self) -> None:
        """Have all that is launched next wait for the copy; the host does not wait."""


class Device(Protocol):
    """The device that a run computes on."""

    @property
    def torch_device(self) -> torch.device:
        """The torch device of tensors."""

    @property
    def asynchronous(self) -> bool:
        """Whether calls return before the device is done, so that planning the next step meanwhile pays off."""

    @property
    def captures(self) -> bool:
        """Whether `capture` is supported."""

    def upload(self, *arrays: Array) -> list[Tensor]:
        """Copy host arrays to contiguous tensors of the same dtypes and shapes, in one transfer.

        The caller may change the arrays as soon as the call returns.
        """

    def upload_into(self, array: Array, target: Tensor) -> None:
        """Overwrite the beginning of a contiguous tensor [n] with `array` [m <= n] of its dtype, in stream order."""

    def staging(self, *shape: int) -> Tensor:
        """An int32 tensor of the host with undefined values, to be filled once for `upload_staged`."""

    def upload_staged(self, staged: Tensor) -> Tensor:
        """Copy a tensor of `staging`, which must not be changed any more, to the device without another copy of it."""

    def host_memory(self, nbytes: int) -> Tensor:
        """[nbytes] uint8 on the host with undefined values, that `copy_ahead` can copy while the device computes."""

    def in_host(self, memory: Tensor) -> Tensor:
        """A tensor of `host_memory` as one of the device, whose work reads and writes it where it is."""

    def copy_ahead(self, source: Tensor, target: Tensor, rows: Tensor | None = None) -> Arrival:
        """Copy memory of the host to the device, or back to memory given by `in_host`, next to computations.

        The copy begins when what is launched so far is done, so that this may read the target; what is launched between
        this call and `Arrival.join` must not. The source stays as it is until the copy is done. Copies follow one
        another. `rows`: [n] int64 on the device, the ones of the first dimension to copy, with a source given by
        `in_host`; None: all.
        """

    def download(self, *tensors: Tensor, lane: Lane = "tokens") -> Download:
        """Copy tensors to the host. Later work must not write to them: clone what a graph will overwrite first."""

    def capture(self, body: Callable[[], None]) -> Graph:
        """Capture what `body` launches, without running it; see `captures`.

        `body` must have run before (kernels compiled, libraries warm), and must not upload or download.
        """

    def release_cache(self) -> None:
        """Return cached free memory to the device."""


class _HostDownload:
    """A `Download` of values that are on the host already."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def ready(self) -> bool:
        """True: the values are on the host."""
        return True

    def wait(self) -> list[Array]:
        """The values, without a copy."""
        return [as_array(tensor) for tensor in self._tensors]


class _HostArrival:
    """An `Arrival` of a copy that is done."""

    __slots__ = ()

    def join(self) -> None:
        """Nothing to wait for."""


class HostDevice:
    """A CPU: every call is complete when it returns, and nothing is copied."""

    torch_device: Final = torch.device("cpu")
    asynchronous: Final = False
    captures: Final = False

    def upload(self, *arrays: Array) -> list[Tensor]:
        """The arrays themselves where they are contiguous: the caller must not change them while the step runs."""
        # Kernels assume contiguous memory; a broadcast array has none of its elements behind the first.
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]

    def upload_into(self, array: Array, target: Tensor) -> None:
        """See `Device.upload_into`."""
        target[: len(array)] = torch.from_numpy(array)

    def staging(self, *shape: int) -> Tensor:
        """See `Device.staging`."""
        return torch.empty(shape, dtype=torch.int32)

    def upload_staged(self, staged: Tensor) -> Tensor:
        """The tensor itself."""
        return staged

    def host_memory(self, nbytes: int) -> Tensor:
        """See `Device.host_memory`."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def in_host(self, memory: Tensor) -> Tensor:
        """The tensor itself."""
        return memory

    def copy_ahead(self, source: Tensor, target: Tensor, rows: Tensor | None = None) -> Arrival:
        """See `Device.copy_ahead`; copied at once."""
        _copy(source, target, rows)
        return _HostArrival()

    def download(self, *tensors: Tensor, lane: Lane = "tokens") -> Download:
        """See `Device.download`; the values are read at `wait`, so the caller must not write to them before."""
        return _HostDownload(tensors)

    def capture(self, body: Callable[[], None]) -> Graph:
        """Not supported: see `captures`."""
        raise NotImplementedError("a CPU cannot capture graphs: check `captures` first")

    def release_cache(self) -> None:
        """Do nothing: a CPU caches no memory."""


HOST: Final[Device] = HostDevice()
"""The CPU device."""


class _CudaDownload:
    """Pinned copies and the event that marks their completion."""

    __slots__ = ("_event", "_pinned")

    def __init__(self, pinned: list[Tensor], event: torch.cuda.Event) -> None:
        self._pinned = pinned
        self._event = event

    def ready(self) -> bool:
        """Whether the event has completed."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[Array]:
        """The pinned copies. PyTorch does not reuse their memory while they are referenced."""
        self._event.synchronize()
        return [as_array(tensor) for tensor in self._pinned]


class _CudaArrival:
    """The event that marks the end of a copy."""

    __slots__ = ("_event", "_where")

    def __init__(self, event: torch.cuda.Event, where: torch.device) -> None:
        self._event, self._where = event, where

    def join(self) -> None:
        """See `Arrival.join`."""
        torch.cuda.current_stream(self._where).wait_event(self._event)


class _GraphPool:
    """A memory pool shared by graphs, alive as long as one of them is."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()


class _CudaGraph:
    __slots__ = ("_graph", "_pool")

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: _GraphPool) -> None:
        self._graph = graph
        self._pool = pool

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()


class CudaDevice:
    """A GPU: copies go through pinned memory; downloads have separate streams and overlap with computation.

    Pinned blocks come from PyTorch's host cache, which reuses a block only after its copies are done, so there are as
    many buffers as transfers in flight.
    """

    asynchronous: Final = True
    captures: Final = True

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._lanes: dict[Lane, torch.cuda.Stream] = {}
        self._ahead: torch.cuda.Stream | None = None
        self._graph_pool: Callable[[], _GraphPool | None] = lambda: None
        self._capture_stream: torch.cuda.Stream | None = None

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

    def staging(self, *shape: int) -> Tensor:
        """See `Device.staging`."""
        return torch.empty(shape, dtype=torch.int32, pin_memory=True)

    def upload_staged(self, staged: Tensor) -> Tensor:
        """See `Device.upload_staged`."""
        return staged.to(self.torch_device, non_blocking=True)

    def host_memory(self, nbytes: int) -> Tensor:
        """See `Device.host_memory`. Locked in place: PyTorch's own pinned memory is rounded up to powers of two.

        It shares no page with other memory, as a page cannot be locked twice.
        """
        memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), nbytes, 0))
        weakref.finalize(memory, _unlock, memory.data_ptr(), self.torch_device).atexit = False
        return memory

    def in_host(self, memory: Tensor) -> Tensor:
        """See `Device.in_host`. A GPU reaches locked memory under the same address."""
        facts = {"shape": tuple(memory.shape), "typestr": "|u1", "data": (memory.data_ptr(), False), "version": 2}
        return torch.as_tensor(SimpleNamespace(memory=memory, __cuda_array_interface__=facts), device=self.torch_device)

    def copy_ahead(self, source: Tensor, target: Tensor, rows: Tensor | None = None) -> Arrival:
        """See `Device.copy_ahead`."""
        if self._ahead is None:
            self._ahead = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._ahead.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._ahead):
            _copy(source, target, rows)
            for used in (target,) if rows is None else (source, target, rows):
                used.record_stream(self._ahead)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._ahead)
        return _CudaArrival(event, self.torch_device)

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
        """See `Device.capture`. All graphs share one memory pool: they never run at the same time.

        PyTorch's allocator rejects a pool whose graphs are all deleted (those of a dummy run are before the job begins)
        but whose memory is not yet freed, which a library's workspace may prevent. The next graph then gets a new pool.
        """
        graph = torch.cuda.CUDAGraph()
        pool = self._graph_pool()
        if pool is None:
            pool = _GraphPool()
            self._graph_pool = weakref.ref(pool)
        if self._capture_stream is None:
            self._capture_stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        try:
            # Not `torch.cuda.graph`, which waits for the device and empties the allocator's cache.
            with torch.cuda.stream(self._capture_stream):
                graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
                try:
                    body()
                finally:
                    graph.capture_end()
        except RuntimeError:
            # Older versions of torch leave their allocator in the failed capture, where it frees nothing that was
            # downloaded and fails to empty its cache. Newer ones raise: there is nothing to end.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool.handle)
            raise
        return _CudaGraph(graph, pool)

    def release_cache(self) -> None:
        """Return the caching allocator's free blocks to the device."""
        torch.cuda.empty_cache()


def _copy(source: Tensor, target: Tensor, rows: Tensor | None) -> None:
    """Launch a copy of `rows` [n] of the first dimension, None: of all, through little temporary memory."""
    if rows is None:
        target.copy_(source, non_blocking=True)
    for part in () if rows is None else rows.chunk(1 + len(rows) * source[0].nbytes // _TOGETHER):
        target.index_copy_(0, part, source.index_select(0, part))


def _unlock(address: int, device: torch.device) -> None:
    """Undo the locking of host memory that is freed, when no copy reads it any more."""
    torch.cuda.synchronize(device)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(address)


def device_for(device: torch.device) -> Device:
    """The `Device` of a torch device."""
    return CudaDevice(device) if device.type == "cuda" else HOST


def as_array(tensor: Tensor) -> Array:
    """A host tensor's values as an array, without a copy; bfloat16, which numpy lacks, as its bits in uint16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: Array = tensor.numpy()
    return array


def to_float32(values: Array) -> npt.NDArray[np.float32]:
    """Exact float32 values of an array; one in uint16 has the bits of bfloat16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def _dtype_of(array: Array) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


_UNLIMITED: Final = "max"


def cpu_quota(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Processors that this process's control groups allow, rounded up; None if they set no limit.

    A scheduler that grants 2 of 64 processors as a share of time still shows all 64; 64 threads would then wait for
    one another most of the time.

    Args:
        own: file that names the process's control groups.
        root: folder of version 2 groups, or of version 1's `cpu` controller.
    """
    limits = []
    for line in _read(own).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            limits += [_quota(*_read(folder / "cpu.max").split()[:2]) for folder in _upwards(root, path)]
        elif "cpu" in controllers.split(","):
            limits += [
                _quota(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))
                for folder in _upwards(root / "cpu", path)
            ]
    stated = [limit for limit in limits if limit is not None]
    return min(stated, default=None)


def _upwards(root: Path, path: str) -> list[Path]:
    """Folders of the group and its parents. A container sees its own group as the root."""
    parts = [part for part in path.strip().split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:i]) for i in range(len(parts), -1, -1)]


def _quota(quota: str = "", period: str = "") -> int | None:
    quota, period = quota.strip(), period.strip()
    if quota == _UNLIMITED or not quota.isdigit() or not period.isdigit() or not int(quota) or not int(period):
        return None
    return -(-int(quota) // int(period))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
