"""Copies of the first positions of pages, in PyTorch and compiled, against a loop over positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.cpu import ops as compiled
from batchgen.kernels.cpu.library import loaded
from batchgen.kernels.cpu.ops import COMPILED_OPS
from batchgen.kernels.ops import TORCH_OPS
from batchgen.kernels.types import KVPool, LayerKV

PAGES = 90

COMPILED = (COMPILED_OPS.copy_pages,) if loaded() else ()


def pool_of(layers: list[LayerKV], page_size: int, dtype: torch.dtype) -> KVPool:
    pool = KVPool.allocate(layers, PAGES, page_size, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for cache in (*pool.keys, *pool.values):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    return pool


def copied_one_by_one(pool: KVPool, copies: list[tuple[int, int, int]]) -> KVPool:
    keys, values = ([cache.clone() for cache in caches] for caches in (pool.keys, pool.values))
    for source, target, positions in copies:
        for cache in (*keys, *values):
            for position in range(positions):
                cache[target, position] = cache[source, position]
    return KVPool(keys, values, pool.page_size)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[LayerKV], int, list[tuple[int, int, int]]]:
    """Layers, a page size, and copies to distinct pages, none of which is a source later."""
    sizes = st.builds(LayerKV, st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))
    layers = draw(st.lists(sizes, min_size=1, max_size=4))
    page_size = draw(st.sampled_from([1, 3, 16]))
    order = draw(st.permutations(range(PAGES)))
    count = draw(st.sampled_from([0, 1, 5, 70]))
    sources = draw(st.lists(st.sampled_from(order[count:]), min_size=count, max_size=count))
    lengths = draw(st.lists(st.integers(1, page_size), min_size=count, max_size=count))
    return layers, page_size, list(zip(sources, order[:count], lengths, strict=True))


@given(jobs(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@settings(max_examples=30, deadline=None)
def test_positions_are_copied_in_every_layer(
    job: tuple[list[LayerKV], int, list[tuple[int, int, int]]], dtype: torch.dtype
) -> None:
    layers, page_size, copies = job
    expected = copied_one_by_one(pool_of(layers, page_size, dtype), copies)
    written = {target: positions for _, target, positions in copies}
    for copy_pages, threads in ((TORCH_OPS.copy_pages, 1), *((c, n) for c in COMPILED for n in (1, 2))):
        pool = pool_of(layers, page_size, dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled, "_SERIAL_COPIES", 0)
            patch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            copy_pages(pool, torch.tensor(copies, dtype=torch.int64).reshape(-1, 3))
        for ours, theirs in zip((*pool.keys, *pool.values), (*expected.keys, *expected.values), strict=True):
            for page in range(PAGES):
                upto = written.get(page, page_size)
                assert torch.equal(ours[page, :upto], theirs[page, :upto])
            # PyTorch's version may write whole pages.
            assert copy_pages is TORCH_OPS.copy_pages or torch.equal(ours, theirs)


@pytest.mark.parametrize("copy_pages", [TORCH_OPS.copy_pages, *COMPILED])
def test_a_page_may_be_a_target_after_it_was_a_source(copy_pages: Callable[[KVPool, Tensor], None]) -> None:
    pool, copies = pool_of([LayerKV(2, 4, 4)] * 2, 4, torch.float32), [(5, 6, 3), (7, 5, 4)]
    expected = copied_one_by_one(pool, copies)
    copy_pages(pool, torch.tensor(copies))
    for ours, theirs in zip((*pool.keys, *pool.values), (*expected.keys, *expected.values), strict=True):
        assert torch.equal(ours[6, :3], theirs[6, :3])
        assert torch.equal(ours[5], theirs[5])
