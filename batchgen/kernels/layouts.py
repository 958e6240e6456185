"""Memory layouts of a weight W [O, I] with their products y = x W^T + b, and the choice of the fastest on this CPU.

A CPU has several: compiled kernels, which widen bfloat16 weights to float32, use the processor's dot instruction or
multiply in block floating point; oneDNN's packed weights, the best where there are AMX tiles; and PyTorch's product.
None is the fastest on every processor: the throughput of these instructions differs more than tenfold between
processors with the same instruction sets. So they are measured, and the timings are cached in a file whose name
includes the library's (sources, compiler, processor) and PyTorch's version.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Final, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.cpu.build import measurements
from batchgen.kernels.cpu.library import DTYPES, library_file, loaded, missing
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
from batchgen.kernels.quantization import INT8, GroupedWeight, quantise_weight


def load_timings(subject: str, names: Collection[str]) -> dict[str, float] | None:
    """Cached timings of `subject`: a positive number for each of `names`, in their order; None if there are none.

    Args:
        subject: name of the measurement, letters and digits.
        names: names of the measured candidates.
    """
    if not loaded():
        return None
    try:
        timings = json.loads(_file(subject).read_bytes())
    except Exception:  # whatever a cache raises, it is measured again
        return None
    if not isinstance(timings, dict) or timings.keys() != set(names):
        return None
    if not all(isinstance(number, float) and 0 < number < math.inf for number in timings.values()):
        return None
    return {name: timings[name] for name in names}


def save_timings(subject: str, timings: Mapping[str, float]) -> None:
    """Cache `timings` for `load_timings`, if there is a library and its folder can be written."""
    if not loaded():
        return
    file = _file(subject)
    with suppress(OSError), tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        made.write_text(json.dumps(dict(timings)))
        made.replace(file)  # atomic: another process may be reading


def _file(subject: str) -> Path:
    base = measurements(library_file())
    return base.with_name(f"{base.name}-{subject}-torch-{torch.__version__}.json")


# A thread takes its number of threads from torch at its first query. The importing thread queries now, not while a
# measurement, in a thread that loads a model, has set the number to one.
torch.get_num_threads()

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [..., I], W [O, I] and b [O] or None -> [..., O]."""

GroupedProduct = Callable[[Tensor, GroupedWeight, Tensor | None], Tensor]
"""As `Product`, of a weight in groups."""

Products = Literal["measured", "fixed", "torch", "plain", "int8"]
"""Products that may be used on a CPU. `measured`: the fastest. `fixed`: the first available, without measuring, so that
another process on the machine chooses the same. `torch`: PyTorch and its libraries only. `plain`: PyTorch's, of weights
in the ordinary layout. `int8`: compiled kernels over weights quantised to int8."""

_PACK_ROWS: Final = 64
"""The batch size that oneDNN chooses its layout for; other sizes use the same layout."""

_SIZE: Final = (64, 576, 1152)
"""Rows, inputs and outputs of the measured product: a decode step of a small model."""
_ROUNDS: Final = 6
_MOST_ROUNDS: Final = 200
_SECONDS: Final = 0.08
"""Longest measurement on a busy machine, in seconds of wall time."""
_FOUND: Final = 3
_CLEARLY: Final = 0.9
"""A later layout is chosen if its time is at most this share of an earlier one's, so that ties do not alternate."""


