"""What a pass over a prefix group's pages has to save on this machine, measured at start on the model's own shape.

A group costs an item more, parts and a merge for each of its rows, and some of the host's time; it saves that every row
reads the shared positions for itself. Both are timed on one layer, with a short shared prefix and a long one, and the
saving at which they are even is where the line between the two differences crosses zero. Half of what the group of 8
rows costs is its rows' parts and merges: timed on a Zen 4 with 2 to 64 rows, of 9 and of 32 heads, a group costs about
as much as 8 rows' parts, and those of its own rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Final

import numpy as np
import torch

from batchgen.kernels.cpu.attention import CompiledAttention
from batchgen.kernels.types import AttentionBatch, GroupPages, KVPool, LayerKV

__all__ = ["LEAST", "MOST", "ROWS", "even_saving", "measured_saving"]

LEAST: Final = 64
"""Least saving asked for, in reads of cached positions."""
MOST: Final = 4096

ROWS: Final = 8
"""Of the group that is timed."""
_OWN: Final = 24
"""Positions of a row's own."""
_SHORT: Final = 16
_LONG: Final = 256
_REPEATS: Final = 12
_SECONDS: Final = 0.05
"""After which what has been measured must do, however busy the machine."""


@cache
def measured_saving(layer: LayerKV, heads: int, dtype: torch.dtype, page_size: int, layers: int) -> int:
    """Reads of cached positions that a group of `ROWS` must save per step, a power of two from `LEAST` to `MOST`.

    Measured at the first call with such arguments in a process.

    Only the sizes of steps follow from it, no result but the order in which float32 sums are made.

    Args:
        layer: sizes of a typical layer's cache.
        heads: query heads.
        dtype: of the pool.
        page_size: S.
        layers: by how many a step's list is shared.
    """
    short = max(page_size, _SHORT // page_size * page_size)
    long = max(4 * short, _LONG // page_size * page_size)
    sample = _Sample(layer, heads, dtype, page_size, long)
    cases = [(short, False), (short, True), (long, False), (long, True)]
    calls = [partial(sample.seconds, sample.batch(*case), layers) for case in cases]
    flat_short, grouped_short, flat_long, grouped_long = _least(calls)
    return even_saving((ROWS - 1) * short, grouped_short - flat_short, (ROWS - 1) * long, grouped_long - flat_long)


def even_saving(short: int, short_cost: float, long: int, long_cost: float) -> int:
    """The saving at which a group costs nothing, to the nearest power of two.

    Args:
        short: reads saved in the first measurement.
        short_cost: what grouping cost there, in any unit; negative where it paid.
        long: reads saved in the second.
        long_cost: what grouping cost there.
    """
    if short_cost <= long_cost:  # longer prefixes must pay better; the clock was disturbed, or grouping never pays
        return LEAST if long_cost < 0 else MOST
    even = short + (long - short) * short_cost / (short_cost - long_cost)
    return int(min(max(2 ** round(math.log2(max(even, 1))), LEAST), MOST))


class _Sample:
    """A pool for the longest of the steps that are timed, and the queries of all of them."""

    def __init__(self, layer: LayerKV, heads: int, dtype: torch.dtype, page_size: int, longest: int) -> None:
        self._size = page_size
        self._own = -(-_OWN // page_size)
        pages = 1 + ROWS * (longest // page_size + self._own)
        self._pool = KVPool.allocate([layer], pages, page_size, dtype, torch.device("cpu"))
        for tensor in (*self._pool.keys, *self._pool.values):
            tensor.fill_(0.01)  # numbers do not matter, but memory that was never written is not read from memory
        self._query = torch.full((ROWS, heads, layer.key_dim), 0.01, dtype=dtype)
        self._scale = layer.key_dim**-0.5

    def batch(self, shared: int, grouped: bool) -> AttentionBatch:
        """Decode rows behind `shared` positions, in a group or each with a copy."""
        count = shared // self._size
        begin = count if grouped else 0
        table = np.arange(1, 1 + ROWS * (count + self._own)).reshape(ROWS, -1)
        start = begin * self._size
        return AttentionBatch(
            torch.zeros(ROWS, dtype=torch.int64),
            groups=[GroupPages(np.arange(ROWS), table[0, :begin], 0)] if grouped else [],
            decode_pages=np.ascontiguousarray(table[:, begin:]),
            decode_lens=np.full(ROWS, shared + _OWN - start),
            decode_own_start=np.full(ROWS, start),
            max_decode_len=shared + _OWN - start,
        )

    def seconds(self, batch: AttentionBatch, layers: int) -> float:
        """The processor's time for one layer, with its share of what is planned once for all layers.

        One thread: the time of several on a busy machine is that of waiting. Planning is done by one alone, so that it
        counts once for each thread that waits.
        """
        attention = CompiledAttention(self._pool, batch, threads=1)
        begin = time.thread_time()
        attention.work(0, self._query.shape[1])
        planned = time.thread_time()
        attention.attend_stored(0, self._query, scale=self._scale)
        return (planned - begin) * torch.get_num_threads() / layers + time.thread_time() - planned


def _least(calls: Sequence[Callable[[], float]]) -> list[float]:
    """The least time of each call, all of them taking turns so that a busy moment is shared."""
    for call in calls:
        call()
    times = [math.inf] * len(calls)
    begin = time.perf_counter()
    for _ in range(_REPEATS):
        times = [min(best, call()) for best, call in zip(times, calls, strict=True)]
        if time.perf_counter() - begin > _SECONDS:
            break
    return times
