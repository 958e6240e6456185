"""Copies of the first positions of pages, in PyTorch and compiled, against a loop over positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.engine.step.executor import ExecutorContext
from batchgen.kernels.backend import TORCH
from batchgen.kernels.cpu import ops as cpu_ops
from batchgen.kernels.cpu.library import loaded
from batchgen.kernels.cpu.ops import COMPILED_OPS
from batchgen.kernels.device import HOST
from batchgen.kernels.grouped import GroupedPool
from batchgen.kernels.ops import TORCH_OPS, Ops
from batchgen.kernels.types import KVPool, LayerKV
from batchgen.plan.step_plan import PageCopy

PAGES = 90
BY_NAME = {"torch": TORCH_OPS, **({"compiled": COMPILED_OPS} if loaded() else {})}
COPIERS = {name: ops.copy_pages for name, ops in BY_NAME.items()}
NONE: Any = None


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
    monkeypatch.setattr(cpu_ops, "_SERIAL_COPIES", 0)
    copy_pages(pool, table)
    assert all(map(torch.equal, caches, expected))


@pytest.mark.parametrize("ops", BY_NAME.values(), ids=BY_NAME)
def test_copies_of_a_step_may_read_what_earlier_ones_write(ops: Ops) -> None:
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
        grouped = GroupedPool([pool], {0: (0, 0), 1: (0, 1)})
        context = ExecutorContext(NONE, grouped, replace(TORCH, ops=ops), HOST, NONE, NONE, None)
        copies = [PageCopy(source, target, count, [(source, target)]) for source, target, count in table.tolist()]
        context.copy_pages(copies)
        assert all(map(torch.equal, pool.caches, expected))
