"""Work lists of compiled attention, without a kernel: positions covered, counts, costs and shares."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.kernels.attention import work_items as chunk_prefixes
from batchgen.kernels.attention.work_items import Words
from batchgen.kernels.cpu import attention_list
from batchgen.kernels.cpu.attention_list import ListPlanner, ListShape, WorkList
from batchgen.kernels.types import AttentionBatch, Ints
from tests.cases import examples
from tests.kernels.steps import Shape, StepBuilder, any_batch, expected_slots

GROUP = 3
QUERIES = 192 // GROUP
"""Most tokens of an item."""


def list_shape(page_size: int = 16, window: int | None = None, threads: int = 1, block: int | None = None) -> ListShape:
    return ListShape(page_size, window, kv_heads=3, group=GROUP, threads=threads, block=block)


def logical_items(work: WorkList, shape: ListShape) -> list[list[int]]:
    """Each item once; items split by key head must be listed for every key head."""
    heads: dict[tuple[int, ...], list[int]] = {}
    for *item, head in work.items.tolist():
        heads.setdefault(tuple(item), []).append(head)
    assert all(sorted(found) in ([-1], list(range(shape.kv_heads))) for found in heads.values())
    assert len(heads) == work.num_items
    return [[*item, 0] for item in heads]


def slots_read(batch: AttentionBatch, work: WorkList, shape: ListShape) -> list[list[int]]:
    """Pool slots that the items of each token read, masked as the kernel masks them."""
    seen: list[list[int]] = [[] for _ in range(batch.slot_mapping.shape[0])]
    size = shape.page_size
    for rows_at, count, page_at, base, first, end, _, _ in logical_items(work, shape):
        assert 0 <= first < end
        for token in work.tokens[rows_at : rows_at + count]:
            position = work.positions[token] - base
            keys = np.arange(first, end)
            visible = keys <= position
            if shape.window is not None:
                visible &= keys > position - shape.window
            keys = keys[visible]
            seen[token] += (work.pages[page_at + keys // size] * size + keys % size).tolist()
    return seen


def check_parts(batch: AttentionBatch, work: WorkList, wanted: Ints | None = None) -> None:
    """Check the parts and merges: each (wanted) token is written directly once or merged, each part is used once, and
    the parts of a token are ordered by position.
    """
    owner: dict[int, tuple[int, int]] = {}
    written = []
    for rows_at, count, _, base, first, _, part_at, _ in logical_items(work, list_shape()):
        for i, token in enumerate(work.tokens[rows_at : rows_at + count].tolist()):
            if part_at < 0:
                written.append(token)
            else:
                assert part_at + i not in owner
                owner[part_at + i] = (token, base + first)
    for token, start, count in work.merges.tolist():
        used = work.parts[start : start + count].tolist()
        assert used == [part for part, (t, _) in sorted(owner.items()) if t == token]
        assert [owner[part][1] for part in used] == sorted(owner[part][1] for part in used)
        written.append(token)
    assert sorted(written) == (list(range(batch.slot_mapping.shape[0])) if wanted is None else sorted(wanted.tolist()))
    assert sorted(owner) == list(range(work.num_parts))


def check_shares(work: WorkList, shape: ListShape) -> None:
    """Check that every item is in one share, and that each share is ordered by falling cost."""
    assert len(work.shares) == min(shape.threads, 8) + 1
    assert (work.shares[0], work.shares[-1]) == (0, len(work.items))
    for begin, end in pairwise(work.shares.tolist()):
        assert begin <= end
        costs = costs_of(work.items[begin:end], shape)
        assert costs == sorted(costs, reverse=True)


def costs_of(items: Words, shape: ListShape) -> list[int]:
    """Cost of each item: positions times query rows, plus reading the positions, divided by the entries of the item."""
    return [
        (end - first) * (count * shape.group + 8) // (1 if head < 0 else shape.kv_heads)
        for _, count, _, _, first, end, _, head in items.tolist()
    ]


@examples(40)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60), st.integers(0, 3)), max_size=9),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2)), max_size=8),
    st.sampled_from([None, 1, 7, 30]),
    st.sampled_from([1, 5, 16]),
    st.sampled_from([1, 2, 16]),
    st.sampled_from([3, 24, 192]),
    st.integers(0, 1 << 20),
)
def test_every_visible_key_is_read_once(
    chunks: list[tuple[int, int, int]],
    rows: list[tuple[int, int]],
    window: int | None,
    page_size: int,
    threads: int,
    most_rows: int,
    seed: int,
) -> None:
    batch = any_batch(chunks, rows, page_size, seed)
    shape = list_shape(page_size, window, threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_prefixes, "LEAST_KEYS", 2 * page_size)
        patch.setattr(attention_list, "_ROWS", most_rows)
        patch.setattr(attention_list, "_LEAST_KEYS", 16)
        patch.setattr(attention_list, "_STEP", 8)
        work = ListPlanner(batch, shape).work()
        tokens = range(batch.slot_mapping.shape[0])
        wanted = np.random.default_rng(seed).permutation(tokens)[: len(tokens) // 2]
        some = ListPlanner(batch, shape).work(wanted)
    expected = expected_slots(batch, page_size, window)
    assert [sorted(s) for s in slots_read(batch, work, shape)] == expected
    check_parts(batch, work)
    check_shares(work, shape)
    check_shares(some, shape)
    read = slots_read(batch, some, shape)
    assert [sorted(s) for s in read] == [
        s if token in wanted else [] for token, s in zip(tokens, expected, strict=True)
    ]
    check_parts(batch, some, wanted)


@examples(40)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90), st.integers(0, 3)), max_size=9),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2)), max_size=8),
    st.sampled_from([None, 1, 7, 30]),
    st.sampled_from([1, 2, 5, 16]),
    st.sampled_from([2, 12, 32]),
    st.integers(0, 1 << 20),
)
def test_deterministic_items_are_cut_at_blocks(
    chunks: list[tuple[int, int, int]],
    rows: list[tuple[int, int]],
    window: int | None,
    page_size: int,
    block: int,
    seed: int,
) -> None:
    """A token's first item may have any length; each further one begins at a block and lies within it."""
    batch = any_batch(chunks, rows, page_size, seed)
    shape = list_shape(page_size, window, threads=2, block=block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_prefixes, "LEAST_KEYS", page_size)
        work = ListPlanner(batch, shape).work()
    assert [sorted(s) for s in slots_read(batch, work, shape)] == expected_slots(batch, page_size, window)
    check_parts(batch, work)
    items: dict[int, list[tuple[int, int]]] = {}
    for rows_at, count, _, base, first, end, _, _ in logical_items(work, shape):
        assert base % block == 0
        for token in work.tokens[rows_at : rows_at + count].tolist():
            items.setdefault(token, []).append((base + first, base + end))
    for runs in items.values():
        (_, reached), *others = sorted(runs)
        for first, end in others:
            assert reached % block == 0
            assert reached <= first < end <= first // block * block + block
            reached = end


