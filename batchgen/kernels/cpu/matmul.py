"""Matrix products y = x W^T + b by `src/matmul.cpp`, weights packed in panels, and the memory of packed weights.

Every element of y is one sum over k in ascending order, whatever the number of rows or threads: a row's result depends
on that row and on W only, bit for bit.

Packed weights are allocated next to each other from large slabs, for which numpy asks the system for huge pages: every
step reads all weights, and huge pages need fewer address translations.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.cpu.command_buffer import MATMUL, current_buffer
from batchgen.kernels.cpu.library import DTYPES, library
from batchgen.kernels.cpu.structs import fields
from batchgen.kernels.quantization import BFP, INT8, GroupedWeight, Scheme, groups_of

SLAB: Final = 64 << 20
"""Bytes of a slab. numpy asks for huge pages from 4 MiB on; larger slabs waste less memory at their ends."""
_SEPARATE: Final = SLAB // 4
"""Weights of more bytes than this have a separate allocation, so that the unused rest of a slab stays small."""
_LINE: Final = 64
"""Weights are aligned to a cache line of this many bytes."""


class _Slab:
    """Allocator that fills one slab of memory after the other. A slab is freed with the last weight in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: Callable[[], npt.NDArray[np.uint8] | None] = lambda: None
        self._used = 0

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """[size] bytes of new memory, aligned to a cache line."""
        with self._lock:
            memory = self._memory()
            if memory is None or self._used + size > len(memory):
                memory = np.empty(SLAB, np.uint8)
                self._memory, self._used = weakref.ref(memory), _to_line(memory)
            taken = memory[self._used : self._used + size]
            self._used += size + -size % _LINE
            return taken


_slab: Final = _Slab()


def weight_memory(count: int, dtype: torch.dtype) -> Tensor:
    """[count] uninitialised numbers, aligned to a cache line."""
    size = count * dtype.itemsize
    if size <= _SEPARATE:
        return torch.from_numpy(_slab.take(size)).view(dtype)
    memory = np.empty(size + _LINE, np.uint8)
    begin = _to_line(memory)
    return torch.from_numpy(memory[begin : begin + size]).view(dtype)


def _to_line(memory: npt.NDArray[np.uint8]) -> int:
    """Offset in bytes of the first cache line of `memory`."""
    return -memory.ctypes.data % _LINE


Method = Literal["widened", "dot", "int8", "bfp"]
"""How numbers are multiplied. `widened`: in float32; bfloat16 weights are widened exactly. `dot`: by the processor's
bfloat16 dot instruction, which sums in pairs and flushes denormal numbers to zero. `int8`: by its int8 dot instruction,
over quantised weights (`kernels.quantization`). `bfp`: bfloat16 in block floating point, 16-bit integers with a scale
for each group of inputs, which lose less than rounding to bfloat16 does."""

METHODS: Final[dict[tuple[torch.dtype, Method], int]] = {
    (torch.float32, "widened"): 0,
    (torch.bfloat16, "widened"): 1,
    (torch.bfloat16, "dot"): 2,
    (torch.float32, "int8"): 3,
    (torch.bfloat16, "int8"): 4,
    (torch.bfloat16, "bfp"): 5,
}
"""Codes by (dtype of x and W, method): `Method` of `src/matmul.h`."""


_BLOCK: Final = 1 << 22
"""Elements of a quantised weight that are packed at once, as packing needs wider temporaries."""


class MatmulCall(ctypes.Structure):
    """`Matmul` of `src/matmul.h`."""

    _fields_ = (
        *fields(c_void_p, "x weight bias out"),
        *fields(c_int64, "rows inner outer x_stride out_stride method"),
        ("scratch", c_void_p),
        *fields(c_int64, "x_wide group"),
    )


