"""The physical floor: what a workload must compute at least, and how fast this machine multiplies and copies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from batchgen.job.bench.workloads import BenchRow
from batchgen.kernels.linear import Linear
from batchgen.models.base import ModelSpec
from batchgen.plan.tree import build_tree

__all__ = ["FloorWork", "count_work", "measure_bandwidth", "measure_gemm"]

_GEMM_SIZES = ((64, 1024, 4096), (512, 2048, 2048))
"""(rows, in, out): a decode step's product and a prefill's; the better rate is the machine's."""
_GEMM_SECONDS = 0.05
_COPY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class FloorWork:
    """What no engine can do without: every distinct prompt token and every fed output token, once."""

    prompt_tokens: int
    """Tokens of all prompts."""
    distinct_prompt_tokens: int
    """Nodes of the exact prefix tree."""
    decode_rows: int
    """Output tokens that are fed back: all but each row's last."""
    output_tokens: int
    flops: float
    """2 x parameters x tokens of the layers, 2 x V x H per generated token of the head."""

    def seconds(self, gemm_flops: float) -> float:
        """The least time at a rate in FLOP/s."""
        return self.flops / gemm_flops

    def share(self, seconds: float, gemm_flops: float) -> float:
        """How much of the time taken the floor explains: 1 is the floor itself."""
        return self.seconds(gemm_flops) / seconds


def count_work(rows: Sequence[BenchRow], spec: ModelSpec, *, tied: bool) -> FloorWork:
    """Count a workload for a dense model.

    Args:
        rows: the workload.
        spec: the model's sizes.
        tied: whether the head is the embedding. The embedding itself is looked up and costs nothing.
    """
    tokens = np.concatenate([np.asarray(row.ids, np.int32) for row in rows])
    lengths = [len(row.ids) for row in rows]
    tree = build_tree(tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    output = sum(row.max_new for row in rows)
    decode = output - len(rows)
    head = spec.vocab_size * spec.hidden_size
    layers = spec.parameters - head * (1 if tied else 2)
    flops = 2.0 * layers * (tree.distinct_tokens + decode) + 2.0 * head * output
    return FloorWork(sum(lengths), tree.distinct_tokens, decode, output, flops)


def measure_gemm(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the best matrix product, with the threads in force."""
    best = 0.0
    for rows, inner, outer in _GEMM_SIZES:
        linear = Linear(torch.randn(outer, inner, device=device).to(dtype))
        x = torch.randn(rows, inner, device=device).to(dtype)
        best = max(best, 2.0 * rows * inner * outer / _seconds_per_call(lambda f=linear, x=x: f(x), device))
    return best


def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy larger than the caches, read and written bytes together."""
    source = torch.ones(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2.0 * _COPY_BYTES / _seconds_per_call(lambda: target.copy_(source), device)


def _seconds_per_call(call: object, device: torch.device) -> float:
    """Time of the fastest call in a twentieth of a second: a floor is what the machine can do undisturbed."""
    assert callable(call)
    taken: list[float] = []
    call()
    end = time.perf_counter() + _GEMM_SECONDS
    while len(taken) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begin)
    return min(taken)
