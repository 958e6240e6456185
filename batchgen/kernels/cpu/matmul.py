"""y = x W^T + b by `src/matmul.cpp`, over weights packed in panels.

Every element of y is one sum over k in ascending order, whatever the number of rows or threads: a row's bits depend on
that row and on W alone, so the product is batch-invariant (`kernels.matmul`).
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.cpu.background import PRODUCT, recording
from batchgen.kernels.cpu.library import DTYPES, library
from batchgen.kernels.cpu.weight_memory import weight_memory
from batchgen.kernels.quantization import BFP, INT8, GroupedWeight, Scheme, groups_of

__all__ = [
    "METHODS",
    "MatmulCall",
    "Method",
    "PackedWeight",
    "matmul",
    "methods",
    "pack",
    "pack_bfp",
    "pack_int8",
    "unpack",
    "unpack_bfp",
    "unpack_int8",
]

Method = Literal["widened", "dot", "int8", "bfp"]
"""How numbers are multiplied. `widened`: in float32, bfloat16 weights widened on the way, exactly. `dot`: by the
processor's bfloat16 dot instruction, which sums in pairs and takes denormal numbers for zero. `int8`: by its int8 dot
instruction, over weights that were quantised for it (`kernels.quantization`). `bfp`: bfloat16 in block floating point,
integers of 16 bits with a scale for each group of inputs, which lose less than rounding to bfloat16 does."""

METHODS: Final[dict[tuple[torch.dtype, Method], int]] = {
    (torch.float32, "widened"): 0,
    (torch.bfloat16, "widened"): 1,
    (torch.bfloat16, "dot"): 2,
    (torch.float32, "int8"): 3,
    (torch.bfloat16, "int8"): 4,
    (torch.bfloat16, "bfp"): 5,
}
"""By the dtype of x and W: `Method` of `src/matmul.h`."""


_BLOCK: Final = 1 << 22
"""Numbers of a quantised weight that are packed at once: their sums are wide on the way."""


class MatmulCall(ctypes.Structure):
    """`Matmul` of `src/matmul.h`."""

    _fields_ = (
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("rows", c_int64),
        ("inner", c_int64),
        ("outer", c_int64),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        ("method", c_int64),
        ("scratch", c_void_p),
        ("x_wide", c_int64),
    )


class _Packing(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("packed", c_void_p),
        ("inner", c_int64),
        ("outer", c_int64),
        ("stride", c_int64),
    )


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight W [O, I] in panels."""

    data: Tensor
    """Flat; of W's dtype, or bytes where its numbers are integers with scales."""
    dtype: torch.dtype
    """x's and y's."""
    inner: int
    outer: int
    scratch: int
    """Bytes of working memory that a product needs for each thread."""
    layout: Literal["whole", "int8", "bfp"] = "whole"
    """`whole`: W's own numbers."""


@cache
def _library() -> Any:
    """The library, told of its functions' types."""
    found = library()
    for name, arguments, result in (
        ("bg_matmul", (c_void_p, c_int64), None),
        ("bg_matmul_pack", (c_void_p, c_int64, c_int64), None),
        ("bg_matmul_unpack", (c_void_p, c_int64, c_int64), None),
        ("bg_matmul_scratch", (c_int64, c_int64), c_int64),
        ("bg_matmul_panel", (), c_int64),
        ("bg_matmul_has_dot", (), c_int64),
        ("bg_matmul_has_int8", (), c_int64),
        ("bg_matmul_has_bfp", (), c_int64),
    ):
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, result
    return found


def methods(dtype: torch.dtype) -> tuple[Method, ...]:
    """How the library can multiply `dtype` on this processor; empty for a dtype that it does not take."""
    built: dict[str, Any] = {name: getattr(_library(), f"bg_matmul_has_{name}") for name in ("dot", "int8", "bfp")}
    return tuple(name for kind, name in METHODS if kind == dtype and (name == "widened" or built[name]()))


