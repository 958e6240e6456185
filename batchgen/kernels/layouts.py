"""Ways to lay out a weight W [O, I] and to compute y = x W^T + b over it, and which of them is the fastest here.

On a CPU there are several, and none is the best everywhere: kernels of our own, compiled on the machine, which widen
bfloat16 weights to float32, use the processor's dot instruction, or multiply in block floating point; oneDNN's packed
weights, the best where there are AMX tiles; and PyTorch's ordinary product. The rates of these instructions differ more
than tenfold between processors that name the same ones, so they are measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Final, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.cpu.figures import keep_figures, kept_figures
from batchgen.kernels.cpu.library import DTYPES, loaded, missing
from batchgen.kernels.cpu.matmul import (
    METHODS,
    Method,
    PackedWeight,
    matmul,
    methods,
    pack,
    pack_bfp,
    pack_int8,
    unpack,
    unpack_bfp,
    unpack_int8,
)
from batchgen.kernels.quantization import INT8, quantise_weight

__all__ = [
    "Compiled",
    "Layout",
    "OneDnn",
    "Plain",
    "Product",
    "Products",
    "TakenLayout",
    "can_pack",
    "dots_are_faster",
    "fastest",
    "int8_refusal",
    "layouts",
    "take_layout",
]

# A thread takes its number of threads from torch when it first asks: here the importing one has asked, and does not do
# so while a measurement, in a thread that loads a model, has set it to one.
torch.get_num_threads()

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [..., I], W [O, I] and b [O] or None -> [..., O]."""

Products = Literal["measured", "fixed", "torch", "int8"]
"""What may multiply on a CPU. `measured`: whatever is the fastest. `fixed`: the first there is, by no clock, so that
another process on the machine takes the same. `torch`: nothing but PyTorch and its libraries. `int8`: compiled kernels
over weights that are quantised for them."""

_PACK_ROWS: Final = 64
"""The batch size that oneDNN's layout is chosen for; other sizes run through the same layout."""

_SIZE: Final = (64, 576, 1152)
"""Rows, inputs and outputs of the measured product: a decode step of a small model."""
_ROUNDS: Final = 6
_MOST_ROUNDS: Final = 200
_SECONDS: Final = 0.08
"""How long a machine that is busy with something else is watched."""
_FOUND: Final = 3
_CLEARLY: Final = 0.9
"""A layout further down the list is taken where its time is at most this share: equal ones do not change places."""


class Layout(Protocol):
    """A weight and a bias as they are multiplied."""

    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""

    def dense(self) -> Tensor:
        """W [O, I] in the ordinary layout, a copy where that is another."""


class Plain:
    """The weight as it is, multiplied by `product`."""

    __slots__ = ("_product", "_weight", "bias")

    def __init__(self, weight: Tensor, bias: Tensor | None, product: Product = F.linear) -> None:
        self._weight, self.bias, self._product = weight, bias, product

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        return self._product(x, self._weight, self.bias)

    def dense(self) -> Tensor:
        """The weight."""
        return self._weight


class OneDnn:
    """oneDNN's layout, and its product."""

    __slots__ = ("_weight", "bias")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS), bias

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return out

    def dense(self) -> Tensor:
        """The weight, unpacked."""
        dense: Tensor = self._weight.to_dense()
        return dense


class Compiled:
    """Panels for the kernels that are compiled on the machine. A row's bits do not depend on the other rows."""

    __slots__ = ("bias", "method", "packed", "wide_bias")

    def __init__(self, weight: Tensor, bias: Tensor | None, method: Method = "widened") -> None:
        self.packed = _packed(weight, method)
        self.bias = bias
        self.wide_bias = None if bias is None else bias.float().contiguous()
        self.method: Method = method

    @property
    def code(self) -> int:
        """The method's number in C++."""
        return METHODS[self.packed.dtype, self.method]

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        return matmul(x, self.packed, self.wide_bias, self.method)

    def dense(self) -> Tensor:
        """The weight, unpacked; of one in integers what these stand for."""
        if self.packed.layout == "whole":
            return unpack(self.packed)
        grouped = unpack_int8(self.packed) if self.packed.layout == "int8" else unpack_bfp(self.packed)
        return grouped.dense().to(self.packed.dtype)


def _packed(weight: Tensor, method: Method) -> PackedWeight:
    if method == "int8":
        return pack_int8(quantise_weight(weight, INT8), weight.dtype)
    return pack_bfp(weight) if method == "bfp" else pack(weight)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build's oneDNN multiplies `dtype` with a packed weight, found out by doing it once."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch._C._has_mkldnn:
        return False
    weight, x = torch.ones(16, 16, dtype=dtype), torch.ones(2, 16, dtype=dtype)
    try:
        out = OneDnn(weight, None)(x)
    except (RuntimeError, AttributeError, TypeError):
        return False
    return bool((out == 16).all())


