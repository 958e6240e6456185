"""Logits and parameters of rows that are sampled or filtered, and tiles that such short rows fill."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from batchgen.kernels.gpu.sampling import SamplingTile

__all__ = ["KINDS", "SMALL", "TINY", "Params", "logits_of", "some"]

Params = tuple[float, int, float, float]
"""Temperature, top_k, top_p, min_p."""
SMALL = SamplingTile(block=64, capacity=32, spread=16, few_block=16, warps=4)
"""Rows of a few hundred logits take every path: collected ids that fit or do not fit, and several blocks of both."""
TINY = SamplingTile(block=16, capacity=8, spread=4, few_block=8, warps=1)
KINDS = ["normal", "ties", "bfloat16", "masked", "equal", "peaked", "zeros", "sorted", "clustered"]


def logits_of(kind: str, rows: int, vocab: int) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    logits = 2 * torch.randn(rows, vocab, generator=generator)
    if kind == "ties":
        logits = logits.round()
    elif kind == "bfloat16":
        logits = logits.bfloat16().float()
    elif kind == "masked":
        logits[torch.rand(rows, vocab, generator=generator) < 0.7] = -torch.inf
        logits[:, vocab // 2] = 0.5
    elif kind == "equal":
        logits.fill_(-3.25)
    elif kind == "peaked":
        logits *= 8
    elif kind == "zeros":
        logits = torch.where(logits > 0, 0.0, -0.0)
    elif kind == "sorted":
        logits = logits.sort(descending=True).values
    elif kind == "clustered":
        logits[:, ::64] += 40  # one lane has all large ones
    return logits


def some(params: Sequence[Params], count: int, seed: int) -> list[Params]:
    """Parameters drawn at random."""
    return random.Random(seed).sample(params, count)