Move = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Gives the places in other memory of all tensors of a layer."""


class Layout(Protocol):
    """A weight and a bias in the layout that they are multiplied in."""

    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""

    def dense(self) -> Tensor:
        """W [O, I] in the ordinary layout; a copy if the layout differs."""


class Plain:
    """The ordinary layout, multiplied by `product`."""

    __slots__ = ("_product", "_weight", "bias")

    def __init__(self, weight: Tensor, bias: Tensor | None, product: Product = F.linear) -> None:
        self._weight, self.bias, self._product = weight, bias, product

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        return self._product(x, self._weight, self.bias)

    def dense(self) -> Tensor:
        """The weight."""
        return self._weight

    def moved(self, move: Move) -> Plain:
        """The layout in other memory."""
        weight, *rest = move([self._weight] if self.bias is None else [self._weight, self.bias])
        return Plain(weight, rest[0] if rest else None, self._product)


class Grouped:
    """A weight in groups of small numbers, multiplied by `product` with inputs of `dtype`."""

    __slots__ = ("_dtype", "_product", "_weight", "bias")

    def __init__(self, weight: GroupedWeight, bias: Tensor | None, dtype: torch.dtype, product: GroupedProduct) -> None:
        self._weight, self.bias, self._dtype, self._product = weight, bias, dtype, product

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        return self._product(x, self._weight, self.bias)

    def dense(self) -> Tensor:
        """The dequantised weight."""
        return self._weight.dense().to(self._dtype)

    def moved(self, move: Move) -> Grouped:
        """The layout in other memory."""
        own, bias = self._weight, self.bias
        numbers, scales, *rest = move([x for x in (own.numbers, own.scales, own.zeros, bias) if x is not None])
        zeros = None if own.zeros is None else rest.pop(0)
        weight = replace(own, numbers=numbers, scales=scales, zeros=zeros)
        return Grouped(weight, rest[0] if rest else None, self._dtype, self._product)


class OneDnn:
    """oneDNN's packed layout and product."""

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
    """Panels of the compiled kernels. Batch-invariant: each output row depends on its input row only."""

    __slots__ = ("bias", "method", "packed", "wide_bias")

    def __init__(self, weight: Tensor | PackedWeight, bias: Tensor | None, method: Method = "widened") -> None:
        self.packed = weight if isinstance(weight, PackedWeight) else _packed(weight, method)
        self.bias = bias
        self.wide_bias = None if bias is None else bias.float().contiguous()
        self.method: Method = method

    @property
    def code(self) -> int:
        """The number of the method in C++."""
        return METHODS[self.packed.dtype, self.method]

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        return matmul(x, self.packed, self.wide_bias, self.method)

    def dense(self) -> Tensor:
        """The weight, unpacked; dequantised if it is in integers."""
        if self.packed.layout == "whole":
            return unpack(self.packed)
        grouped = unpack_int8(self.packed) if self.packed.layout == "int8" else unpack_bfp(self.packed)
        return grouped.dense().to(self.packed.dtype)


WHOLE: Final = ("compiled", "compiled dot")
"""Names of the layouts of the compiled kernels that hold exactly the numbers of the weight."""


def _packed(weight: Tensor, method: Method) -> PackedWeight:
    if method == "int8":
        return pack_int8(quantise_weight(weight, INT8), weight.dtype)
    return pack_bfp(weight) if method == "bfp" else pack(weight)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build's oneDNN multiplies `dtype` with a packed weight, found by trying it once."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch._C._has_mkldnn:
        return False
    weight, x = torch.ones(16, 16, dtype=dtype), torch.ones(2, 16, dtype=dtype)
    try:
        out = OneDnn(weight, None)(x)
    except (RuntimeError, AttributeError, TypeError):
        return False
    return bool((out == 16).all())


Make = Callable[[Tensor, Tensor | None], Layout]
"""Makes the layout of W and b."""


def layouts(dtype: torch.dtype, products: Products) -> Mapping[str, Make]:
    """The layouts available on this CPU for `dtype`, by name, the preferred first."""
    makes: dict[str, Make] = {}
    if products == "int8":
        return {"compiled int8": partial(Compiled, method="int8")}
    if products == "plain":
        return {"plain": Plain}
    if products != "torch" and dtype in DTYPES and loaded():
        names = {"widened": "compiled", "dot": "compiled dot", "bfp": "compiled bfp"}
        makes = {names[method]: partial(Compiled, method=method) for method in methods(dtype) if method in names}
    if can_pack(dtype):
        makes["oneDNN"] = OneDnn
    return {**makes, "plain": Plain}


