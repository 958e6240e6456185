"""Cached packed units of shared pages: same results as without the cache, packed once per write to their page, within
the memory limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.cpu import packed_pages as module
from batchgen.kernels.cpu.attention import CompiledAttention
from batchgen.kernels.cpu.library import loaded
from batchgen.kernels.cpu.matmul import methods
from batchgen.kernels.cpu.ops import COMPILED_OPS
from batchgen.kernels.cpu.packed_pages import PackedPages, PackedPool, packed_pool
from batchgen.kernels.types import AttentionArgs, KVPool, LayerKV
from tests.cases import examples
from tests.kernels.steps import Shape, Step, StepBuilder, any_step

BF16 = torch.bfloat16
LAYER = LayerKV(2, 64, 64)
needs_dots = pytest.mark.skipif(
    not loaded() or "dot" not in methods(BF16), reason="this processor has no dot instruction for bfloat16"
)


def with_cache(step: Step, pages: int | None = None) -> PackedPages:
    """Enable cached units for the first `pages` pages of the step's pool, or for all."""
    heads, key_dim, value_dim = *step.pool.keys[0].shape[2:], step.pool.values[0].shape[3]
    layer = LayerKV(heads, key_dim, value_dim)
    kept = PackedPages([layer], step.pool.num_pages if pages is None else pages, step.pool.page_size)
    step.pool = PackedPool(step.pool.keys, step.pool.values, step.pool.page_size, step.pool.latent, packed=kept)
    return kept


def attend(step: Step, pool: KVPool, window: int | None = None) -> Tensor:
    made = CompiledAttention(pool, step.batch, 2, dots=True)
    return made.attend(0, step.query, step.key, step.value, AttentionArgs(0.2, window=window))


def uncached(step: Step, window: int | None = None) -> Tensor:
    """The same without the cache."""
    return attend(step, KVPool(step.pool.keys, step.pool.values, step.pool.page_size, step.pool.latent), window)


def grouped(page_size: int = 16, group_pages: int = 14) -> Step:
    """Seven rows that share `group_pages`, and four of them two more."""
    b = StepBuilder(Shape(6, 2, 64, 64, page_size, BF16))
    rows = [b.decode(n, own_start=(group_pages + 2) * page_size) for n in (1, 9, 30, 17)]
    others = [b.decode(n, own_start=group_pages * page_size) for n in (3, 16, 40)]
    b.group(rows + others, 0, group_pages)
    b.group(rows, group_pages * page_size, 2)
    return b.build()


def shared_pages(step: Step) -> np.ndarray:
    return np.concatenate([g.pages for g in step.batch.groups])


@needs_dots
@examples(25)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 60), st.integers(0, 3)), max_size=5),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2)), min_size=1, max_size=12),
    st.sampled_from(
        [
            (6, 2, 64, 64, False),
            (9, 3, 33, 7, False),
            (8, 1, 96, 24, True),
            (8, 1, 96, 24, False),
            (4, 4, 16, 80, False),
        ]
    ),
    st.sampled_from([16, 32]),
    st.sampled_from([None, 37, 100]),
    st.integers(0, 9),
)
def test_cached_units_give_the_same_bits(
    chunks: list[tuple[int, int, int]],
    rows: list[tuple[int, int]],
    sizes: tuple[int, int, int, int, bool],
    page_size: int,
    window: int | None,
    seed: int,
) -> None:
    *heads, latent = sizes
    step = any_step(chunks, rows, Shape(*heads, page_size, BF16, latent), seed)
    with_cache(step, pages=1500)  # of 2,048: some are not cached
    for _ in range(3):  # packed, then reused twice
        assert torch.equal(attend(step, step.pool, window), uncached(step, window))


