"""Ahead-of-time cases of attention and its merges, with the tiles of the chip compiled for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from batchgen.kernels.gpu.attention import TritonAttention
from batchgen.kernels.gpu.merge import merge_parts
from batchgen.kernels.types import AttentionArgs, AttentionBatch, ChunkPages, GroupPages, KVPool, LayerKV

META = torch.device("meta")
WINDOW: dict[str, Any] = {"window": 4096}
ALL: dict[str, Any] = {"window": 4096, "softcap": 50.0, "sinks": True}

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CASES: tuple[tuple[torch.dtype, int, int, int, int, int, dict[str, Any]], ...] = (
    *((BF16, 16, 8, dim, dim, 16, {}) for dim in (64, 80, 96, 112, 128, 256)),
    (BF16, 16, 16, 192, 128, 16, {}),
    (BF16, 14, 2, 64, 64, 16, {}),
    (BF16, 32, 1, 128, 128, 16, {}),
    (BF16, 32, 8, 128, 128, 64, {}),
    (BF16, 32, 8, 128, 128, 16, WINDOW),
    *((BF16, 16, 8, dim, dim, 16, ALL) for dim in (64, 128, 256)),
    *((F16, 16, 8, dim, dim, 16, {}) for dim in (64, 128, 256)),
    *((F32, 16, 8, dim, dim, 16, {}) for dim in (64, 128, 256)),
    *((F32, 16, 8, dim, dim, 16, ALL) for dim in (64, 128, 256)),
)
"""dtype, heads, kv heads, key and value size, page size, options."""


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype, heads, kv_heads, key_dim, value_dim, page_size, options in CASES:
        name = f"{str(dtype).removeprefix('torch.')},N={heads},K={kv_heads},D={key_dim},Dv={value_dim},S={page_size}"
        flags = "".join(f",{option}" for option in options)
        layer = LayerKV(kv_heads, key_dim, value_dim)
        yield f"attention[{name}{flags}]", partial(_attention, dtype, heads, layer, page_size, options)
    for dtype in (BF16, F16, F32):
        for dim in (64, 128, 256):
            yield f"merge_parts[{str(dtype).removeprefix('torch.')},D={dim}]", partial(_merge, dtype, dim)


def _attention(dtype: torch.dtype, heads: int, layer: LayerKV, page_size: int, options: dict[str, Any]) -> None:
    """Run a step with work for every launch: a chunk, groups of many rows and of one, long rows that are split."""
    rows = 130
    pool = KVPool.allocate([layer], 512, page_size, dtype, META)
    pages = np.ones(-(-4096 // page_size), np.int64)
    chunks = [ChunkPages(0, 256, 4000, pages)]
    start = np.full(rows, 2 * page_size)
    lens = np.where(np.arange(rows) < 129, 20, 4000)
    groups = [GroupPages(np.arange(128), pages[:2], 0), GroupPages(np.array([128]), pages[:2], 0)]
    start[129] = 0
    batch = AttentionBatch(
        torch.empty(256 + rows, dtype=torch.int64, device=META),
        chunks,
        256,
        groups,
        np.zeros((rows, len(pages)), np.int64),
        lens,
        start,
        4000,
    )
    if options.get("sinks"):
        options = options | {"sinks": torch.empty(heads, dtype=dtype, device=META)}
    query = torch.empty(256 + rows, heads, layer.key_dim, dtype=dtype, device=META)
    attention = TritonAttention(pool, batch, multiprocessors=132)
    attention.attend_stored(0, query, AttentionArgs(0.1, **options))


def _merge(dtype: torch.dtype, dim: int) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    merge_parts(empty(7, 16, dim, dtype=dtype), empty(16, 7).T, empty(7, 16, dim), empty(7, 16))
