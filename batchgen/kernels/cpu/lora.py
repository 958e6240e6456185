"""LoRA of a linear layer by `src/lora.cpp`; the reference is `kernels.lora`.

Inner sums stay in float32 and a result is rounded once, so a token's result is bitwise the same whatever other tokens
the step has.
"""

from __future__ import annotations

import threading
from ctypes import Structure, addressof, byref, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from batchgen.kernels.cpu.library import DTYPES, library
from batchgen.kernels.cpu.structs import fields
from batchgen.kernels.lora import LoraPairs, LoraStack, LoraStep, LoraTiles, tiles_of
from batchgen.kernels.lora import add_lora as plain_add_lora

_SERIAL: Final = 1 << 14
"""Steps with fewer inner sums than this run on one thread."""


class _Stack(Structure):
    """`LoraStack` of lora.h."""

    _fields_ = (*fields(c_void_p, "down up ranges spans"), *fields(c_int64, "inner outer dtype"))


class _Step(Structure):
    """`LoraStep` of lora.h."""

    _fields_ = (*fields(c_void_p, "order tiles sums"), *fields(c_int64, "num_tiles width"))


class _Call(Structure):
    """`LoraCall` of lora.cpp."""

    _fields_ = (*fields(c_void_p, "stack step x out"), *fields(c_int64, "x_stride out_stride"))


@dataclass(frozen=True, slots=True)
class StackCall:
    """A layer's adapters as a C argument."""

    struct: _Stack
    width: int
    """Largest rank of an adapter in this layer."""
    kept: LoraStack
    """Owner of the memory that the struct points to."""


def stack_call(pairs: LoraPairs) -> StackCall:
    """The layer's adapters, at least one, in a compiled dtype."""
    stack = pairs.stacked(1)
    struct = _Stack(
        stack.down.data_ptr(),
        stack.up.data_ptr(),
        stack.ranges.data_ptr(),
        stack.spans.data_ptr(),
        stack.down.shape[1],
        stack.up.shape[1],
        DTYPES[stack.down.dtype],
    )
    return StackCall(struct, stack.width, stack)


@dataclass(frozen=True, slots=True)
class StepCall:
    """A step's tokens by adapter as a C argument."""

    struct: _Step
    kept: tuple[LoraTiles, Tensor]
    """Owners of the memory that the struct points to."""


class LoraWorkspace(threading.local):
    """Workspace for the inner sums, reused by each Python thread for every step."""

    def __init__(self, width: int) -> None:
        """`width`: largest rank of an adapter in any layer."""
        self._width = width
        self._sums = torch.empty(0, dtype=torch.float32)

    def call(self, tiles: LoraTiles) -> StepCall:
        """A step's tokens as a C argument."""
        size = len(tiles.order) * self._width
        if self._sums.numel() < size:
            with torch.inference_mode(False):  # written to both inside and outside inference mode
                self._sums = torch.empty(size, dtype=torch.float32)
        struct = _Step(
            tiles.order.data_ptr(), tiles.tiles.data_ptr(), self._sums.data_ptr(), len(tiles.tiles), self._width
        )
        return StepCall(struct, (tiles, self._sums))


def add_lora(out: Tensor, x: Tensor, step: LoraStep, pairs: LoraPairs) -> None:
    """See `lora.add_lora`."""
    first = next((pair for pair in pairs if pair is not None), None)
    if first is None:
        return
    supported = x.dtype == out.dtype == first.down.dtype and x.dtype in DTYPES and x.device.type == "cpu"
    if not supported or not x.numel() or x.stride(1) != 1 or out.stride(1) != 1:
        return plain_add_lora(out, x, step, pairs)
    stack, tiles = stack_call(pairs), tiles_of(step, len(x), x.device)
    tokens = LoraWorkspace(stack.width).call(tiles)
    call = _Call(
        addressof(stack.struct), addressof(tokens.struct), x.data_ptr(), out.data_ptr(), x.stride(0), out.stride(0)
    )
    threads = 1 if len(x) * stack.width < _SERIAL else torch.get_num_threads()
    library().bg_lora(byref(call), c_int(threads))
