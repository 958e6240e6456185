"""Copies of the first positions of pages, in PyTorch and compiled, against a loop over positions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.kernels.cpu import ops
from batchgen.kernels.cpu.library import loaded
from batchgen.kernels.cpu.ops import COMPILED_OPS
from batchgen.kernels.ops import TORCH_OPS
from batchgen.kernels.pooled import in_turn
from batchgen.kernels.types import KVPool, LayerKV

PAGES = 90
COPIERS = {"torch": TORCH_OPS.copy_pages, **({"compiled": COMPILED_OPS.copy_pages} if loaded() else {})}


@pytest.mark.parametrize("copy_pages", COPIERS.values(), ids=COPIERS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("layers", "page_size", "dtype", "copies"),
    [
        ([LayerKV(1, 1, 1)], 1, torch.float32, 0),
        ([LayerKV(2, 4, 4)] * 2, 4, torch.float32, 2),
        ([LayerKV(1, 3, 5), LayerKV(3, 9, 1)], 3, torch.bfloat16, 5),
        ([LayerKV(2, 7, 8)] * 4, 16, torch.float16, 70),
        ([LayerKV(1, 8, 5, latent=True), LayerKV(2, 3, 3)], 4, torch.float32, 70),
    ],
)
def test_positions_are_copied_in_every_layer(
    layers: list[LayerKV],
    page_size: int,
    dtype: torch.dtype,
    copies: int,
    threads: int,
    copy_pages: Callable[[KVPool, Tensor], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    pool = KVPool.allocate(layers, PAGES, page_size, dtype, torch.device("cpu"))
    caches = (*pool.keys, *pool.values)
    for cache in caches:
        cache.copy_(torch.randn(cache.shape, generator=generator))
    pages = torch.randperm(PAGES, generator=generator)
    sources = pages[torch.randint(copies, PAGES, (copies,), generator=generator)]
    if copies > 1:
        sources[0] = pages[1]  # a page may be a target after it was a source
    lengths = torch.randint(1, page_size + 1, (copies,), generator=generator)
    table = torch.stack((sources, pages[:copies], lengths), 1)
    expected = [cache.clone() for cache in caches]
    for source, target, positions in table.tolist():
        for cache in expected:
            cache[target, :positions] = cache[source, :positions].clone()
    torch.set_num_threads(threads)
    monkeypatch.setattr(ops, "_SERIAL_COPIES", 0)
    copy_pages(pool, table)
    assert all(map(torch.equal, caches, expected))


@pytest.mark.parametrize("copy_pages", COPIERS.values(), ids=COPIERS)
def test_copies_may_read_what_earlier_ones_write(copy_pages: Callable[[KVPool, Tensor], None]) -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        pool = KVPool.allocate([LayerKV(1, 3, 2)] * 2, 6, 4, torch.float32, torch.device("cpu"))
        for cache in pool.caches:
            cache.copy_(torch.from_numpy(rng.standard_normal(cache.shape)))
        ends = np.array([rng.permutation(6)[:2] for _ in range(9)])
        table = np.concatenate([ends, rng.integers(1, 5, (9, 1))], 1)
        expected = [cache.clone() for cache in pool.caches]
        for source, target, positions in table.tolist():
            for cache in expected:
                cache[target, :positions] = cache[source, :positions].clone()
        for part in in_turn(table):
            copy_pages(pool, torch.from_numpy(part.copy()))
        assert all(map(torch.equal, pool.caches, expected))
