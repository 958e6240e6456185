"""A simulated GPU for tests: tensors that claim to be on `cuda:0`, and a record of host waits.

Inside `fake_cuda()` the engine runs on the device "cuda" of a machine without a GPU. A device tensor wraps a CPU
tensor, on which operations compute and Triton's kernels run in the interpreter. What a real GPU rejects is an error
(tensors of two devices in one operation, `numpy()`); what would make the host wait for a real GPU is recorded with the
line of batchgen that caused it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import batchgen
from batchgen.kernels.gpu.launch import recording
from tests.engine.fake_device import LateDevice
from tests.engine.fake_syncs import COPIES, INDEXING, argument, is_composite, why_it_waits
from tests.engine.fake_tape import start

aten = torch.ops.aten

CUDA = torch.device("cuda", 0)
_MEMORY = 1 << 30
_PACKAGE = str(Path(batchgen.__file__).parent)

_NO_NUMBERS = (
    aten.cat, aten.stack, aten.gather, aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_,
    aten.index_select, aten.index_copy, aten.index_copy_, aten.index_add, aten.index_add_, aten.embedding,
)  # fmt: skip
"""Operations that do not accept a number on the host together with a device tensor."""
_PINNING = (aten.pin_memory, aten._pin_memory, aten.is_pinned)
_WHOLE = (aten.scaled_dot_product_attention,)
"""Composite operations that do not wait and are not decomposed, because their parts depend on the device."""


@dataclass(frozen=True, slots=True)
class Sync:
    """An operation that would make the host wait for a GPU."""

    place: str
    """"batchgen/engine/sampler.py:105", or the caller's line if no line of batchgen is on the stack."""
    operation: str
    why: str

    def __str__(self) -> str:
        return f"{self.place}: {self.operation} {self.why}"


class GpuTensor(Tensor):
    """A tensor on the simulated GPU."""

    behind: Tensor
    """CPU tensor of the same sizes and strides that it computes on; views share its memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, behind: Tensor) -> GpuTensor:
        made = Tensor._make_wrapper_subclass(
            cls, behind.shape, behind.stride(), behind.storage_offset(), dtype=behind.dtype, device=CUDA
        )
        made.behind = behind
        return made

    def __repr__(self) -> str:
        return f"GpuTensor({self.behind!r})"

    def data_ptr(self) -> int:
        return self.behind.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return self.cpu().numpy()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class CountingDevice(LateDevice):
    """The transfers of a `FakeGpu`: they are counted as transfers, not as waits."""

    @property
    def torch_device(self) -> torch.device:
        return CUDA

    def _to_device(self, host: Tensor) -> Tensor:
        return GpuTensor(host)

    def _memory_of(self, tensor: Tensor) -> Tensor:
        assert isinstance(tensor, GpuTensor), "a download of a tensor that is on the host already"
        return tensor.behind


class FakeGpu(TorchDispatchMode):
    """Dispatches operations that are meant for a GPU to `GpuTensor`s, and records waits."""

    def __init__(self, device: CountingDevice) -> None:
        super().__init__()
        self.device = device
        self.syncs: list[Sync] = []
        self.copies: list[str] = []
        """Lines that copy from or to pinned memory without the `Device`; these do not wait."""
        self.kernels: set[str] = set()
        """Names of the Triton kernels launched so far."""
        self._pinned: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _PINNING:
            return self._pin(func, args)
        if kwargs.get("pin_memory"):
            return self._pin(aten._pin_memory.default, (func(*args, **{**kwargs, "pin_memory": False}),))
        if any(map(_meant_for_gpu, tree_leaves((args, kwargs)))):
            return _run(func, args, kwargs, self)
        return func(*args, **kwargs)

    def _pin(self, func: Any, args: tuple[Any, ...]) -> Any:
        if func.overloadpacket is aten.is_pinned:
            return args[0].untyped_storage()._cdata in self._pinned
        pinned = args[0].clone()
        self._pinned[pinned.untyped_storage()._cdata] = pinned
        return pinned

    def is_pinned(self, tensor: Any) -> bool:
        """Whether a tensor is in pinned host memory."""
        return type(tensor) is Tensor and tensor.untyped_storage()._cdata in self._pinned

    def copies_pinned(self) -> None:
        """Record a copy of pinned memory without the `Device`."""
        self.copies.append(_place())

    def waits(self, operation: str, why: str) -> None:
        """Record that the host waits here."""
        self.syncs.append(Sync(_place(), operation, why))

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Run a kernel on CPU memory."""
        host = [i for i, arg in enumerate(args) if isinstance(arg, Tensor) and not isinstance(arg, GpuTensor)]
        if host and any(isinstance(arg, GpuTensor) for arg in args):
            raise ValueError(f"pointer argument {host[0]} of {kernel.fn.__name__} is on the host")
        self.kernels.add(kernel.fn.__name__)
        start(kernel, grid, args, constants)


