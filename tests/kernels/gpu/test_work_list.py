"""The work list without a kernel: the keys that it covers, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.kernels.attention import work_items as chunk_prefixes
from batchgen.kernels.gpu.work_list import (
    FIELDS,
    GROUPS,
    LARGE,
    SMALL,
    ListShape,
    TileSize,
    WorkList,
    plan_groups,
    plan_step,
)
from batchgen.kernels.types import AttentionBatch
from tests.cases import examples
from tests.kernels.steps import Shape, StepBuilder, any_batch, expected_slots


def list_shape(window: int | None = None, page_size: int = 16, **changed: int) -> ListShape:
    sizes = {"large": 8, "small": 2, "keys": 16, "split": 1 << 20, "wanted": 1} | changed
    large = TileSize(sizes["large"], sizes["keys"], sizes["split"], sizes["wanted"])
    return ListShape(page_size, window, large, TileSize(sizes["small"], sizes["keys"], sizes["split"], sizes["wanted"]))


def items_of(work: WorkList) -> list[list[int]]:
    return [row for section in work.items for row in work.packed[section].reshape(-1, FIELDS).tolist()]


def slots_read(batch: AttentionBatch, work: WorkList, shape: ListShape) -> list[list[int]]:
    """By token: the pool slots that its items show it, masked as the kernel does."""
    pages, rows, positions = (work.packed[s] for s in (work.pages, work.rows, work.positions))
    seen: list[list[int]] = [[] for _ in range(batch.slot_mapping.shape[0])]
    for rows_at, count, page_at, base, first, full_from, full_to, end, *_ in items_of(work):
        assert 0 <= first < end
        assert first <= full_from <= full_to <= end or full_from == full_to
        for token in rows[rows_at : rows_at + count]:
            position = positions[token] - base
            keys = np.arange(first, end)
            visible = keys <= position
            if shape.window is not None:
                visible &= keys > position - shape.window
            assert visible[(keys >= full_from) & (keys < full_to)].all(), "a step without a mask needs one"
            size = shape.page_size
            keys = keys[visible]
            seen[token] += (pages[page_at + keys // size] * size + keys % size).tolist()
    return seen


@examples(80)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60), st.integers(0, 3)), max_size=9),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2)), max_size=8),
    st.sampled_from([None, 1, 7, 30]),
    st.sampled_from([1, 5, 16]),
    st.sampled_from([16, 32, 1 << 20]),
    st.integers(1, 40),
    st.integers(0, 1 << 20),
)
def test_every_visible_key_is_read_once(
    chunks: list[tuple[int, int, int]],
    rows: list[tuple[int, int]],
    window: int | None,
    page_size: int,
    split: int,
    wanted: int,
    seed: int,
) -> None:
    batch = any_batch(chunks, rows, page_size, seed)
    shape = list_shape(window, page_size, split=split, wanted=wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_prefixes, "LEAST_KEYS", 2 * page_size)
        work = plan_step(batch, shape)
    assert [sorted(s) for s in slots_read(batch, work, shape)] == expected_slots(batch, page_size, window)
    check_parts(batch, work)


def check_parts(batch: AttentionBatch, work: WorkList) -> None:
    """Each token is written directly once, with its parts folded, or merged; every part is used exactly once."""
    rows, parts = work.packed[work.rows], work.packed[work.parts]
    written: dict[int, list[int]] = {}
    owner: dict[int, int] = {}
    for rows_at, count, *_, part_at, fold_at, folds, _ in items_of(work):
        for i, token in enumerate(rows[rows_at : rows_at + count].tolist()):
            if part_at >= 0:
                assert part_at + i not in owner
                owner[part_at + i] = token
            else:
                assert token not in written
                written[token] = parts[fold_at : fold_at + folds].tolist()
    for token, start, count in zip(*(work.packed[s].tolist() for s in work.merges), strict=True):
        assert token not in written
        written[token] = parts[start : start + count].tolist()
    assert sorted(written) == list(range(batch.slot_mapping.shape[0]))
    assert sorted(owner) == list(range(work.num_parts))
    for token, used in written.items():
        assert sorted(used) == [p for p, t in owner.items() if t == token]


def test_parts_that_are_folded_come_from_earlier_launches() -> None:
    work = plan_step(any_batch([(20, 0, 0)], [(4, 2)] * 9 + [(9, 0), (30, 1)], 16, 0), list_shape())
    for launch in (LARGE, GROUPS):
        assert not work.packed[work.items[launch]].reshape(-1, FIELDS)[:, 10].any()
    assert int(work.packed[work.items[SMALL]].reshape(-1, FIELDS)[:, 10].sum()) == 19


def test_the_longest_items_come_first() -> None:
    work = plan_step(any_batch([(40, 60, 0), (9, 3, 0)], [(n, 0) for n in (5, 60, 1, 33)], 16, 0), list_shape())
    for section in work.items:
        table = work.packed[section].reshape(-1, FIELDS)
        steps = -(-table[:, 7] // 16) - table[:, 4] // 16
        assert (np.diff(steps) <= 0).all()


def test_sections_begin_at_multiples_of_16_bytes() -> None:
    work = plan_step(any_batch([(7, 2, 0)], [(5, 0), (3, 1), (9, 2)], 5, 0), list_shape(page_size=5))
    for section in (*work.items, work.rows, work.positions, work.pages, work.parts, *work.merges):
        assert section.start % 4 == 0
    assert work.packed.dtype == np.int32


# What a step costs: keys read, items by launch (large, groups, small), parts and merges.


def grouped(rows: int) -> Callable[[StepBuilder], None]:
    return lambda b: b.group([b.decode(16, own_start=64) for _ in range(rows)], 0, 4)


def decodes(rows: int) -> Callable[[StepBuilder], None]:
    def fill(b: StepBuilder) -> None:
        for _ in range(rows):
            b.decode(512)

    return fill


def short_chunks(count: int, pages: int, tokens: int = 2) -> Callable[[StepBuilder], None]:
    """Chunks that begin with the same pages."""

    def fill(b: StepBuilder) -> None:
        prefix = b.pages(pages * b.shape.page_size)
        for _ in range(count):
            b.chunk(tokens, past=pages * b.shape.page_size, prefix=prefix)

    return fill


def tree_of_chunks(b: StepBuilder) -> None:
    root = b.pages(320)
    for _ in range(2):
        branch = root + b.pages(320)
        for _ in range(8):
            b.chunk(2, past=640, prefix=branch)


def long_chunk(b: StepBuilder) -> None:
    b.chunk(64)


SPLIT = {"wanted": 64, "split": 64}
COSTS: dict[str, tuple[Callable[[StepBuilder], None], dict[str, Any], dict[str, int]]] = {
    # A tile of rows reads shared pages once; each row folds its parts while it reads its own pages.
    **{
        f"group of {n}": (grouped(n), {"large": 64}, {"keys": 64 + n * 16, "shared": 1, "merges": 0})
        for n in (1, 8, 64)
    },
    "keys above the diagonal": (long_chunk, {}, {"keys": sum(range(8, 65, 8))}),
    "keys outside the window": (long_chunk, {"window": 4}, {"keys": 8 + 7 * 11}),
    # A long row is split as far as fills the device.
    "whole row": (decodes(1), SPLIT | {"wanted": 1}, {"keys": 512, "small": 1, "parts": 0, "merges": 0}),
    "row in 2": (decodes(1), SPLIT | {"wanted": 2}, {"keys": 512, "small": 2, "parts": 2, "merges": 1}),
    "row in 8": (decodes(1), SPLIT | {"wanted": 1000}, {"keys": 512, "small": 8, "parts": 8, "merges": 1}),
    "many rows": (decodes(64), SPLIT, {"small": 64, "parts": 0}),
    "common pages": (short_chunks(16, 20), {}, {"keys": 4 * 320 + 16 * 2, "large": 4, "small": 16, "merges": 32}),
    "every level of a tree": (tree_of_chunks, {}, {"keys": 4 * 320 + 2 * 2 * 320 + 16 * 2}),
    "pages that save little": (short_chunks(16, 15), {}, {"large": 0, "parts": 0}),
    "one chunk": (short_chunks(1, 20), {}, {"large": 0, "parts": 0}),
    "chunks that fill a tile": (short_chunks(4, 20, tokens=8), {}, {"large": 4, "parts": 0}),
    "nothing": (lambda b: None, {}, {"keys": 0, "large": 0, "shared": 0, "small": 0, "parts": 0, "merges": 0}),
}


@pytest.mark.parametrize("name", COSTS)
def test_what_a_step_costs(name: str) -> None:
    fill, shape, expected = COSTS[name]
    b = StepBuilder(Shape(4, 2), num_pages=4096)
    fill(b)
    work = plan_step(b.build().batch, list_shape(**shape))
    large, groups, small = (work.count(launch) for launch in (LARGE, GROUPS, SMALL))
    found = {"keys": work.keys_read, "large": large, "shared": large + groups, "small": small}
    found |= {"parts": work.num_parts, "merges": work.num_merges}
    assert {name: found[name] for name in expected} == expected


def test_tiles_are_padded_by_less_than_their_own_size() -> None:
    batch = any_batch([(40, 0, 0), (3, 9, 0)], [(9, 0)] * 5, 16, 0)
    work = plan_step(batch, list_shape(large=16, small=4))
    assert work.padded_rows == (16 - 8) + (4 - 3) + 5 * (4 - 1)


def test_groups_only_are_merged_for_every_decode_row() -> None:
    batch = any_batch([(5, 0, 0)], [(9, 0), (9, 1), (9, 2), (9, 2)], 16, 0)
    work = plan_groups(batch, list_shape())
    tokens, _, counts = (work.packed[s].tolist() for s in work.merges)
    assert tokens == [5, 6, 7, 8]
    assert sorted(counts) == [0, 1, 2, 2]
    assert work.count(SMALL) == 0


def test_rows_whose_window_is_past_a_group_are_not_in_its_tiles() -> None:
    b = StepBuilder(Shape(4, 2))
    near, far = b.decode(3, own_start=32), b.decode(40, own_start=32)
    b.group([far, near], 0, 2)
    work = plan_step(b.build().batch, list_shape(window=8))
    groups = work.packed[work.items[GROUPS]].reshape(-1, FIELDS)
    assert groups[:, 1].tolist() == [1]
    assert work.packed[work.rows][groups[0, 0]] == near
    assert groups[0, 4:8].tolist()[0] == 27
