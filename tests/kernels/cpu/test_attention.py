"""Compiled attention against the float64 reference and PyTorch's attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.attention import work_items as chunk_prefixes
from batchgen.kernels.cpu import attention, attention_list
from batchgen.kernels.cpu.attention import CompiledAttention
from batchgen.kernels.cpu.library import loaded
from batchgen.kernels.types import AttentionArgs, AttentionBatch, KVPool
from tests.kernels.oracle import attend_by_token, visible_slots
from tests.kernels.steps import (
    Shape,
    Step,
    StepBuilder,
    any_step,
    check_layers_of_different_shapes,
    group_of_one,
    group_of_some,
    one_row,
    one_token,
    only_rows,
)

pytestmark = pytest.mark.skipif(not loaded(), reason="no C++ compiler here")

OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"window": 40},
    {"window": 1000},
    {"softcap": 3.0},
    {"sinks": True},
    {"window": 21, "softcap": 2.0, "sinks": True},
]


def with_sinks(options: dict[str, Any], heads: int) -> dict[str, Any]:
    return {**options, "sinks": torch.linspace(-3, 3, heads)} if options.get("sinks") else options


def scale_of(step: Step) -> float:
    return float(step.key.shape[2] ** -0.5)


def attend(step: Step, threads: int = 2, *, deterministic: bool = False, **options: Any) -> Tensor:
    made = CompiledAttention(step.pool, step.batch, threads, deterministic=deterministic)
    return made.attend(0, step.query, step.key, step.value, AttentionArgs(scale_of(step), **options))


def check(step: Step, tolerance: float = 1e-5, threads: int = 2, **options: Any) -> None:
    """Compare both kinds of lists with the reference."""
    keys, values = step.filled()
    expected = attend_by_token(step.batch, step.query, keys, values, AttentionArgs(scale_of(step), **options))
    for deterministic in (False, True):
        got = attend(step, threads, deterministic=deterministic, **options)
        assert got.dtype == step.query.dtype
        assert got.shape == expected.shape
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)


def mixed(shape: Shape, seed: int = 0) -> Step:
    """Chunks with and without a past, short ones over one prefix, decode rows alone, in one group and in two."""
    size = shape.page_size
    b = StepBuilder(shape, seed=seed, num_pages=3000 // size + 200)
    b.chunk(63)
    b.chunk(1, past=100)
    prefix = b.chunk(320)[: 288 // size]
    for q_len in (7, 2, 9, 3):
        b.chunk(q_len, past=len(prefix) * size + 5, prefix=prefix)
    for n in (1, 63, 100, 17):
        b.decode(n)
    low = [b.decode(n, own_start=4 * size) for n in (1, 5, 40)]
    high = [b.decode(n, own_start=2 * size) for n in (3, size)]
    b.group([low[2], high[0], low[0], low[1], high[1]], 0, 2)
    b.group(low, 2 * size, 2)
    return b.build()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) + str(o.get("window", "")) or "plain")
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 1), (12, 2)])
def test_mixed_step_equals_the_reference(heads: int, kv_heads: int, options: dict[str, Any]) -> None:
    check(mixed(Shape(heads, kv_heads, 32, 32)), **with_sinks(options, heads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(64, 64), (16, 48), (48, 16), (24, 16), (8, 40), (33, 7), (160, 96)]
)
def test_head_sizes(key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    step = mixed(Shape(6, 2, key_dim, value_dim, dtype=dtype))
    check(step, tolerance)
    check(step, tolerance, **with_sinks(OPTIONS[-1], 6))


@pytest.mark.parametrize("page_size", [1, 8, 32, 64])
@pytest.mark.parametrize("window", [None, 3, 33])
def test_page_sizes(page_size: int, window: int | None) -> None:
    check(mixed(Shape(4, 2, page_size=page_size)), window=window)


def only_chunk(b: StepBuilder) -> None:
    b.chunk(100, past=63)


def many_lengths(b: StepBuilder) -> None:
    for i in range(70):
        b.decode(1 + i * i % 97)


def two_thousand(b: StepBuilder) -> None:
    b.chunk(100, past=1700)


def long_row(b: StepBuilder) -> None:
    b.decode(9000)


@pytest.mark.parametrize(
    "fill",
    [only_chunk, one_token, only_rows, one_row, group_of_one, group_of_some, many_lengths, two_thousand, long_row],
)
@pytest.mark.parametrize("window", [None, 10, 50])
@pytest.mark.parametrize("threads", [1, 5])
def test_steps_of_one_kind(fill: Callable[[StepBuilder], None], window: int | None, threads: int) -> None:
    b = StepBuilder(Shape(4, 2))
    fill(b)
    check(b.build(), threads=threads, window=window)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 60), st.integers(0, 3)), max_size=5),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2)), max_size=6),
    st.sampled_from([(4, 2), (3, 1), (5, 5), (14, 2)]),
    st.sampled_from([(16, 16), (32, 48), (20, 9)]),
    st.sampled_from([None, 1, 7, 30]),
    st.sampled_from([1, 5, 16]),
    st.integers(0, 1 << 20),
)
def test_any_step_equals_the_reference(
    chunks: list[tuple[int, int, int]],
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    window: int | None,
    page_size: int,
    seed: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_prefixes, "LEAST_KEYS", 2 * page_size)
        patch.setattr(attention_list, "_ROWS", 24)
        patch.setattr(attention_list, "_LEAST_KEYS", 16)
        patch.setattr(attention_list, "_STEP", 8)
        patch.setattr(attention, "_block", lambda _: 48)
        check(any_step(chunks, rows, Shape(*heads, *dims, page_size), seed), threads=3, window=window)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 60), st.integers(0, 3)), max_size=5),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2)), min_size=1, max_size=6),
    st.sampled_from([(4, 2), (3, 1), (14, 2)]),
    st.sampled_from([None, 7, 30]),
    st.sampled_from([1, 12, 16]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 1 << 20),
)
def test_deterministic_attention_gives_a_token_the_same_bits_alone(
    chunks: list[tuple[int, int, int]],
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    window: int | None,
    page_size: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """In a step with chunks over shared pages and rows of nested groups, and in a step without other tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_prefixes, "LEAST_KEYS", page_size)
        patch.setattr(attention, "_block", lambda _: 48)
        step = any_step(chunks, rows, Shape(*heads, 16, 16, page_size, dtype), seed)
        together = attend(step, deterministic=True, window=window)
        for token, (position, slots) in enumerate(visible_slots(step.batch, page_size)):
            pages = slots[::page_size].numpy() // page_size
            one = slice(token, token + 1)
            batch = AttentionBatch(step.batch.slot_mapping[one])
            batch.decode_pages, batch.decode_lens = pages[None], np.array([position + 1])
            batch.decode_own_start, batch.max_decode_len = np.array([0]), position + 1
            alone = Step(step.pool, batch, step.query[one], step.key[one], step.value[one])
            assert torch.equal(attend(alone, deterministic=True, window=window), together[one])


