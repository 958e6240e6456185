from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.attention import work_items as chunk_prefixes
from batchgen.kernels.chips import AttentionTile, known_chips, tuning_of
from batchgen.kernels.gpu import attention as module
from batchgen.kernels.gpu.attention import TritonAttention
from batchgen.kernels.gpu.merge import merge_parts
from batchgen.kernels.gpu.work_list import FIELDS, GROUPS, LARGE, SMALL, WorkList
from batchgen.kernels.types import AttentionArgs, AttentionBatch, GroupPages
from tests.kernels.closeness import assert_as_close
from tests.kernels.oracle import attend_by_token
from tests.kernels.steps import (
    Shape,
    Step,
    StepBuilder,
    check_layers_of_different_shapes,
    group_of_one,
    group_of_some,
    one_row,
    one_token,
    only_rows,
)

SCALE = 0.3


@dataclass(frozen=True)
class Tiles:
    """Small tiles for every dtype, so that few tokens fill them; replaces a chip's tuning."""

    keys: int = 16
    split_keys: int = 1 << 20
    split_keys_large: int = 1 << 20
    items_per_sm: int = 8
    items_per_sm_large: int = 8

    def attention_tile(self, kind: str, head_dim: int, dtype: torch.dtype) -> AttentionTile:
        return AttentionTile(64 if kind == "prefill" else 16, self.keys, 4, 1)


TILES: Any = Tiles()
SPLITTING: Any = Tiles(split_keys=16, split_keys_large=32)


def attention_of(step: Step, tuning: Any = TILES, multiprocessors: int = 64) -> TritonAttention:
    return TritonAttention(step.pool, step.batch, tuning, multiprocessors)


def attend(step: Step, tuning: Any = TILES, **options: Any) -> Tensor:
    return attention_of(step, tuning).attend(0, step.query, step.key, step.value, AttentionArgs(SCALE, **options))


def check(step: Step, tuning: Any = TILES, **options: Any) -> None:
    """Compare a step with the reference; in low precision allow twice the error of the PyTorch backend."""
    keys, values = step.filled()
    args = AttentionArgs(SCALE, **options)
    exact = attend_by_token(step.batch, step.query, keys, values, args)
    plain = attend_by_token(step.batch, step.query, keys, values, args, keys.dtype)
    assert_as_close(attend(step, tuning, **options), plain, exact)


def mixed(shape: Shape, seed: int = 0) -> Step:
    """Chunks with and without a past, decode rows without a group, in one and in two."""
    b = StepBuilder(shape, seed=seed)
    b.chunk(35)
    b.chunk(1, past=50)
    b.chunk(19, past=20)
    size = shape.page_size
    b.decode(1)
    b.decode(40)
    low = [b.decode(n, own_start=4 * size) for n in (1, 5)]
    high = [b.decode(n, own_start=2 * size) for n in (3, size)]
    b.group([low[1], high[0], low[0], high[1]], 0, 2)
    b.group(low, 2 * size, 2)
    return b.build()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"window": 40},
    {"softcap": 3.0},
    {"sinks": True},
    {"window": 21, "softcap": 2.0, "sinks": True},
]


def with_sinks(options: dict[str, Any], heads: int) -> dict[str, Any]:
    return {**options, "sinks": torch.linspace(-3, 3, heads)} if options.get("sinks") else options


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "tuning"), [(4, 2, TILES), (3, 1, SPLITTING)], ids=["whole", "split"])
def test_a_mixed_step_equals_the_reference(heads: int, kv_heads: int, tuning: Any, options: dict[str, Any]) -> None:
    check(mixed(Shape(heads, kv_heads)), tuning, **with_sinks(options, heads))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_low_precision_is_as_accurate_as_pytorch(dtype: torch.dtype, options: dict[str, Any]) -> None:
    check(mixed(Shape(4, 2, dtype=dtype)), **with_sinks(options, 4))