def unique_rows(b: StepBuilder) -> None:
    for n in (5, 70, 33, 1):
        b.decode(n)


def shared_prefix(b: StepBuilder) -> None:
    b.group([b.decode(1 + n % 9, own_start=320) for n in range(70)], 0, 20)


def three_levels(b: StepBuilder) -> None:
    """A root of 10 pages, under it three nodes of 4, under each two of 2 with 5 rows each, and a row below the root."""
    rows = []
    for _ in range(3):
        below = []
        for _ in range(2):
            leaf = [b.decode(n, own_start=256) for n in (1, 4, 9, 16, 30)]
            b.group(leaf, 224, 2)
            below += leaf
        b.group(below, 160, 4)
        rows += below
    rows.append(b.decode(7, own_start=160))
    b.group(rows, 0, 10)


def chunks_over_one_past(b: StepBuilder) -> None:
    prefix = b.chunk(480)
    for q_len in (3, 8, 5, 1, 8, 8):
        b.chunk(q_len, past=480, prefix=prefix)
    b.chunk(150, past=480, prefix=prefix)


@pytest.mark.parametrize(
    ("fill", "items", "merges", "parts", "keys", "padding"),
    [
        (unique_rows, 4, 0, 0, 5 + 70 + 33 + 1, 0),
        (shared_prefix, 72, 70, 140, 983, 6),  # the prefix in two items, of 64 and 6 tokens
        (three_levels, 41, 31, 122, 911, 15),
        (chunks_over_one_past, 18, 33, 66, 4567, 19),
    ],
)
def test_items_merges_reads_and_padding_are_counted(
    fill: Callable[[StepBuilder], None], items: int, merges: int, parts: int, keys: int, padding: int
) -> None:
    b = StepBuilder(Shape(9, 3, 8, 8), num_pages=4096)
    fill(b)
    work = ListPlanner(b.build().batch, list_shape()).work()
    assert (work.num_items, work.num_merges, work.num_parts) == (items, merges, parts)
    assert (work.keys_read, work.padded_rows) == (keys, padding)


