"""What the largest step of a job takes of its device's memory beside weights and pool: by running it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol

import torch

from batchgen.engine.halving import is_out_of_memory
from batchgen.engine.planning import Workload
from batchgen.engine.rehearsal import PAGES, Rehearsal, rehearsal
from batchgen.errors import UsageError
from batchgen.kernels.types import KVPool
from batchgen.models.base import ModelSpec

__all__ = ["CudaMeter", "Meter", "Rehearser", "largest_step"]


class Rehearser(Protocol):
    """What runs steps."""

    def rehearse(self, job: Rehearsal) -> None:
        """Run all steps of a rehearsal, to the end of their work on the device."""
        ...


class Meter(Protocol):
    """Watches a device's memory."""

    def peak(self, body: Callable[[], None]) -> int:
        """Most bytes that `body` held at once, over what was held before."""
        ...


class CudaMeter:
    """By PyTorch's allocator, what it holds back between blocks and for CUDA graphs included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak(self, body: Callable[[], None]) -> int:
        """See `Meter.peak`."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        body()
        torch.cuda.synchronize(self._device)
        return max(0, torch.cuda.max_memory_reserved(self._device) - held)


def largest_step(
    rehearser: Callable[[Workload, KVPool], Rehearser],
    workload: Workload,
    spec: ModelSpec,
    page_size: int,
    limits: tuple[int, int],
    meter: Meter,
) -> tuple[int, int]:
    """Run the largest steps of a job and measure what they take.

    Args:
        rehearser: makes what runs steps of a workload over a pool, as for the job itself.
        workload: the job.
        spec: the model's.
        page_size: S, positions of a page.
        limits: most sequences at once and most tokens of a step.
        meter: watches the device.

    Returns:
        Bytes, and the tokens of a step: `limits`', or what could be run of it, halved as often as memory ran out.

    Raises:
        UsageError: not even as many tokens as sequences can be computed at once.
    """
    rows, tokens = limits
    if not workload.samples.any():
        return 0, tokens
    while True:
        taken = _measure(rehearser, rehearsal(workload, spec, page_size, rows, tokens), spec, page_size, meter)
        if taken is not None:
            return taken, tokens
        if tokens <= rows:
            raise UsageError(
                f"memory does not hold a step of {tokens} tokens and {rows} sequences beside the weights; lower "
                "--max-num-seqs or --max-tokens-per-step"
            )
        tokens = max(tokens // 2, rows)


def _measure(
    rehearser: Callable[[Workload, KVPool], Rehearser], job: Rehearsal, spec: ModelSpec, page_size: int, meter: Meter
) -> int | None:
    """Bytes of a rehearsal; None where memory ran out."""
    pool = KVPool.allocate(list(spec.kv_layers), PAGES, page_size, spec.dtype, spec.device)
    try:
        return meter.peak(lambda: rehearser(job.workload, pool).rehearse(job))
    except (RuntimeError, MemoryError) as problem:
        if not is_out_of_memory(problem):
            raise
    gc.collect()  # frames of the failed try may hold one another, and its tensors
    return None