def small_step(shape: Shape, seed: int = 0) -> Step:
    """A chunk with a past, a single row, a group of two."""
    b = StepBuilder(shape, seed=seed)
    b.chunk(11, past=9)
    b.decode(20)
    rows = [b.decode(n, own_start=shape.page_size) for n in (2, 9)]
    b.group(rows, 0, 1)
    return b.build()


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (4, 4), (9, 3), (7, 1), (14, 2), (16, 1), (24, 1), (40, 2), (71, 1)]
)
def test_heads_of_any_number(heads: int, kv_heads: int) -> None:
    check(small_step(Shape(heads, kv_heads)))


@pytest.mark.parametrize(
    ("key_dim", "value_dim"),
    [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256), (24, 40), (40, 24), (7, 5)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_head_sizes(key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    check(small_step(Shape(2, 1, key_dim, value_dim, dtype=dtype)))


@pytest.mark.parametrize("page_size", [1, 5, 8, 16, 32, 64])
@pytest.mark.parametrize("window", [None, 17])
def test_page_sizes(page_size: int, window: int | None) -> None:
    check(small_step(Shape(2, 1, page_size=page_size)), window=window)


@pytest.mark.parametrize("keys", [16, 32, 64])
@pytest.mark.parametrize("page_size", [5, 32, 64])
def test_page_and_tile_sizes_are_independent(page_size: int, keys: int) -> None:
    tiles: Any = Tiles(keys)
    b = StepBuilder(Shape(2, 1, page_size=page_size))
    b.chunk(50, past=70)
    b.decode(130)
    check(b.build(), tiles)


@pytest.mark.parametrize("chip", ["default", *known_chips()])
def test_the_tiles_of_each_chip(chip: str) -> None:
    b = StepBuilder(Shape(6, 1, dtype=torch.float16))
    b.chunk(40, past=40)
    rows = [b.decode(n, own_start=64) for n in (1, 9, 20, 3)]
    b.group(rows, 0, 4)
    check(b.build(), tuning_of(chip), window=70)


def test_the_tiles_of_float32() -> None:
    check(small_step(Shape(4, 1)), tuning_of("default"), window=20)


def only_chunk(b: StepBuilder) -> None:
    b.chunk(70, past=63)


def group_of_many(b: StepBuilder) -> None:
    rows = [b.decode(1 + n % 3, own_start=32) for n in range(18)]
    b.group(rows[::-1], 0, 2)


def tree(b: StepBuilder) -> None:
    """Three levels: all rows, two branches, four leaves of different sizes."""
    rows = [b.decode(1 + i % 4, own_start=64) for i in range(9)]
    b.group(rows, 0, 1)
    b.group(rows[:5], 16, 2)
    b.group(rows[5:], 16, 2)
    for leaf in (rows[:1], rows[1:5], rows[5:8], rows[8:]):
        b.group(leaf, 48, 1)


@pytest.mark.parametrize(
    "fill", [only_chunk, one_token, only_rows, one_row, group_of_one, group_of_some, group_of_many, tree]
)
@pytest.mark.parametrize("window", [None, 20])
def test_steps_of_one_kind(fill: Callable[[StepBuilder], None], window: int | None) -> None:
    b = StepBuilder(Shape(2, 1))
    fill(b)
    check(b.build(), window=window)


def long_row(b: StepBuilder) -> None:
    b.decode(150)


def long_chunk(b: StepBuilder) -> None:
    b.chunk(20, past=130)


def long_group(b: StepBuilder) -> None:
    b.group([b.decode(n, own_start=128) for n in (1, 50)], 0, 8)


@pytest.mark.parametrize("fill", [long_row, long_chunk, long_group])
@pytest.mark.parametrize("options", [{}, {"window": 70, "softcap": 2.0, "sinks": True}], ids=str)
def test_long_runs_are_split_and_merged(fill: Callable[[StepBuilder], None], options: dict[str, Any]) -> None:
    b = StepBuilder(Shape(2, 1))
    fill(b)
    step = b.build()
    check(step, SPLITTING, **with_sinks(options, 2))
    work = attention_of(step, SPLITTING).work(0, 2, options.get("window"))
    assert work.num_parts > 1
    assert work.num_merges > 0
    assert sum(work.count(launch) for launch in (LARGE, GROUPS, SMALL)) > 3


@pytest.mark.parametrize("options", [{}, {"window": 40, "sinks": True}], ids=str)
@pytest.mark.parametrize("tuning", [TILES, SPLITTING], ids=["whole", "split"])
def test_short_chunks_share_their_common_pages(
    monkeypatch: pytest.MonkeyPatch, tuning: Any, options: dict[str, Any]
) -> None:
    """With decode rows in a group and without: one step folds parts, merges parts and writes results directly."""
    monkeypatch.setattr(chunk_prefixes, "LEAST_KEYS", 32)
    b = StepBuilder(Shape(2, 1))
    prefix = b.pages(32)
    b._fill(prefix, 32)
    for q_len in (3, 1, 5, 9, 2):
        b.chunk(q_len, past=35, prefix=prefix)
    b.decode(20)
    b.group([b.decode(3, own_start=16)], 0, 1)
    step = b.build()
    check(step, tuning, **with_sinks(options, 2))
    work = attention_of(step, tuning).work(0, 2, options.get("window"))
    chunks = 3 + 5 + 9 + 2  # a chunk of one token folds its part itself
    assert work.num_merges == chunks if tuning is TILES else work.num_merges > chunks


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_queries_of_another_dtype_than_the_pool(dtype: torch.dtype) -> None:
    step = small_step(Shape(4, 2, dtype=dtype))
    expected = attend(step)
    step.query = step.query.float()
    got = attend(step)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.to(dtype), expected, rtol=0, atol=0)


def test_an_empty_step_gives_an_empty_result() -> None:
    assert attend(StepBuilder(Shape(4, 2)).build()).shape == (0, 4, 16)


def test_keys_and_values_are_stored_where_the_slots_say() -> None:
    step = small_step(Shape(4, 2))
    keys, values = step.filled()
    attend(step)
    torch.testing.assert_close(step.pool.keys[0], keys, equal_nan=True)
    torch.testing.assert_close(step.pool.values[0], values, equal_nan=True)


def test_stored_keys_are_attended_to_and_unchanged() -> None:
    step = small_step(Shape(4, 2))
    expected = attend(step)
    before = step.pool.keys[0].clone()
    attention = attention_of(step)
    keys, values, slots = attention.cache(0)
    assert keys is step.pool.keys[0]
    assert values is step.pool.values[0]
    assert slots is step.batch.slot_mapping
    torch.testing.assert_close(attention.attend_stored(0, step.query, AttentionArgs(SCALE)), expected, rtol=0, atol=0)
    torch.testing.assert_close(step.pool.keys[0], before, equal_nan=True)


# The interpreter's maximum is numpy's, which warns about rows without a number; a GPU's does not.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("poisoned", [0, 1, 2])
def test_not_a_numbers_of_other_rows_do_not_spread(poisoned: int) -> None:
    b = StepBuilder(Shape(2, 1))
    rows = [b.decode(n, own_start=32) for n in (9, 30, 12)]
    b.group(rows, 0, 2)
    step = b.build()
    clean = attend(step, SPLITTING)
    for tensor in (step.query, step.key, step.value):
        tensor[poisoned] = torch.nan
    got = attend(step, SPLITTING)
    assert bool(got[poisoned].isnan().all())
    others = [i for i in range(3) if i != poisoned]
    torch.testing.assert_close(got[others], clean[others], rtol=0, atol=1e-6)


def test_sinks_count_once_with_several_parts() -> None:
    """With values of 1, the output is the softmax weight of all positions, without the sink's."""
    b = StepBuilder(Shape(2, 1))
    rows = [b.decode(3, own_start=64) for _ in range(2)]
    b.group(rows, 0, 2)
    b.group(rows, 32, 2)
    step = b.build()
    step.pool.values[0].fill_(1.0)
    step.value.fill_(1.0)
    step.query.zero_()  # every score is 0: 67 positions and a sink of exp(s)
    expected = 67 / (67 + torch.tensor([0.0, 3.0]).exp())
    for tuning in (TILES, SPLITTING):
        got = attend(step, tuning, sinks=torch.tensor([0.0, 3.0]))
        torch.testing.assert_close(got, expected[None, :, None].expand_as(got), rtol=1e-5, atol=0)


@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_sinks_far_from_the_scores(sink: float) -> None:
    step = small_step(Shape(2, 1))
    check(step, sinks=torch.full((2,), sink))


def test_scores_far_apart() -> None:
    step = small_step(Shape(2, 1))
    step.query *= 1000
    keys, values = step.filled()
    exact = attend_by_token(step.batch, step.query, keys, values, AttentionArgs(SCALE))
    torch.testing.assert_close(attend(step).double(), exact, rtol=1e-3, atol=1e-3)


def test_layers_of_different_shapes_share_one_step() -> None:
    check_layers_of_different_shapes(lambda pool, batch: TritonAttention(pool, batch, TILES, 4))


def test_queries_may_be_strided_views() -> None:
    """A fused projection returns slices of one tensor, transformers returns transposed ones."""
    step = small_step(Shape(4, 2))
    expected = attend(step)
    fused = torch.cat([step.query, step.key, step.value], 1)
    step.query, step.key, step.value = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    torch.testing.assert_close(attend(step), expected, rtol=0, atol=0)
    step.query = step.query.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(attend(step), expected, rtol=0, atol=0)


def group_reference(step: Step, row: int, window: int | None, softcap: float | None) -> tuple[Tensor, Tensor]:
    """A decode row over its groups' pages only, in float64: [N, Dv] and the log-sum-exp [N]."""
    batch, size, heads = step.batch, step.pool.page_size, step.query.shape[1]
    assert batch.decode_own_start is not None
    assert batch.decode_lens is not None
    position = int(batch.decode_own_start[row] + batch.decode_lens[row] - 1)
    slots: list[int] = []
    for group in batch.groups:
        if row in group.rows.tolist():
            for i in range(len(group.pages) * size):
                if window is None or group.start + i > position - window:
                    slots.append(int(group.pages[i // size]) * size + i % size)
    out, lse = torch.zeros(heads, step.value.shape[2]).double(), torch.full((heads,), -math.inf).double()
    if not slots:
        return out, lse
    k = step.pool.keys[0].flatten(0, 1)[slots].double().repeat_interleave(heads // step.key.shape[1], 1)
    v = step.pool.values[0].flatten(0, 1)[slots].double().repeat_interleave(heads // step.key.shape[1], 1)
    scores = torch.einsum("nd,snd->ns", step.query[batch.decode_start + row].double(), k) * SCALE
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return torch.einsum("ns,snd->nd", scores.softmax(1), v), scores.logsumexp(1)


@pytest.mark.parametrize("tuning", [TILES, SPLITTING], ids=["whole", "split"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (21, None), (60, 3.0)])
def test_prefix_parts_cover_the_groups_only(window: int | None, softcap: float | None, tuning: Any) -> None:
    b = StepBuilder(Shape(2, 1))
    b.chunk(20)
    b.decode(9)
    tree(b)
    step = b.build()
    out, lse = attention_of(step, tuning).prefix_parts(
        0, step.query, AttentionArgs(SCALE, window=window, softcap=softcap)
    )
    assert out.shape == (10, 2, 16)
    assert lse.shape == (10, 2)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    for row in range(10):
        exact, exact_lse = group_reference(step, row, window, softcap)
        torch.testing.assert_close(out[row].double(), exact, rtol=0, atol=1e-5)
        torch.testing.assert_close(lse[row].double(), exact_lse, rtol=1e-5, atol=1e-5)
    assert bool((lse[0] == -math.inf).all())


def test_prefix_parts_merge_with_the_rows_own_pages_into_the_whole() -> None:
    b = StepBuilder(Shape(2, 1))
    tree(b)
    step = b.build()
    whole = attend(step)
    prefix = attention_of(step).prefix_parts(0, step.query, AttentionArgs(SCALE))
    own_pages, own_lens = step.batch.decode_pages, step.batch.decode_lens
    assert own_pages is not None
    assert own_lens is not None
    zero = np.zeros_like(own_lens)
    alone = AttentionBatch(step.batch.slot_mapping, [], 0, [], own_pages, own_lens, zero, int(own_lens.max()))
    own = TritonAttention(step.pool, alone, TILES, 4).attend_stored(0, step.query, AttentionArgs(SCALE))
    # The own part's log-sum-exp: treat the rows' first pages as a group.
    as_group = [GroupPages(np.array([row]), pages[:1], 0) for row, pages in enumerate(own_pages)]
    assert int(own_lens.max()) <= 16
    lse = torch.stack([own_lse(step, row, pages.pages, int(own_lens[row])) for row, pages in enumerate(as_group)])
    merged, _ = merge_parts(own, lse, *prefix)
    torch.testing.assert_close(merged, whole, rtol=0, atol=1e-5)


def own_lse(step: Step, row: int, pages: np.ndarray[Any, np.dtype[np.int64]], length: int) -> Tensor:
    keys = step.pool.keys[0][int(pages[0]), :length].repeat_interleave(2, 1)  # [n, N, D]
    return (torch.einsum("nd,snd->ns", step.query[row], keys) * SCALE).logsumexp(1)


def test_padded_item_lists_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items without tokens and merges without a token, as padding of lists of fixed length."""
    b = StepBuilder(Shape(2, 1))
    long_row(b)
    b.chunk(40)
    rows = [b.decode(3, own_start=32) for _ in range(2)]
    b.group(rows, 0, 2)
    step = b.build()
    expected = attend(step, SPLITTING)
    plan = module.plan_step
    monkeypatch.setattr(module, "plan_step", lambda batch, shape: padded(plan(batch, shape)))
    torch.testing.assert_close(attend(step, SPLITTING), expected, rtol=0, atol=0)


def padded(work: WorkList) -> WorkList:
    """Add two empty items per launch and one merge without a token."""
    packed, slices = [], []
    sections = [*work.items, work.rows, work.positions, work.pages, work.parts, *work.merges]
    for number, section in enumerate(sections):
        values = work.packed[section]
        filler = [0] * (2 * FIELDS) if number < 3 else [-1] if number == 7 else [0] if number > 7 else []
        values = np.concatenate([values, np.array(filler, np.int32)])
        start = sum(len(p) for p in packed)
        slices.append(slice(start, start + len(values)))
        packed.append(np.concatenate([values, np.zeros(-len(values) % 4, np.int32)]))
    return WorkList(
        np.concatenate(packed),
        (slices[0], slices[1], slices[2]),
        *slices[3:7],
        (slices[7], slices[8], slices[9]),
        work.num_parts,
        work.keys_read,
        work.padded_rows,
    )


def test_all_layers_share_one_list_and_one_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    plan = module.plan_step
    monkeypatch.setattr(module, "plan_step", lambda batch, shape: made.append(shape.window) or plan(batch, shape))
    step = small_step(Shape(4, 2))
    attention = attention_of(step)
    for window in (None, 5, None, 5):
        attention.attend_stored(0, step.query, AttentionArgs(SCALE, window=window))
    assert made == [None, 5]


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), max_size=3),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), max_size=5),
    st.sampled_from([None, 1, 7, 30]),
    st.sampled_from([4, 16]),
    st.sampled_from([TILES, SPLITTING]),
    st.integers(0, 1 << 20),
)
def test_any_step(
    chunks: list[tuple[int, int]],
    rows: list[tuple[int, int]],
    window: int | None,
    page_size: int,
    tuning: Any,
    seed: int,
) -> None:
    """Chunks, and rows in zero, one or two nested groups."""
    b = StepBuilder(Shape(2, 1, 8, 8, page_size), seed=seed)
    for q_len, past in chunks:
        b.chunk(q_len, past=past)
    members: list[list[int]] = [[], [], []]
    for own_len, depth in rows:
        members[depth].append(b.decode(own_len, own_start=depth * 2 * page_size))
    if members[1] + members[2]:
        b.group(members[2] + members[1], 0, 2)
    if members[2]:
        b.group(members[2], 2 * page_size, 2)
    check(b.build(), tuning, window=window)
