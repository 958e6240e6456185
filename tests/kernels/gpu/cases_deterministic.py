"""Ahead-of-time cases of deterministic attention, with the tiles of the chip compiled for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from batchgen.kernels.gpu.deterministic_attention import DeterministicTritonAttention
from batchgen.kernels.types import AttentionArgs, AttentionBatch, ChunkPages, GroupPages, KVPool, LayerKV

from .cases_attention import CASES

META = torch.device("meta")


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype, heads, kv_heads, key_dim, value_dim, page_size, options in CASES:
        name = f"{str(dtype).removeprefix('torch.')},N={heads},K={kv_heads},D={key_dim},Dv={value_dim},S={page_size}"
        flags = "".join(f",{option}" for option in options)
        layer = LayerKV(kv_heads, key_dim, value_dim)
        yield f"deterministic_attention[{name}{flags}]", partial(_attention, dtype, heads, layer, page_size, options)


def _attention(dtype: torch.dtype, heads: int, layer: LayerKV, page_size: int, options: dict[str, Any]) -> None:
    """Run a step with a chunk, a group and decode rows, whose launches must use the same machine code."""
    rows = 130
    pool = KVPool.allocate([layer], 512, page_size, dtype, META)
    pages = np.ones(-(-4096 // page_size), np.int64)
    shared = pages[: 256 // page_size]
    own = np.where(np.arange(rows) < 128, 256, 0)
    batch = AttentionBatch(
        torch.empty(256 + rows, dtype=torch.int64, device=META),
        [ChunkPages(0, 256, 4000, pages)],
        256,
        [GroupPages(np.arange(128), shared, 0)],
        np.zeros((rows, len(pages)), np.int64),
        np.full(rows, 20),
        own,
        20,
    )
    if options.get("sinks"):
        options = options | {"sinks": torch.empty(heads, dtype=dtype, device=META)}
    query = torch.empty(256 + rows, heads, layer.key_dim, dtype=dtype, device=META)
    DeterministicTritonAttention(pool, batch).attend_stored(0, query, AttentionArgs(0.1, **options))