Make = Callable[[Tensor, Tensor | None], Layout]
"""Lays out W and b."""


def layouts(dtype: torch.dtype, products: Products) -> Mapping[str, Make]:
    """The layouts that a CPU has here for `dtype`, by name, the preferred first."""
    found: dict[str, Make] = {}
    if products == "int8":
        return {"compiled int8": partial(Compiled, method="int8")}
    if products != "torch" and dtype in DTYPES and loaded():
        names = {"widened": "compiled", "dot": "compiled dot", "bfp": "compiled bfp"}
        found = {names[method]: partial(Compiled, method=method) for method in methods(dtype) if method in names}
    if can_pack(dtype):
        found["oneDNN"] = OneDnn
    return {**found, "plain": Plain}


def int8_refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why weights of `dtype` cannot be multiplied in int8 on `device`; None where they can."""
    if device.type != "cpu":
        return "it is for CPUs"
    if dtype not in DTYPES:
        return f"it is for models in bfloat16 or float32, not in {str(dtype).removeprefix('torch.')}"
    if not loaded():
        return f"it needs compiled kernels, and there are none: {missing()}"
    return None if "int8" in methods(dtype) else "this processor has no dot instruction for int8 (AVX512-VNNI)"


@dataclass(frozen=True, slots=True)
class TakenLayout:
    """A layout and why it was taken."""

    name: str
    make: Make
    describes: str
    """The name, and the times of all that were measured."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each that was measured."""


@cache
def take_layout(dtype: torch.dtype, products: Products) -> TakenLayout:
    """The layout for weights of `dtype` on this CPU; measured once on a machine, whose next processes take the same."""
    found = layouts(dtype, products)
    first = next(iter(found))
    if products != "measured" or len(found) == 1:
        return TakenLayout(first, found[first], first)
    subject = f"layouts-{str(dtype).removeprefix('torch.')}"
    times = kept_figures(subject, found)
    if times is None:
        times, settled = _measured(dtype, found)
        if settled:
            keep_figures(subject, times)
    best = fastest(times)
    rest = ", ".join(f"{name} {1e3 * seconds:.2g} ms" for name, seconds in times.items() if name != best)
    return TakenLayout(best, found[best], f"{best} ({1e3 * times[best]:.2g} ms against {rest})", times)


@cache
def dots_are_faster() -> bool:
    """Whether the compiled product by bfloat16's dot instruction keeps up with the one in block floating point, whose
    numbers cost more to make. Both are measured with the layouts.
    """
    if not loaded() or "dot" not in methods(torch.bfloat16):
        return False
    times = take_layout(torch.bfloat16, "measured").times
    return _CLEARLY * times["compiled dot"] <= times.get("compiled bfp", math.inf)


def _measured(dtype: torch.dtype, found: Mapping[str, Make]) -> tuple[dict[str, float], bool]:
    """The seconds that each layout takes, and whether the machine left them in peace.

    On one thread, by the time that it computes: it is instructions that are compared, and waiting tells nothing, be it
    for other threads and programs or for Python's lock, which whatever reads rows holds while a model is loaded.
    """
    rows, inner, outer = _SIZE
    x, weight = torch.full((rows, inner), 0.5, dtype=dtype), torch.full((outer, inner), 0.5, dtype=dtype)
    made = {name: make(weight, None) for name, make in found.items()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _least_seconds({name: partial(layout, x) for name, layout in made.items()})
    finally:
        torch.set_num_threads(threads)


def _least_seconds(calls: Mapping[str, Callable[[], object]]) -> tuple[dict[str, float], bool]:
    """Each call's least time, and whether it was found several times over, which a busy machine may not allow."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + _SECONDS
    for turn in range(_MOST_ROUNDS):
        for name, call in calls.items():  # side by side, so that a busy moment is everyone's
            begin = time.thread_time()
            call()
            taken[name].append(time.thread_time() - begin)
        settled = all(sum(t <= 1.05 * min(times) for t in times) >= _FOUND for times in taken.values())
        if turn + 1 >= _ROUNDS and (settled or time.perf_counter() > end):
            break
    return {name: min(times) for name, times in taken.items()}, settled


def fastest(times: Mapping[str, float]) -> str:
    """The first name whose time no other one clearly beats."""
    least = min(times.values())
    return next(name for name, seconds in times.items() if least >= _CLEARLY * seconds)
