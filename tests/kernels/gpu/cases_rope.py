"""Ahead-of-time cases of the tables of rotary embeddings: every head size in every dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from batchgen.kernels.gpu.rope import rope_tables

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_SIZES = (64, 80, 96, 128, 256)


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype in DTYPES:
        for dim in HEAD_SIZES:
            inv_freq = torch.empty(dim // 2, device="meta")
            positions = torch.empty(7, dtype=torch.int64, device="meta")
            name = f"rope_tables[{str(dtype).removeprefix('torch.')},D={dim}]"
            yield name, partial(rope_tables, inv_freq, 1.0, positions, dtype)