def test_long_runs_are_cut_for_threads_and_large_items_split_by_head() -> None:
    b = StepBuilder(Shape(9, 3, 8, 8), num_pages=4096)
    b.decode(6000)
    batch = b.build().batch
    alone = ListPlanner(batch, list_shape(threads=1)).work()
    assert (alone.num_items, len(alone.items)) == (1, 1)
    many = ListPlanner(batch, list_shape(threads=16)).work()
    assert (many.num_items, len(many.items)) == (12, 36)
    assert many.num_merges == 1
    assert many.keys_read == 6000
    lengths = many.items[:, 5] - many.items[:, 4]
    assert lengths.max() - lengths.min() <= 64 * 12
    shape = list_shape(threads=8)
    work = ListPlanner(batch, shape).work()
    costs = [sum(costs_of(work.items[begin:end], shape)) for begin, end in pairwise(work.shares.tolist())]
    assert max(costs) - sum(costs) / 8 <= max(costs_of(work.items, shape))
    assert sum(costs) / 8 - min(costs) <= max(costs_of(work.items, shape))


def test_a_group_is_split_by_head_and_its_rows_are_not() -> None:
    b = StepBuilder(Shape(9, 3, 8, 8), num_pages=4096)
    b.group([b.decode(20, own_start=640) for _ in range(60)], 0, 40)
    work = ListPlanner(b.build().batch, list_shape(threads=2)).work()
    assert (work.num_items, len(work.items)) == (62, 66)
    heads = sorted(work.items[:, -1].tolist())
    assert heads == [-1] * 60 + [0, 0, 1, 1, 2, 2]
    for begin, end in pairwise(work.shares.tolist()):
        of_group = work.items[begin:end, -1] >= 0
        assert of_group.sum() == 3
        assert of_group[:3].all()


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 16])
def test_adjacent_rows_are_in_one_share(threads: int) -> None:
    b = StepBuilder(Shape(9, 3, 8, 8), num_pages=4096)
    rows = [b.decode(48, own_start=768) for _ in range(64)]
    b.group(rows, 0, 16)
    for first in range(0, 64, 8):
        b.group(rows[first : first + 8], 256, 32)
    shape = list_shape(threads=threads)
    work = ListPlanner(b.build().batch, shape).work()
    check_shares(work, shape)
    count = min(threads, 8)
    costs = costs_of(work.items, shape)
    for share, (begin, end) in enumerate(pairwise(work.shares.tolist())):
        alone = work.items[begin:end][work.items[begin:end, 1] == 1]
        tokens = sorted(work.tokens[alone[:, 0]].tolist())
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        assert abs(tokens[0] - 64 * share / count) <= 2
        assert abs(tokens[-1] + 1 - 64 * (share + 1) / count) <= 2
        assert sum(costs[begin:end]) <= sum(costs) / count + max(costs)


def test_deterministic_rows_share_whole_blocks() -> None:
    """Nine rows share four blocks of 64 positions; the five rows with the longer prefix share a fifth block."""
    b = StepBuilder(Shape(9, 3, 8, 8), num_pages=4096)
    high = [b.decode(9, own_start=272) for _ in range(4)]
    low = [b.decode(9, own_start=336) for _ in range(5)]
    b.group([*high, *low], 0, 17)
    b.group(low, 272, 4)
    work = ListPlanner(b.build().batch, list_shape(block=64)).work()
    runs = sorted((base + first, base + end, count) for _, count, _, base, first, end, _, _ in work.items.tolist())
    assert runs == [(0, 256, 9), (256, 281, 1), *[(256, 281, 1)] * 3, (256, 320, 5), *[(320, 345, 1)] * 5]
