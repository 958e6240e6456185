"""Ahead-of-time cases of `qk_norm_rope_cache`: every head size, with and without norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from batchgen.kernels.gpu.heads import qk_norm_rope_cache
from batchgen.kernels.heads import HeadNorms

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((9, 3, 64), (32, 8, 64), (32, 32, 80), (32, 32, 96), (16, 8, 128), (32, 8, 128), (64, 8, 128), (8, 4, 256))
"""Heads, kv heads, head size. The tile depends only on the head size, except for models with very few heads."""


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype in DTYPES:
        for heads, kv_heads, dim in SHAPES:
            for normed in (False, True):
                name = str(dtype).removeprefix("torch.")
                name = f"qk_norm_rope_cache[{name},N={heads},K={kv_heads},D={dim},norm={int(normed)}]"
                yield name, partial(_launch, dtype, heads, kv_heads, dim, normed)


def _launch(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, normed: bool) -> None:
    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    norms = HeadNorms(empty(dim), empty(dim), 1e-6) if normed else None
    tables = empty(7, 1, dim), empty(7, 1, dim)
    pool = empty(11, 16, kv_heads, dim), empty(11, 16, kv_heads, dim)
    qkv = empty(7, heads + 2 * kv_heads, dim)
    qk_norm_rope_cache(qkv, norms, tables, *pool, empty(7, dtype=torch.int64))
