"""Parameters of rows that are sampled or filtered, and tiles that short rows fill."""

from __future__ import annotations

import random
from collections.abc import Sequence

from batchgen.kernels.gpu.sampling import SamplingTile

Params = tuple[float, int, float, float]
"""Temperature, top_k, top_p, min_p."""
SMALL = SamplingTile(block=64, capacity=32, spread=16, few_block=16, warps=4)
"""Rows of a few hundred logits take every path: collected ids that fit or do not fit, and several blocks of both."""
TINY = SamplingTile(block=16, capacity=8, spread=4, few_block=8, warps=1)


def some(params: Sequence[Params], count: int, seed: int) -> list[Params]:
    """Parameters drawn at random."""
    return random.Random(seed).sample(params, count)
