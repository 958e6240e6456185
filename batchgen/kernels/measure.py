"""Timing of attention candidates (backends or tile shapes) on a typical step of the run, at start."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Final, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.chips import ChipTuning, candidate_tunings, chip_name, known_chips, measured_tuning
from batchgen.kernels.pooled import in_e4m3
from batchgen.kernels.quantization import INT4, GroupedWeight, Scheme
from batchgen.kernels.types import (
    E4M3,
    AttentionArgs,
    AttentionBatch,
    ChunkPages,
    GroupPages,
    Ints,
    KVPool,
    LayerKV,
    PagedAttention,
)

Timer = Callable[[Callable[[], object]], float]
"""Milliseconds that a call takes on the device."""

Name = TypeVar("Name")

_POOL_BYTES = 512 << 20
"""Most bytes of keys and values to measure on, beyond every chip's cache; larger steps repeat pages."""
_WARM_UP = 3
_REPEATS = 7
_CALLS = 3
"""Calls between two events, so that the event's overhead is spread."""


@dataclass(frozen=True, slots=True)
class TypicalStep:
    """Sizes of one layer's attention in a typical step of the run."""

    layer: LayerKV
    heads: int
    dtype: torch.dtype
    page_size: int
    device: torch.device
    rows: int
    """Decode rows."""
    context: int
    """Positions that each decode row attends to."""
    shared: int = 0
    """Leading positions that all rows share; rounded down to whole pages."""
    chunk: int = 0
    """Prompt tokens computed in the same step."""
    cache_dtype: torch.dtype | None = None
    """Dtype of keys and values; None: that of the queries."""

    def sample(self, *, grouped: bool) -> tuple[KVPool, AttentionBatch, Tensor]:
        """A pool, a step over it and its queries [T, N, D]; with `grouped`, shared positions are one prefix group."""
        size = self.page_size
        group = self.shared // size if grouped else 0
        context = max(self.context, group * size + 1)
        own = -(-context // size) - group
        chunk_pages = -(-self.chunk // size)
        pages = _Pages(1 + group + self.rows * own + chunk_pages, self)
        chunks = [ChunkPages(0, self.chunk, self.chunk, pages.take(chunk_pages))] if self.chunk else []
        shared = pages.take(group)
        table = np.stack([pages.take(own) for _ in range(self.rows)])
        lens = np.full(self.rows, context - group * size, np.int64)
        positions = lens - 1
        fed = table[np.arange(self.rows), positions // size] * size + positions % size
        spread = [c.pages[np.arange(self.chunk) // size] * size + np.arange(self.chunk) % size for c in chunks]
        batch = AttentionBatch(
            torch.from_numpy(np.concatenate([*spread, fed])).to(self.device),
            chunks,
            decode_start=self.chunk,
            groups=[GroupPages(np.arange(self.rows), shared, 0)] if group else [],
            decode_pages=table,
            decode_lens=lens,
            decode_own_start=np.full(self.rows, group * size, np.int64),
            max_decode_len=int(lens.max()),
        )
        query = torch.randn(self.chunk + self.rows, self.heads, self.layer.key_dim, device=self.device)
        return pages.pool(), batch, query.to(self.dtype)


class _Pages:
    """Page numbers in random order, repeated if more are wanted than fit."""

    def __init__(self, wanted: int, step: TypicalStep) -> None:
        room = _POOL_BYTES // KVPool.page_bytes([step.layer], step.page_size, step.cache_dtype or step.dtype)
        self._step = step
        self._count = max(2, min(wanted, room))
        self._order = np.random.default_rng(0).permutation(self._count - 1) + 1
        self._next = 0

    def take(self, count: int) -> Ints:
        taken: Ints = self._order[np.arange(self._next, self._next + count) % len(self._order)]
        self._next += count
        return taken

    def pool(self) -> KVPool:
        step = self._step
        dtype = step.cache_dtype or step.dtype
        pool = KVPool.allocate([step.layer], self._count, step.page_size, dtype, step.device)
        for cache in pool.caches:
            cache.copy_(in_e4m3(torch.randn_like(cache, dtype=step.dtype))) if dtype == E4M3 else cache.normal_()
        return pool


def device_timer(device: torch.device) -> Timer:
    """A timer by the device's clock: the median of several measurements after a warm-up."""

    def milliseconds(call: Callable[[], object]) -> float:
        for _ in range(_WARM_UP):
            call()
        times = []
        for _ in range(_REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(device)
            begin.record()
            for _ in range(_CALLS):
                call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / _CALLS)
        return float(median(times))

    return milliseconds


@torch.inference_mode()
def layer_milliseconds(
    candidates: Mapping[Name, Callable[[KVPool, AttentionBatch], PagedAttention]], step: TypicalStep, timer: Timer
) -> dict[Name, float | str]:
    """Milliseconds of each candidate for one layer of a typical step.

    Where rows share positions, the mean of the step with and without their prefix group, since a run has both.

    Args:
        candidates: attention factories by name.
        step: the step to measure on.
        timer: times calls; see `device_timer`.

    Returns:
        By candidate its milliseconds, or the first line of its error.
    """
    kinds = [False, True] if step.shared >= step.page_size else [False]
    times: dict[Name, list[float]] = {name: [] for name in candidates}
    wrong: dict[Name, str] = {}
    args = AttentionArgs(step.layer.key_dim**-0.5)
    for grouped in kinds:
        pool, batch, query = step.sample(grouped=grouped)
        for name, factory in candidates.items():
            try:
                times[name].append(timer(partial(factory(pool, batch).attend_stored, 0, query, args)))
            except Exception as problem:  # compilers and drivers raise many types
                wrong[name] = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        del pool, query
    if step.device.type == "cuda":
        torch.cuda.empty_cache()  # the run's own pool is sized by the free memory
    return {name: wrong[name] if name in wrong else sum(times[name]) / len(kinds) for name in candidates}


_MOST_WEIGHTS: Final = 128
"""Most weights of one size that are measured: small ones would be too many launches."""


@dataclass(frozen=True, slots=True)
class WeightSize:
    """Sizes of a weight [O, I] in groups, whose products are measured."""

    outer: int
    inner: int
    size: int
    """Inputs of a group."""
    scheme: Scheme

    def sample(self, device: torch.device) -> GroupedWeight:
        """A weight of any numbers."""
        groups, paired = -(-self.inner // self.size), self.scheme is INT4
        shape = self.outer, groups, self.size // 2 if paired else self.size
        numbers = torch.randint(0, 100, shape, dtype=torch.uint8, device=device).view(self.scheme.dtype)
        scales = torch.ones(self.outer, groups, device=device)
        zeros = torch.full((self.outer, groups), 8, dtype=torch.uint8, device=device) if paired else None
        return GroupedWeight(numbers, scales, self.inner, self.scheme, zeros)


@dataclass(frozen=True, slots=True)
class ProductStep:
    """Device, dtype and timer of measured products."""

    device: torch.device
    dtype: torch.dtype
    timer: Timer
    cache_bytes: int = 64 << 20
    """Bytes of weights that are measured together, more than the last cache of every chip."""


@torch.inference_mode()
def grouped_weights_pay(
    weights: Mapping[WeightSize, int], steps: Sequence[tuple[int, float]], step: ProductStep
) -> bool:
    """Whether products over weights in groups take at most the time of those over dequantised ones, by Triton.

    Args:
        weights: sizes of a model's weights, and how many it has of each.
        steps: numbers of rows of a product, each with its share of the steps.
        step: where and how products are computed and timed.
    """
    from batchgen.kernels.gpu.quantized_matmul import dequantised, linear  # Triton is imported where it computes

    times = [0.0, 0.0]
    for size, count in weights.items():
        # Together more than a cache holds, as in a model.
        first = size.sample(step.device)
        others = min(_MOST_WEIGHTS, step.cache_bytes // max(1, first.numbers.nbytes))
        own = [first, *(size.sample(step.device) for _ in range(others))]
        full = [dequantised(each, step.dtype) for each in own]
        for rows, share in steps:
            x = torch.randn(rows, size.inner, device=step.device).to(step.dtype)
            times[0] += count * share * step.timer(partial(_each, linear, x, own)) / len(own)
            times[1] += count * share * step.timer(partial(_each, F.linear, x, full)) / len(own)
    return times[0] <= times[1]


def _each(product: Callable[[Tensor, Any], Tensor], x: Tensor, weights: Sequence[Any]) -> None:
    for weight in weights:
        product(x, weight)


def tune_chip(device: torch.device, step: TypicalStep | None, timer: Timer) -> None:
    """Choose tile shapes by measurement for a chip that `chips.toml` does not list, among those of listed chips."""
    if device.type != "cuda" or step is None or chip_name(device) in known_chips():
        return
    properties: Any = torch.cuda.get_device_properties(device)  # torch declares fewer than it has
    candidates = candidate_tunings(properties.shared_memory_per_block_optin)
    if len(candidates) == 1:
        return
    from batchgen.kernels.gpu.attention import TritonAttention

    def milliseconds(tuning: ChipTuning) -> float:
        time = layer_milliseconds({0: partial(TritonAttention, tuning=tuning)}, step, timer)[0]
        return time if isinstance(time, float) else math.inf

    measured_tuning(device, candidates, milliseconds)