def pack(weight: Tensor) -> PackedWeight:
    """The weight [O, I], float32 or bfloat16, in panels: a copy.

    Raises:
        TypeError: another dtype.
    """
    if weight.dtype not in DTYPES:
        raise TypeError(f"no product of {weight.dtype} is compiled")
    outer, inner = weight.shape
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    panel, pair = _library().bg_matmul_panel(), 2 if weight.dtype == torch.bfloat16 else 1
    data = weight_memory(-(-outer // panel) * panel * (-(-inner // pair) * pair), weight.dtype)
    call = _Packing(weight.data_ptr(), data.data_ptr(), inner, outer, weight.stride(0))
    _library().bg_matmul_pack(ctypes.byref(call), pair - 1, torch.get_num_threads())
    scratch = _library().bg_matmul_scratch(inner, METHODS[weight.dtype, "widened"])
    return PackedWeight(data, weight.dtype, inner, outer, scratch)


def pack_int8(weight: GroupedWeight, dtype: torch.dtype) -> PackedWeight:
    """A weight quantised by `INT8` in panels, for x of `dtype`: a copy, in the layout of `src/int8.h`."""
    outer, count, size = weight.numbers.shape
    panel = _library().bg_matmul_panel()
    panels = -(-outer // panel)
    data = weight_memory(panels * count * panel * (8 + size), torch.uint8).view(panels, count, panel * (8 + size))
    step = max(1, _BLOCK // max(1, panel * weight.inner))
    for begin in range(0, panels, step):
        rows = slice(begin * panel, (begin + step) * panel)
        data[begin : begin + step] = _int8_panels(weight.numbers[rows], weight.scales[rows], panel)
    scratch = _library().bg_matmul_scratch(weight.inner, METHODS[dtype, "int8"])
    return PackedWeight(data.flatten(), dtype, weight.inner, outer, scratch, "int8")


def pack_bfp(weight: Tensor) -> PackedWeight:
    """The weight [O, I], bfloat16, in panels of block floating point: a copy, in the layout of `src/bfp.h`."""
    outer, inner = weight.shape
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    panel, (count, size) = _library().bg_matmul_panel(), groups_of(inner, BFP)
    data = weight_memory(-(-outer // panel) * count * panel * (4 + 2 * size), torch.uint8)
    call = _Packing(weight.data_ptr(), data.data_ptr(), inner, outer, weight.stride(0))
    pack_panels = _library().bg_matmul_pack_bfp
    pack_panels.argtypes, pack_panels.restype = (c_void_p, c_int64), None
    pack_panels(ctypes.byref(call), torch.get_num_threads())
    scratch = _library().bg_matmul_scratch(inner, METHODS[weight.dtype, "bfp"])
    return PackedWeight(data, weight.dtype, inner, outer, scratch, "bfp")


def _int8_panels(numbers: Tensor, scales: Tensor, panel: int) -> Tensor:
    """Rows [O, G, S] int8 and their scales [O, G] as bytes [panels, G, panel * (8 + S)]."""
    outer, count, size = numbers.shape
    more = -outer % panel
    whole = F.pad(numbers, (0, 0, 0, 0, 0, more)).view(-(-outer // panel), panel, count, size // 4, 4)
    wide = F.pad(scales, (0, 0, 0, more)).view(len(whole), panel, count)
    corrections = 128 * whole.sum((3, 4), dtype=torch.int32)  # [panels, panel, G]
    of_panel = [x.transpose(1, 2).contiguous().view(torch.uint8) for x in (wide, corrections)]
    return torch.cat([*of_panel, whole.permute(0, 2, 3, 1, 4).flatten(2).view(torch.uint8)], -1)


def unpack(packed: PackedWeight) -> Tensor:
    """The weight [O, I] that `pack` took, bit for bit."""
    weight = torch.empty(packed.outer, packed.inner, dtype=packed.data.dtype)
    call = _Packing(weight.data_ptr(), packed.data.data_ptr(), packed.inner, packed.outer, packed.inner)
    _library().bg_matmul_unpack(ctypes.byref(call), weight.dtype == torch.bfloat16, torch.get_num_threads())
    return weight


def unpack_int8(packed: PackedWeight) -> GroupedWeight:
    """What `pack_int8` took."""
    return _grouped(packed, INT8, 8, 4)


def unpack_bfp(packed: PackedWeight) -> GroupedWeight:
    """What `pack_bfp` made of the weight."""
    return _grouped(packed, BFP, 4, 2)


def _grouped(packed: PackedWeight, scheme: Scheme, ahead: int, together: int) -> GroupedWeight:
    """A weight out of panels in which each group begins with `ahead` bytes for each row, its scale first, and numbers
    stand `together` by row.
    """
    panel = _library().bg_matmul_panel()
    panels, (count, size) = -(-packed.outer // panel), groups_of(packed.inner, scheme)
    if not packed.data.numel():
        empty = torch.empty(packed.outer, count, size, dtype=scheme.dtype)
        return GroupedWeight(empty, torch.empty(packed.outer, count), packed.inner, scheme)
    blocks = packed.data.view(panels, count, -1)
    scales, numbers = blocks[:, :, : 4 * panel], blocks[:, :, ahead * panel :]
    whole = numbers.contiguous().view(scheme.dtype).view(panels, count, -1, panel, together).permute(0, 3, 1, 2, 4)
    wide = scales.contiguous().view(torch.float32).transpose(1, 2).reshape(-1, count)
    rows = whole.reshape(panels * panel, count, -1)[: packed.outer]
    return GroupedWeight(rows, wide[: packed.outer], packed.inner, scheme)


class _Workspace(threading.local):
    """What calls of one Python thread use again and again."""

    def __init__(self) -> None:
        self.scratch = torch.empty(0, dtype=torch.uint8)
        self.call = MatmulCall()
        self.pointer = ctypes.byref(self.call)

    def reserve(self, size: int) -> int:
        """Where `size` bytes begin, from a multiple of 64."""
        if self.scratch.numel() < size + 64:
            self.scratch = torch.empty(size + 64, dtype=torch.uint8)
        return -(-self.scratch.data_ptr() // 64) * 64


_workspace: Final = _Workspace()


def matmul(x: Tensor, packed: PackedWeight, bias: Tensor | None = None, method: Method = "widened") -> Tensor:
    """The product y [..., O] = x [..., I] W^T + b in x's dtype, which must be W's; sums are float32. Can be recorded.

    Args:
        x: numbers.
        packed: W.
        bias: b [O] as contiguous float32.
        method: one of `methods(x.dtype)`; "int8" for what `pack_int8` made, "bfp" for what `pack_bfp` made, and for
            nothing else.

    Raises:
        TypeError: x's dtype is not W's, or b is not float32.
        ValueError: the sizes do not fit.
    """
    if x.dtype != packed.dtype or (bias is not None and bias.dtype != torch.float32):
        raise TypeError(f"x is {x.dtype}, W {packed.dtype}, b {None if bias is None else bias.dtype}")
    if packed.layout != (method if method in ("int8", "bfp") else "whole"):
        raise ValueError(f"W is not packed to be multiplied by {method}")
    if x.shape[-1] != packed.inner or (bias is not None and bias.shape != (packed.outer,)):
        raise ValueError(f"x [..., {x.shape[-1]}] does not fit W [{packed.outer}, {packed.inner}] and its b")
    shape = x.shape
    if x.dim() != 2:
        x = x.reshape(-1, packed.inner)
    if x.stride(1) != 1:
        x = x.contiguous()
    rows = x.shape[0]
    out = torch.empty(rows, packed.outer, dtype=x.dtype)
    noted = recording()
    threads = torch.get_num_threads() if noted is None else noted.threads
    room = _workspace if noted is None else _Workspace()  # what is noted down is run when others have had theirs
    call = room.call
    call.x, call.weight, call.out = x.data_ptr(), packed.data.data_ptr(), out.data_ptr()
    call.bias = None if bias is None else bias.data_ptr()
    call.rows, call.inner, call.outer = rows, packed.inner, packed.outer
    call.x_stride, call.out_stride = x.stride(0), packed.outer
    call.method = METHODS[x.dtype, method]
    call.scratch = room.reserve(threads * packed.scratch)
    if noted is None:
        _library().bg_matmul(room.pointer, threads)
    else:
        noted.add(PRODUCT, call, None, room.scratch, x, packed, bias, out)
    return out if len(shape) == 2 else out.view(*shape[:-1], packed.outer)
