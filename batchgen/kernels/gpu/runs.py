"""Runs of tokens that go on from recurrent states, as kernels read them."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.mixers.states import RunBatch

RUN_POINTERS: Final = ["p_rows", "p_lengths", "p_sources", "p_slots"]
"""Arguments that are not aligned: the slots of a step's decode rows follow their sources."""


def run_args(batch: RunBatch) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """The arguments of `load_run`."""
    slots = batch.sources if batch.slots is None else batch.slots
    return batch.rows, batch.lengths, batch.sources, slots, batch.rows.stride(0)


def packed(x: Tensor) -> Tensor:
    """[T, ...] -> [T, n] in which the numbers of a token are next to each other; a copy only if they are not."""
    flat = x.flatten(1)
    return flat if flat.stride(1) == 1 else flat.contiguous()


@triton.jit
def load_run(p_rows, p_lengths, p_sources, p_slots, stride_rows, i_run):
    """First flat token, length, source and slot of a run: its tokens are consecutive."""
    start = tl.load(p_rows + i_run.to(tl.int64) * stride_rows)
    length = tl.load(p_lengths + i_run).to(tl.int32)
    return start, length, tl.load(p_sources + i_run), tl.load(p_slots + i_run)