class _Packing(ctypes.Structure):
    """`Packing` of `src/pack.cpp`, `BfpPacking` of `src/bfp.cpp`."""

    _fields_ = (("weight", c_void_p), ("packed", c_void_p), ("inner", c_int64), ("outer", c_int64), ("stride", c_int64))


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight W [O, I] in panels."""

    data: Tensor
    """Flat; of W's dtype, or bytes for integers with scales."""
    dtype: torch.dtype
    """Dtype of x and y."""
    inner: int
    outer: int
    scratch: int
    """Bytes of workspace that a product needs per thread."""
    layout: Literal["whole", "int8", "bfp"] = "whole"
    """`whole`: W's numbers, not quantised."""
    group: int = 0
    """Most inputs of a group of `int8`."""


@cache
def _library() -> Any:
    """The library with its functions' types declared."""
    compiled = library()
    for name, arguments, result in (
        ("bg_matmul", (c_void_p, c_int64), None),
        ("bg_matmul_pack", (c_void_p, c_int64, c_int64), None),
        ("bg_matmul_unpack", (c_void_p, c_int64, c_int64), None),
        ("bg_matmul_scratch", (c_int64, c_int64, c_int64), c_int64),
        ("bg_matmul_panel", (), c_int64),
        ("bg_matmul_has_dot", (), c_int64),
        ("bg_matmul_has_int8", (), c_int64),
        ("bg_matmul_has_bfp", (), c_int64),
    ):
        function = getattr(compiled, name)
        function.argtypes, function.restype = arguments, result
    return compiled


def methods(dtype: torch.dtype) -> tuple[Method, ...]:
    """Methods for `dtype` on this processor; empty for a dtype that is not supported."""
    built: dict[str, Any] = {name: getattr(_library(), f"bg_matmul_has_{name}") for name in ("dot", "int8", "bfp")}
    return tuple(name for kind, name in METHODS if kind == dtype and (name == "widened" or built[name]()))


