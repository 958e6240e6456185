"""Measurement of how many KV reads a prefix group must save to pay off on this machine, for the model's own shape.

A group costs one more work item, parts and a merge for each of its rows, and some host time; it saves that every row
reads the shared positions by itself. Both ways are timed on one layer, with a short and with a long shared prefix. The
break-even saving is where the line through the two differences crosses zero. About half of the cost of a group of
`ROWS` rows is fixed; the other half is its rows' parts and merges.
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
from batchgen.kernels.types import AttentionArgs, AttentionBatch, GroupPages, KVPool, LayerKV

LEAST: Final = 64
"""Smallest saving that is returned, in reads of cached positions."""
MOST: Final = 4096
"""Largest saving that is returned."""

ROWS: Final = 8
"""Rows of the measured group."""
_OWN: Final = 24
"""Positions of each row behind the shared prefix."""
_SHORT: Final = 16
"""Positions of the short shared prefix."""
_LONG: Final = 256
"""Positions of the long shared prefix."""
_REPEATS: Final = 12
"""Most times that each case is timed."""
_SECONDS: Final = 0.05
"""Time limit of the measurement in seconds."""


@cache
def measured_saving(layer: LayerKV, heads: int, dtype: torch.dtype, page_size: int, layers: int) -> int:
    """Break-even saving of a group of `ROWS` rows, in reads of cached positions: a power of two from `LEAST` to `MOST`.

    Measured once per process for each set of arguments. It decides which rows attend together, so it changes results
    only by the order of float32 sums.

    Args:
        layer: sizes of a typical layer's cache.
        heads: query heads.
        dtype: dtype of the pool.
        page_size: positions per page.
        layers: number of layers that share one work list per step.
    """
    short = max(page_size, _SHORT // page_size * page_size)
    long = max(4 * short, _LONG // page_size * page_size)
    sample = _Sample(layer, heads, dtype, page_size, long)
    cases = [(short, False), (short, True), (long, False), (long, True)]
    calls = [partial(sample.seconds, sample.batch(*case), layers) for case in cases]
    flat_short, grouped_short, flat_long, grouped_long = _least(calls)
    return even_saving((ROWS - 1) * short, grouped_short - flat_short, (ROWS - 1) * long, grouped_long - flat_long)


def even_saving(short: int, short_cost: float, long: int, long_cost: float) -> int:
    """Break-even saving by linear interpolation, as the nearest power of two within `LEAST` and `MOST`.

    Args:
        short: reads saved in the first measurement.
        short_cost: extra time of the grouped step, in any unit; negative where grouping was faster.
        long: reads saved in the second measurement.
        long_cost: extra time of the grouped step there.
    """
    if short_cost <= long_cost:  # longer prefixes should pay more: the timing was disturbed, or grouping never pays
        return LEAST if long_cost < 0 else MOST
    even = short + (long - short) * short_cost / (short_cost - long_cost)
    return int(min(max(2 ** round(math.log2(max(even, 1))), LEAST), MOST))


class _Sample:
    """KV pool and queries of the timed steps."""

    def __init__(self, layer: LayerKV, heads: int, dtype: torch.dtype, page_size: int, longest: int) -> None:
        self._size = page_size
        self._own = -(-_OWN // page_size)
        pages = 1 + ROWS * (longest // page_size + self._own)
        self._pool = KVPool.allocate([layer], pages, page_size, dtype, torch.device("cpu"))
        for tensor in self._pool.caches:
            tensor.fill_(0.01)  # the values do not matter, but pages that were never written are not read from RAM
        self._query = torch.full((ROWS, heads, layer.key_dim), 0.01, dtype=dtype)
        self._args = AttentionArgs(layer.key_dim**-0.5)

    def batch(self, shared: int, grouped: bool) -> AttentionBatch:
        """Decode rows with `shared` positions before their own: in one prefix group, or each with its own copy."""
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
        """CPU time of one layer, with its share of the planning that is done once for all layers.

        Measured on one thread, as several would wait for each other on a busy machine. Only one thread plans, so
        planning counts once for each thread that waits.
        """
        attention = CompiledAttention(self._pool, batch, threads=1)
        begin = time.thread_time()
        attention.work(0, self._query.shape[1])
        planned = time.thread_time()
        attention.attend_stored(0, self._query, self._args)
        return (planned - begin) * torch.get_num_threads() / layers + time.thread_time() - planned


def _least(calls: Sequence[Callable[[], float]]) -> list[float]:
    """Shortest time of each call. Calls alternate, so that a busy moment affects all of them."""
    for call in calls:
        call()
    times = [math.inf] * len(calls)
    begin = time.perf_counter()
    for _ in range(_REPEATS):
        times = [min(best, call()) for best, call in zip(times, calls, strict=True)]
        if time.perf_counter() - begin > _SECONDS:
            break
    return times