def test_an_empty_step_gives_an_empty_result() -> None:
    step = StepBuilder(Shape(4, 2)).build()
    assert attend(step).shape == (0, 4, 16)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bfloat16_is_as_exact_as_pytorch(options: dict[str, Any]) -> None:
    options = with_sinks(options, 9)
    step = mixed(Shape(9, 3, 64, 64, dtype=torch.bfloat16))
    keys, values = step.filled()
    exact = attend_by_token(step.batch, step.query, keys, values, AttentionArgs(scale_of(step), **options))
    theirs = attend_by_token(
        step.batch, step.query, keys, values, AttentionArgs(scale_of(step), **options), torch.bfloat16
    )
    ours = (attend(step, **options).double() - exact).abs().max()
    assert ours <= (theirs.double() - exact).abs().max() + 1e-4


@pytest.mark.parametrize("options", [{}, {"window": 700}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (128, 128), (320, 288), (576, 512)])
def test_keys_of_several_blocks_in_bfloat16(key_dim: int, value_dim: int, options: dict[str, Any]) -> None:
    """Rows alone, in a group and in a chunk, with several blocks of keys of which the last is not full."""
    b = StepBuilder(Shape(6, 2, key_dim, value_dim, dtype=torch.bfloat16), num_pages=900)
    b.chunk(70, past=1203)
    for n in (1, 257, 1101):
        b.decode(n)
    b.group([b.decode(n, own_start=1120) for n in (3, 40, 16, 9, 1)], 0, 70)
    step = b.build()
    keys, values = step.filled()
    args = AttentionArgs(scale_of(step), **options)
    exact = attend_by_token(step.batch, step.query, keys, values, args)
    theirs = attend_by_token(step.batch, step.query, keys, values, args, torch.bfloat16)
    made = CompiledAttention(step.pool, step.batch, 2, dots=True)
    got = made.attend(0, step.query, step.key, step.value, args)
    ours = (got.double() - exact).abs().max()
    assert ours <= (theirs.double() - exact).abs().max() + 1e-4


def test_results_do_not_depend_on_threads_while_no_run_is_cut() -> None:
    step = mixed(Shape(9, 3, 64, 64))
    first = attend(step, threads=2)
    for threads in (1, 2, 2, 3):
        assert torch.equal(attend(step, threads=threads), first)


def test_queries_of_another_dtype_and_layout() -> None:
    step = mixed(Shape(4, 2, dtype=torch.bfloat16))
    expected = attend(step)
    step.query = step.query.float().transpose(0, 1).contiguous().transpose(0, 1)
    got = attend(step)
    assert got.dtype == torch.float32
    assert torch.equal(got, expected.float())


def test_nan_does_not_spread_to_other_rows() -> None:
    b = StepBuilder(Shape(4, 2))
    rows = [b.decode(n, own_start=32) for n in (9, 30, 12)]
    b.group(rows, 0, 2)
    step = b.build()
    clean = attend(step)
    for tensor in (step.query, step.key, step.value):
        tensor[1] = torch.nan
    got = attend(step)
    assert got[1].isnan().all()
    torch.testing.assert_close(got[[0, 2]], clean[[0, 2]], rtol=0, atol=0)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    step = mixed(Shape(4, 2))
    step.query *= 200
    check(step, tolerance=2e-3)


def test_layers_of_different_shapes() -> None:
    def make(pool: KVPool, batch: AttentionBatch) -> CompiledAttention:
        return CompiledAttention(pool, batch, 2)

    check_layers_of_different_shapes(make)