def pack(weight: Tensor) -> PackedWeight:
    """A copy of the weight [O, I], float32 or bfloat16, in panels.

    Raises:
        TypeError: the weight has another dtype.
    """
    if weight.dtype not in DTYPES:
        raise TypeError(f"compiled products support float32 and bfloat16 weights, got {weight.dtype}")
    outer, inner = weight.shape
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    panel, pair = _library().bg_matmul_panel(), 2 if weight.dtype == torch.bfloat16 else 1
    data = weight_memory(-(-outer // panel) * panel * (-(-inner // pair) * pair), weight.dtype)
    call = _Packing(weight.data_ptr(), data.data_ptr(), inner, outer, weight.stride(0))
    _library().bg_matmul_pack(ctypes.byref(call), pair - 1, torch.get_num_threads())
    scratch = _library().bg_matmul_scratch(inner, METHODS[weight.dtype, "widened"], 0)
    return PackedWeight(data, weight.dtype, inner, outer, scratch)


def pack_int8(weight: GroupedWeight, dtype: torch.dtype) -> PackedWeight:
    """A copy in panels of a weight in int8, whatever its groups, for x of `dtype`, in the layout of `src/int8.h`."""
    outer, count, size = weight.numbers.shape
    panel = _library().bg_matmul_panel()
    panels = -(-outer // panel)
    data = weight_memory(int8_bytes(outer, weight.inner, weight.scheme.group), torch.uint8)
    data = data.view(panels, count, panel * (8 + size))
    step = max(1, _BLOCK // max(1, panel * weight.inner))
    for begin in range(0, panels, step):
        rows = slice(begin * panel, (begin + step) * panel)
        data[begin : begin + step] = _int8_panels(weight.numbers[rows], weight.scales[rows], panel)
    group = weight.scheme.group
    scratch = _library().bg_matmul_scratch(weight.inner, METHODS[dtype, "int8"], group)
    return PackedWeight(data.flatten(), dtype, weight.inner, outer, scratch, "int8", group)


def int8_bytes(outer: int, inner: int, group: int) -> int:
    """Bytes of a weight [O, I] that `pack_int8` packs in groups of at most `group` inputs."""
    panel, (count, size) = _library().bg_matmul_panel(), groups_of(inner, replace(INT8, group=group))
    return int(-(-outer // panel)) * count * int(panel) * (8 + size)


def pack_bfp(weight: Tensor) -> PackedWeight:
    """A copy of the weight [O, I], bfloat16, in panels of block floating point, in the layout of `src/bfp.h`."""
    outer, inner = weight.shape
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    panel, (count, size) = _library().bg_matmul_panel(), groups_of(inner, BFP)
    data = weight_memory(-(-outer // panel) * count * panel * (4 + 2 * size), torch.uint8)
    call = _Packing(weight.data_ptr(), data.data_ptr(), inner, outer, weight.stride(0))
    pack_panels = _library().bg_matmul_pack_bfp
    pack_panels.argtypes, pack_panels.restype = (c_void_p, c_int64), None
    pack_panels(ctypes.byref(call), torch.get_num_threads())
    scratch = _library().bg_matmul_scratch(inner, METHODS[weight.dtype, "bfp"], 0)
    return PackedWeight(data, weight.dtype, inner, outer, scratch, "bfp")


def _int8_panels(numbers: Tensor, scales: Tensor, panel: int) -> Tensor:
    """Panels as bytes [panels, G, panel * (8 + S)], of rows [O, G, S] int8 and their scales [O, G]."""
    outer, count, size = numbers.shape
    more = -outer % panel
    whole = F.pad(numbers, (0, 0, 0, 0, 0, more)).view(-(-outer // panel), panel, count, size // 4, 4)
    wide = F.pad(scales, (0, 0, 0, more)).view(len(whole), panel, count)
    corrections = 128 * whole.sum((3, 4), dtype=torch.int32)  # [panels, panel, G]
    of_panel = [x.transpose(1, 2).contiguous().view(torch.uint8) for x in (wide, corrections)]
    return torch.cat([*of_panel, whole.permute(0, 2, 3, 1, 4).flatten(2).view(torch.uint8)], -1)


def unpack(packed: PackedWeight) -> Tensor:
    """The weight [O, I] that was given to `pack`, bit for bit."""
    weight = torch.empty(packed.outer, packed.inner, dtype=packed.data.dtype)
    call = _Packing(weight.data_ptr(), packed.data.data_ptr(), packed.inner, packed.outer, packed.inner)
    _library().bg_matmul_unpack(ctypes.byref(call), weight.dtype == torch.bfloat16, torch.get_num_threads())
    return weight


def unpack_rows(packed: PackedWeight, rows: Tensor) -> Tensor:
    """Rows [*] int64 of the weight that was given to `pack`: [*, I], bit for bit."""
    panel, pair = _library().bg_matmul_panel(), 2 if packed.dtype == torch.bfloat16 else 1
    panels = packed.data.view(-1, -(-packed.inner // pair), panel, pair)
    return panels[rows // panel, :, rows % panel].flatten(-2)[..., : packed.inner]


def unpack_int8(packed: PackedWeight) -> GroupedWeight:
    """The quantised weight that was given to `pack_int8`."""
    return _grouped(packed, replace(INT8, group=packed.group), 8, 4)


def unpack_bfp(packed: PackedWeight) -> GroupedWeight:
    """The quantised weight that `pack_bfp` made."""
    return _grouped(packed, BFP, 4, 2)


def _grouped(packed: PackedWeight, scheme: Scheme, header: int, together: int) -> GroupedWeight:
    """The weight in panels of integers.

    Args:
        packed: panels in which each group begins with a header.
        scheme: of the integers.
        header: bytes of the header for each row; the scale comes first.
        together: how many numbers of a row are adjacent.
    """
    panel = _library().bg_matmul_panel()
    panels, (count, size) = -(-packed.outer // panel), groups_of(packed.inner, scheme)
    if not packed.data.numel():
        empty = torch.empty(packed.outer, count, size, dtype=scheme.dtype)
        return GroupedWeight(empty, torch.empty(packed.outer, count), packed.inner, scheme)
    blocks = packed.data.view(panels, count, -1)
    scales, numbers = blocks[:, :, : 4 * panel], blocks[:, :, header * panel :]
    whole = numbers.contiguous().view(scheme.dtype).view(panels, count, -1, panel, together).permute(0, 3, 1, 2, 4)
    wide = scales.contiguous().view(torch.float32).transpose(1, 2).reshape(-1, count)
    rows = whole.reshape(panels * panel, count, -1)[: packed.outer]
    return GroupedWeight(rows, wide[: packed.outer], packed.inner, scheme)


class _Workspace(threading.local):
    """Workspace and argument struct of a Python thread, reused by its calls."""

    def __init__(self) -> None:
        self.scratch = torch.empty(0, dtype=torch.uint8)
        self.call = MatmulCall()
        self.pointer = ctypes.byref(self.call)

    def reserve(self, size: int) -> int:
        """Address of `size` bytes, aligned to 64."""
        if self.scratch.numel() < size + 64:
            self.scratch = torch.empty(size + 64, dtype=torch.uint8)
        return -(-self.scratch.data_ptr() // 64) * 64


_workspace: Final = _Workspace()


def matmul(x: Tensor, packed: PackedWeight, bias: Tensor | None = None, method: Method = "widened") -> Tensor:
    """The product y [..., O] = x [..., I] W^T + b; sums are float32. Can be recorded in a command buffer.

    Args:
        x: [..., I] in W's dtype, which is also y's.
        packed: W.
        bias: b [O] as contiguous float32.
        method: one of `methods(x.dtype)`; "int8" only and always for `pack_int8`, "bfp" for `pack_bfp`.

    Raises:
        TypeError: x's dtype is not W's, or b is not float32.
        ValueError: the sizes do not match, or W is packed for another method.
    """
    if x.dtype != packed.dtype or (bias is not None and bias.dtype != torch.float32):
        raise TypeError(
            f"x and W must have one dtype and b must be float32, got x {x.dtype}, W {packed.dtype}, "
            f"b {None if bias is None else bias.dtype}"
        )
    if packed.layout != (method if method in ("int8", "bfp") else "whole"):
        raise ValueError(f"W is not packed for method {method!r}, but as {packed.layout!r}")
    if x.shape[-1] != packed.inner or (bias is not None and bias.shape != (packed.outer,)):
        raise ValueError(f"x [..., {x.shape[-1]}] or b does not fit W [{packed.outer}, {packed.inner}]")
    shape = x.shape
    if x.dim() != 2:
        x = x.reshape(-1, packed.inner)
    if x.stride(1) != 1:
        x = x.contiguous()
    rows = x.shape[0]
    out = torch.empty(rows, packed.outer, dtype=x.dtype)
    buffer = current_buffer()
    threads = torch.get_num_threads() if buffer is None else buffer.threads
    # A recorded call runs later, so it cannot share the thread's workspace.
    workspace = _workspace if buffer is None else _Workspace()
    call = workspace.call
    call.x, call.weight, call.out = x.data_ptr(), packed.data.data_ptr(), out.data_ptr()
    call.bias = None if bias is None else bias.data_ptr()
    call.rows, call.inner, call.outer = rows, packed.inner, packed.outer
    call.x_stride, call.out_stride = x.stride(0), packed.outer
    call.method, call.group = METHODS[x.dtype, method], packed.group
    call.scratch = workspace.reserve(threads * packed.scratch)
    if buffer is None:
        _library().bg_matmul(workspace.pointer, threads)
    else:
        buffer.add(MATMUL, call, None, workspace.scratch, x, packed, bias, out)
    return out if len(shape) == 2 else out.view(*shape[:-1], packed.outer)