class _Numbered(TorchFunctionMode):
    """Gives the device "cuda" its index, for which PyTorch would ask a driver."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return func(args[0], CUDA)
        if func is Tensor.to or any(isinstance(arg, torch.device) for arg in args):
            args = tuple(map(_numbered, args))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _numbered(kwargs["device"])}
        return func(*args, **kwargs)


def _numbered(device: Any) -> Any:
    return CUDA if isinstance(device, torch.device | str) and device in ("cuda", torch.device("cuda")) else device


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], gpu: FakeGpu | None = None) -> Any:
    """Run an operation on the CPU tensors of its arguments."""
    if torch.Tag.inplace_view in func.tags and func.overloadpacket is not aten.detach_:
        raise NotImplementedError(f"{func} would change a tensor's shape in place")
    if func.overloadpacket not in _WHOLE and is_composite(func):
        parts = func.decompose(*args, **kwargs) if gpu is None else _decomposed(gpu, func, args, kwargs)
        if parts is not NotImplemented:
            return parts
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    _check_devices(func, args, given)
    why = why_it_waits(func, args, kwargs)
    if why is not None and gpu is not None:
        if argument(func, args, kwargs, "non_blocking") and any(map(gpu.is_pinned, given)):
            gpu.copies_pinned()
        else:
            gpu.waits(str(func), why)
    device = kwargs.get("device")
    goes = device.type if device is not None else _destination(func, args)
    if device is not None and device.type == "cuda":
        kwargs = {**kwargs, "device": torch.device("cpu")}
    compute = _host_histogram if func.overloadpacket is aten.histc else func
    results = compute(*tree_map(_behind, args), **tree_map(_behind, kwargs))
    # A view of a normal tensor is a normal tensor, also in inference mode.
    normal = _is_view(func) and any(not x.is_inference() for x in given)
    known = {id(_behind(x)): x for x in given}

    def outer(found: Any) -> Any:
        if not isinstance(found, Tensor):
            return found
        if id(found) in known:
            same = known[id(found)]
            assert same.shape == found.shape, f"{func} would resize its output"
            return same
        if goes != "cuda":
            return found
        with torch.inference_mode(torch.is_inference_mode_enabled() and not normal):
            return GpuTensor(found)

    return tree_map(outer, results)


def _decomposed(gpu: FakeGpu, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with gpu:
        return func.decompose(*args, **kwargs)


def _host_histogram(values: Tensor, *args: Any) -> Tensor:
    """Histogram of integers, which the CPU's `histc` does not support."""
    return torch.histc(values.double(), *args).to(values.dtype)


def _is_view(func: Any) -> bool:
    """Whether an operation returns views of its arguments."""
    return any(result.alias_info is not None for result in func._schema.returns)


def _destination(func: Any, args: tuple[Any, ...]) -> str:
    """Device of the results without a `device` argument: that of the first argument of a copy, else the GPU."""
    if func.overloadpacket in COPIES and isinstance(args[0], Tensor):
        return args[0].device.type
    return "cuda"


def _check_devices(func: Any, args: tuple[Any, ...], given: list[Tensor]) -> None:
    """Raise if host tensors, other than numbers, are mixed with device tensors."""
    packet = func.overloadpacket
    if packet in COPIES or not any(isinstance(x, GpuTensor) for x in given):
        return
    if packet in INDEXING and isinstance(args[0], GpuTensor):
        given = [x for x in given if not any(x is index for index in args[1])]
    for tensor in given:
        if not isinstance(tensor, GpuTensor) and (tensor.dim() or packet in _NO_NUMBERS):
            raise RuntimeError(
                f"Expected all tensors to be on the same device: {func} got one of {list(tensor.shape)} on the host"
            )


def _behind(value: Any) -> Any:
    return value.behind if isinstance(value, GpuTensor) else value


def _meant_for_gpu(leaf: Any) -> bool:
    return isinstance(leaf, GpuTensor) or (isinstance(leaf, torch.device) and leaf.type == "cuda")


def _place() -> str:
    """The innermost line of batchgen on the stack, else the innermost line outside torch and the fakes."""
    frame, other = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE):
            return f"batchgen/{Path(name).relative_to(_PACKAGE).as_posix()}:{frame.f_lineno}"
        if not other and "torch" not in Path(name).parts and not Path(name).name.startswith("fake_"):
            other = f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return other


@contextmanager
def _guarded() -> Iterator[None]:
    """Register the CPU's device guard, which does nothing, for CUDA, because a build without CUDA has none."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before, guards[1] = guards[1], guards[0]
    try:
        yield
    finally:
        guards[1] = before


@contextmanager
def fake_cuda(**options: Any) -> Iterator[FakeGpu]:
    """Simulate a Hopper GPU inside the block, with `options` of `CountingDevice`."""
    device = CountingDevice(**options)
    gpu = FakeGpu(device)
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, total_memory=_MEMORY, multi_processor_count=132,
        shared_memory_per_block_optin=232_448, warp_size=32,
    )  # fmt: skip

    counted = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved", "current_device")
    replaced: dict[str, Any] = {
        **dict.fromkeys(("_lazy_init", "empty_cache", "reset_peak_memory_stats"), lambda *_: None),
        **dict.fromkeys(("is_available", "is_initialized"), lambda: True),
        **dict.fromkeys(counted, lambda *_: 0),
        "device_count": lambda: 1,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (_MEMORY // 2, _MEMORY),
        "synchronize": lambda device=None: gpu.waits("torch.cuda.synchronize", "waits for everything"),
    }
    with ExitStack() as stack:
        for call, replacement in replaced.items():
            stack.enter_context(patch.object(torch.cuda, call, replacement))
        stack.enter_context(patch.object(torch.version, "cuda", "12.8"))
        stack.enter_context(patch("batchgen.kernels.device.CudaDevice", lambda where: device))
        stack.enter_context(_guarded())
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, before)
        whether = torch.__future__.get_overwrite_module_params_on_conversion()
        # Parameters cannot change their device in place.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, whether)
        stack.enter_context(recording(gpu.launch))
        stack.enter_context(gpu)
        stack.enter_context(_Numbered())
        yield gpu