@needs_dots
@pytest.mark.parametrize("page_size", [16, 32])
def test_units_are_packed_once(page_size: int) -> None:
    step = grouped(page_size)
    kept = with_cache(step)
    made = attend(step, step.pool)
    stamps = kept.stamps[0].copy()
    assert (stamps != 0).any(-1).all(0).nonzero()[0].tolist() == sorted(shared_pages(step).tolist())
    assert (stamps[:, shared_pages(step)] == 1).all()
    # The shared pages are not read again.
    before = step.pool.keys[0].clone(), step.pool.values[0].clone()
    for cache in (step.pool.keys[0], step.pool.values[0]):
        cache[torch.from_numpy(shared_pages(step))] = torch.nan
    assert torch.equal(attend(step, step.pool), made)
    assert (kept.stamps[0] == stamps).all()
    # The cached units are multiplied.
    for cache, was in zip((step.pool.keys[0], step.pool.values[0]), before, strict=True):
        cache.copy_(was)
    kept.words[0][:, shared_pages(step)[3]] = 0
    assert not torch.equal(attend(step, step.pool), made)


@needs_dots
def test_a_write_invalidates_units() -> None:
    step = grouped()
    kept = with_cache(step)
    attend(step, step.pool)
    page = int(shared_pages(step)[5])
    # A chunk of a prompt writes to the page, as if it had been freed.
    batch = replace(step.batch, slot_mapping=torch.tensor([page * 16 + 3]), groups=[], decode_pages=None)
    batch.decode_lens = batch.decode_own_start = None
    writer = CompiledAttention(step.pool, batch, 2, dots=True)
    writer.attend(0, step.query[:1], step.key[:1], step.value[:1], AttentionArgs(0.2))
    assert torch.equal(attend(step, step.pool), uncached(step))
    assert set(kept.stamps[0][:, page].ravel().tolist()) == {2}
    assert set(kept.stamps[0][:, shared_pages(step)[4]].ravel().tolist()) == {1}


@needs_dots
def test_a_copy_invalidates_units() -> None:
    step = grouped()
    with_cache(step)
    before = attend(step, step.pool)
    source, target = shared_pages(step)[[2, 9]].tolist()
    COMPILED_OPS.copy_pages(step.pool, torch.tensor([[source, target, 16]]))
    after = attend(step, step.pool)
    assert torch.equal(after, uncached(step))
    assert not torch.equal(after, before)


@needs_dots
def test_no_more_pages_are_cached_than_there_is_room_for() -> None:
    step = grouped()
    kept = with_cache(step, pages=int(np.median(shared_pages(step))))
    for _ in range(2):
        assert torch.equal(attend(step, step.pool), uncached(step))
    assert 0 < (kept.stamps[0] != 0).any((0, 2)).sum() < len(shared_pages(step))


@needs_dots
def test_pages_of_single_prompts_are_not_cached() -> None:
    b = StepBuilder(Shape(6, 2, 64, 64, 16, BF16))
    b.chunk(200, past=300)
    b.decode(90)
    step = b.build()
    kept = with_cache(step)
    assert torch.equal(attend(step, step.pool), uncached(step))
    assert not kept.stamps[0].any()


@pytest.mark.parametrize(
    ("dtype", "page_size", "pages_of_room", "expected"),
    [
        (BF16, 16, 5, 5),
        (BF16, 16, 50, 9),
        (BF16, 32, 1, 1),
        (BF16, 8, 5, None),
        (torch.float32, 16, 5, None),
        (BF16, 16, 0, None),
    ],
)
def test_pages_that_fit_into_the_memory_limit(
    dtype: torch.dtype, page_size: int, pages_of_room: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units fit into the memory that the pool leaves."""
    monkeypatch.setattr(module, "dots_are_faster", lambda: True)
    layers = [LAYER, LayerKV(1, 33, 20)]
    page_bytes = 2 * page_size * (2 * (64 + 64) + 64 + 32)
    room = pages_of_room * page_bytes + page_bytes // 2
    pool = KVPool.allocate(layers, 9, page_size, dtype, torch.device("cpu"))
    made = packed_pool(pool, room)
    assert (made.packed.pages if isinstance(made, PackedPool) else None) == expected
    if isinstance(made, PackedPool):
        assert sum(words.nbytes for words in made.packed.words) <= room
    monkeypatch.setattr(module, "dots_are_faster", lambda: False)
    assert packed_pool(pool, room) is pool