def int8_refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why weights of `dtype` cannot be multiplied in int8 on `device`; None if they can."""
    if device.type != "cpu":
        return "it runs on CPUs only"
    if dtype not in DTYPES:
        return f"it supports models in bfloat16 or float32, not {str(dtype).removeprefix('torch.')}"
    if not loaded():
        return f"it needs compiled kernels, which are not available: {missing()}"
    return None if "int8" in methods(dtype) else "this processor has no dot instruction for int8 (AVX512-VNNI)"


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """The chosen layout and the reason."""

    name: str
    make: Make
    description: str
    """The name, and the times of all layouts that were measured."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each measured layout, by name."""


@cache
def choose_layout(dtype: torch.dtype, products: Products) -> LayoutChoice:
    """The layout for weights of `dtype` on this CPU; measured once per machine, then read from the cache."""
    makes = layouts(dtype, products)
    first = next(iter(makes))
    if products != "measured" or len(makes) == 1:
        return LayoutChoice(first, makes[first], first)
    times = _times("layouts", dtype, makes)
    best = fastest(times)
    rest = ", ".join(f"{name} {1e3 * seconds:.2g} ms" for name, seconds in times.items() if name != best)
    return LayoutChoice(best, makes[best], f"{best} ({1e3 * times[best]:.2g} ms against {rest})", times)


@cache
def int8_is_faster(dtype: torch.dtype) -> bool:
    """Whether products of int8 weights take at most the time of those of `dtype` in their fastest layout here.

    Measured once per machine, then read from the cache. `int8_refusal` must be None.
    """
    makes = layouts(dtype, "int8")
    best = choose_layout(dtype, "measured")
    times = _times("int8", dtype, {best.name: best.make, **makes})
    return all(times[name] <= times[best.name] for name in makes)


@cache
def dots_are_faster() -> bool:
    """Whether the compiled product by bfloat16's dot instruction is as fast as the one in block floating point, whose
    operands cost more to prepare. Both are measured with the layouts.
    """
    if not loaded() or "dot" not in methods(torch.bfloat16):
        return False
    times = choose_layout(torch.bfloat16, "measured").times
    return _CLEARLY * times["compiled dot"] <= times.get("compiled bfp", math.inf)


def _times(kind: str, dtype: torch.dtype, makes: Mapping[str, Make]) -> dict[str, float]:
    """Seconds of each layout, from the cache or measured."""
    subject = f"{kind}-{str(dtype).removeprefix('torch.')}"
    times = load_timings(subject, makes)
    if times is None:
        times, settled = _measured(dtype, makes)
        if settled:
            save_timings(subject, times)
    return times


def _measured(dtype: torch.dtype, makes: Mapping[str, Make]) -> tuple[dict[str, float], bool]:
    """Seconds of each layout, and whether the measurement was undisturbed.

    One thread, by its CPU time: the instructions are compared, and waiting for other threads, programs or Python's lock
    (which the row reader holds while a model is loaded) does not count.
    """
    rows, inner, outer = _SIZE
    x, weight = torch.full((rows, inner), 0.5, dtype=dtype), torch.full((outer, inner), 0.5, dtype=dtype)
    made = {name: make(weight, None) for name, make in makes.items()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _least_seconds({name: partial(layout, x) for name, layout in made.items()})
    finally:
        torch.set_num_threads(threads)


def _least_seconds(calls: Mapping[str, Callable[[], object]]) -> tuple[dict[str, float], bool]:
    """Each call's least time, and whether it was reached several times, which a busy machine may prevent."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + _SECONDS
    for turn in range(_MOST_ROUNDS):
        for name, call in calls.items():  # alternating, so that a busy moment affects all of them
            begin = time.thread_time()
            call()
            taken[name].append(time.thread_time() - begin)
        settled = all(sum(t <= 1.05 * min(times) for t in times) >= _FOUND for times in taken.values())
        if turn + 1 >= _ROUNDS and (settled or time.perf_counter() > end):
            break
    return {name: min(times) for name, times in taken.items()}, settled


def fastest(times: Mapping[str, float]) -> str:
    """The first name whose time no other name clearly beats."""
    least = min(times.values())
    return next(name for name, seconds in times.items() if least >= _CLEARLY * seconds)
