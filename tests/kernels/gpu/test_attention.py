"""The attention kernels in Triton's interpreter, against the reference and each token alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.attention import work_items
from batchgen.kernels.chips import known_chips, tuning_of
from batchgen.kernels.gpu.work_list import GROUPS as SHARED
from batchgen.kernels.gpu.work_list import LARGE, SMALL
from batchgen.kernels.types import AttentionArgs
from tests.cases import examples
from tests.kernels.gpu.attention_cases import (
    GROUPS,
    KERNELS,
    LATENTS,
    SCALE,
    SPLITTING,
    TILES,
    Tiles,
    attend,
    attention_of,
    built,
    check,
    mixed,
    small_step,
    tree,
    with_sinks,
)
from tests.kernels.oracle import attend_by_token
from tests.kernels.steps import Shape as StepShape
from tests.kernels.steps import Step, StepBuilder, any_step, check_layers_of_different_shapes

KERNEL = pytest.mark.parametrize("kernel", KERNELS)


@KERNEL
@pytest.mark.parametrize("group", GROUPS)
def test_steps_equal_the_reference(group: str, kernel: str) -> None:
    for case in GROUPS[group][:: 1 if kernel == "triton" else 2]:  # both kernels have the same page and mask arithmetic
        step = built(case.fill, **case.shape)
        check(KERNELS[kernel](step, Tiles(case.keys)), step, **with_sinks(case.options, step.query.shape[1]))


def test_latents_equal_the_reference() -> None:
    for case in LATENTS:
        step = built(case.fill, **case.shape)
        for tuning in (TILES, SPLITTING) if case.options else (TILES,):
            check(attention_of(step, tuning), step, **with_sinks(case.options, step.query.shape[1]))


@KERNEL
@pytest.mark.parametrize(
    ("chip", "dtype"),
    [*zip(("default", *known_chips()), itertools.cycle((torch.float16, torch.float32)), strict=False)],
)
def test_the_tiles_of_each_chip(chip: str, dtype: torch.dtype, kernel: str) -> None:
    def fill(b: StepBuilder) -> None:
        b.chunk(40, past=40)
        b.group([b.decode(n, own_start=80) for n in (1, 9, 20, 3)], 0, 5)

    step = built(fill, heads=6, dtype=dtype)
    check(KERNELS[kernel](step, tuning_of(chip)), step, window=90)


FILLS: dict[str, Callable[[StepBuilder], object]] = {
    "row": lambda b: b.decode(150),
    "chunk": lambda b: b.chunk(20, past=130),
    "group": lambda b: b.group([b.decode(n, own_start=128) for n in (1, 50)], 0, 8),
    "mixed": mixed,
}


@pytest.mark.parametrize("kind", FILLS)
@pytest.mark.parametrize("options", [{}, {"window": 70, "softcap": 2.0, "sinks": True}], ids=str)
def test_long_runs_are_split_and_merged(kind: str, options: dict[str, Any]) -> None:
    step = built(FILLS[kind])
    check(attention_of(step, SPLITTING), step, **with_sinks(options, 2))
    work = attention_of(step, SPLITTING).work(0, 2, options.get("window"))
    assert work.num_parts > 1
    assert work.num_merges > 0
    assert sum(work.count(launch) for launch in (LARGE, SHARED, SMALL)) > 3


@pytest.mark.parametrize("options", [{}, {"window": 40, "sinks": True}], ids=str)
@pytest.mark.parametrize("tuning", [TILES, SPLITTING], ids=["whole", "split"])
def test_short_chunks_share_their_common_pages(
    monkeypatch: pytest.MonkeyPatch, tuning: Any, options: dict[str, Any]
) -> None:
    """With decode rows in a group and without: one step folds parts, merges parts and writes results directly."""
    monkeypatch.setattr(work_items, "LEAST_KEYS", 32)

    def fill(b: StepBuilder) -> None:
        prefix = b.pages(32)
        for q_len in (3, 1, 5, 9, 2):
            b.chunk(q_len, past=35, prefix=prefix)
        b.decode(20)
        b.group([b.decode(3, own_start=16)], 0, 1)

    step = built(fill)
    check(attention_of(step, tuning), step, **with_sinks(options, 2))
    work = attention_of(step, tuning).work(0, 2, options.get("window"))
    chunks = 3 + 5 + 9 + 2  # a chunk of one token folds its part itself
    assert work.num_merges == chunks if tuning is TILES else work.num_merges > chunks


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_queries_of_another_dtype_than_the_pool(dtype: torch.dtype) -> None:
    step = built(small_step, heads=4, kv_heads=2, dtype=dtype)
    expected = attend(attention_of(step), step)
    step.query = step.query.float()
    got = attend(attention_of(step), step)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.to(dtype), expected, rtol=0, atol=0)


@KERNEL
def test_an_empty_step_gives_an_empty_result(kernel: str) -> None:
    step = built(lambda b: None, heads=4)
    assert attend(KERNELS[kernel](step), step).shape == (0, 4, 16)


def test_keys_and_values_are_stored_where_the_slots_say_and_attended_to() -> None:
    step = built(small_step, heads=4, kv_heads=2)
    keys, values = step.filled()
    expected = attend(attention_of(step), step)
    assert torch.equal(attend(attention_of(step), step, stored=True), expected)
    torch.testing.assert_close(step.pool.keys[0], keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(step.pool.values[0], values, rtol=0, atol=0, equal_nan=True)
    cached = attention_of(step).cache(0)
    assert [x.data_ptr() for x in cached] == [
        x.data_ptr() for x in (step.pool.keys[0], step.pool.values[0], step.batch.slot_mapping)
    ]


# The interpreter's maximum is numpy's, which warns about rows without a number; a GPU's does not.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("poisoned", [0, 1, 2])
def test_not_a_numbers_of_other_rows_do_not_spread(poisoned: int) -> None:
    step = built(lambda b: b.group([b.decode(n, own_start=32) for n in (9, 30, 12)], 0, 2))
    clean = attend(attention_of(step, SPLITTING), step)
    for tensor in (step.query, step.key, step.value):
        tensor[poisoned] = torch.nan
    got = attend(attention_of(step, SPLITTING), step)
    assert bool(got[poisoned].isnan().all())
    others = [i for i in range(3) if i != poisoned]
    torch.testing.assert_close(got[others], clean[others], rtol=0, atol=1e-6)


def test_sinks_count_once_with_several_parts() -> None:
    """With values of 1, the output is the softmax weight of all positions, without the sink's."""

    def fill(b: StepBuilder) -> None:
        rows = [b.decode(3, own_start=64) for _ in range(2)]
        b.group(rows, 0, 2)
        b.group(rows, 32, 2)

    step = built(fill)
    step.pool.values[0].fill_(1.0)
    step.value.fill_(1.0)
    step.query.zero_()  # every score is 0: 67 positions and a sink of exp(s)
    expected = 67 / (67 + torch.tensor([0.0, 3.0]).exp())
    for tuning in (TILES, SPLITTING):
        got = attend(attention_of(step, tuning), step, sinks=torch.tensor([0.0, 3.0]))
        torch.testing.assert_close(got, expected[None, :, None].expand_as(got), rtol=1e-5, atol=0)


@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_sinks_far_from_the_scores(sink: float) -> None:
    step = built(small_step)
    check(attention_of(step), step, sinks=torch.full((2,), sink))


def test_scores_far_apart() -> None:
    step = built(small_step)
    step.query *= 1000
    exact = attend_by_token(step.batch, step.query, *step.filled(), AttentionArgs(SCALE))
    torch.testing.assert_close(attend(attention_of(step), step).double(), exact, rtol=1e-3, atol=1e-3)


@KERNEL
def test_layers_of_different_shapes_share_one_step(kernel: str) -> None:
    def make(pool: Any, batch: Any) -> Any:
        nothing = torch.empty(0)
        return KERNELS[kernel](Step(pool, batch, nothing, nothing, nothing), TILES)

    check_layers_of_different_shapes(make)


def test_queries_may_be_strided_views() -> None:
    """A fused projection returns slices of one tensor, transformers returns transposed ones."""
    step = built(small_step, heads=4, kv_heads=2)
    expected = attend(attention_of(step), step)
    fused = torch.cat([step.query, step.key, step.value], 1)
    step.query, step.key, step.value = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    assert torch.equal(attend(attention_of(step), step), expected)
    step.query = step.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(attend(attention_of(step), step), expected)


def group_reference(step: Step, row: int, window: int | None, softcap: float | None) -> tuple[Tensor, Tensor]:
    """A decode row over its groups' pages only, in float64: [N, Dv] and the log-sum-exp [N]."""
    batch, size, heads = step.batch, step.pool.page_size, step.query.shape[1]
    assert batch.decode_own_start is not None
    assert batch.decode_lens is not None
    position = int(batch.decode_own_start[row] + batch.decode_lens[row] - 1)
    slots = [
        int(group.pages[i // size]) * size + i % size
        for group in batch.groups
        if row in group.rows.tolist()
        for i in range(len(group.pages) * size)
        if window is None or group.start + i > position - window
    ]
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
    def fill(b: StepBuilder) -> None:
        b.chunk(20)
        b.decode(9)
        tree(b)

    step = built(fill)
    parts = attention_of(step, tuning).prefix_parts(0, step.query, AttentionArgs(SCALE, window=window, softcap=softcap))
    assert [x.shape for x in parts] == [(10, 2, 16), (10, 2)]
    assert [x.dtype for x in parts] == [torch.float32, torch.float32]
    for row in range(10):
        for part, exact in zip(parts, group_reference(step, row, window, softcap), strict=True):
            torch.testing.assert_close(part[row].double(), exact, rtol=1e-5, atol=1e-5)


@examples(10)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40), st.integers(0, 3)), max_size=3),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), max_size=5),
    st.sampled_from([None, 1, 7, 30]),
    st.sampled_from([4, 16]),
    st.sampled_from([TILES, SPLITTING]),
    st.integers(0, 1 << 20),
)
def test_any_step(
    chunks: list[tuple[int, int, int]],
    rows: list[tuple[int, int]],
    window: int | None,
    page_size: int,
    tuning: Any,
    seed: int,
) -> None:
    """Chunks with and without a common prefix, and rows in zero, one or two nested groups."""
    step = any_step(chunks, rows, StepShape(2, 1, 8, 8, page_size), seed)
    check(attention_of(step, tuning), step, window=window)
