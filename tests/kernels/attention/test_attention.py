from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.attention.torch_attention import TorchAttention
from batchgen.kernels.types import AttentionArgs
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


def attend(step: Step, **options: Any) -> Tensor:
    return TorchAttention(step.pool, step.batch).attend(
        0, step.query, step.key, step.value, AttentionArgs(SCALE, **options)
    )


def check(step: Step, tolerance: float = 1e-5, **options: Any) -> None:
    keys, values = step.filled()
    expected = attend_by_token(step.batch, step.query, keys, values, AttentionArgs(SCALE, **options))
    got = attend(step, **options)
    assert got.dtype == step.query.dtype
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)


def mixed(shape: Shape, seed: int = 0) -> Step:
    """Chunks with and without a past, chunks over one prefix, decode rows without a group, in one and in two."""
    b = StepBuilder(shape, seed=seed)
    b.chunk(63)
    b.chunk(1, past=100)
    prefix = b.chunk(100)[: 96 // shape.page_size]
    for q_len in (7, 20, 33):
        b.chunk(q_len, past=len(prefix) * shape.page_size + 5, prefix=prefix)
    size = shape.page_size
    lone = [b.decode(n) for n in (1, 63, 100, 17)]
    low = [b.decode(n, own_start=4 * size) for n in (1, 5, 40)]
    high = [b.decode(n, own_start=2 * size) for n in (3, size)]
    b.group([low[2], high[0], low[0], low[1], high[1]], 0, 2)
    b.group(low, 2 * size, 2)
    assert lone
    return b.build()


HEADS = [(9, 3), (4, 4), (8, 1), (6, 2)]
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
    if not options.get("sinks"):
        return options
    return {**options, "sinks": torch.linspace(-3, 3, heads)}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) + str(o.get("window", "")) or "plain")
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_a_mixed_step_equals_the_reference(heads: int, kv_heads: int, options: dict[str, Any]) -> None:
    check(mixed(Shape(heads, kv_heads)), **with_sinks(options, heads))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(24, 16), (8, 40)])
@pytest.mark.parametrize("options", OPTIONS[:3] + OPTIONS[-1:], ids=str)
def test_values_of_another_size(key_dim: int, value_dim: int, options: dict[str, Any]) -> None:
    check(mixed(Shape(6, 2, key_dim, value_dim)), **with_sinks(options, 6))


@pytest.mark.parametrize("page_size", [1, 8, 32])
@pytest.mark.parametrize("window", [None, 3, 33])
def test_page_sizes(page_size: int, window: int | None) -> None:
    check(mixed(Shape(4, 2, page_size=page_size)), window=window)


def only_chunk(b: StepBuilder) -> None:
    b.chunk(100, past=63)


def many_lengths(b: StepBuilder) -> None:
    for i in range(70):
        b.decode(1 + i * i % 97)


def two_thousand(b: StepBuilder) -> None:
    b.chunk(300, past=1700)


@pytest.mark.parametrize(
    "fill", [only_chunk, one_token, only_rows, one_row, group_of_one, group_of_some, many_lengths, two_thousand]
)
@pytest.mark.parametrize("window", [None, 10, 50])
def test_steps_of_one_kind(fill: Callable[[StepBuilder], None], window: int | None) -> None:
    b = StepBuilder(Shape(4, 2))
    fill(b)
    check(b.build(), window=window)


def test_an_empty_step_gives_an_empty_result() -> None:
    step = StepBuilder(Shape(4, 2)).build()
    assert attend(step).shape == (0, 4, 16)


def test_keys_and_values_are_stored_where_the_slots_say() -> None:
    step = mixed(Shape(4, 2))
    keys, values = step.filled()
    attend(step)
    torch.testing.assert_close(step.pool.keys[0], keys, equal_nan=True)
    torch.testing.assert_close(step.pool.values[0], values, equal_nan=True)


def test_already_stored_positions_are_written_to_scratch() -> None:
    """A last prompt token recomputed for its logits writes to page 0 and reads the stored keys of its pages."""
    b = StepBuilder(Shape(4, 2))
    pages = b.chunk(1, past=20)
    b._fill(pages, 21)
    step = b.build()
    before = step.pool.keys[0][pages].clone()
    step.batch.slot_mapping[:] = 3
    check(step)
    torch.testing.assert_close(step.pool.keys[0][pages], before, equal_nan=True)


def test_not_a_numbers_of_other_rows_do_not_spread() -> None:
    b = StepBuilder(Shape(4, 2))
    rows = [b.decode(n, own_start=32) for n in (9, 30, 12)]
    b.group(rows, 0, 2)
    step = b.build()
    clean = attend(step)
    for tensor in (step.query, step.key, step.value):
        tensor[1] = torch.nan
    got = attend(step)
    assert got[1].isnan().all()
    torch.testing.assert_close(got[[0, 2]], clean[[0, 2]], rtol=0, atol=1e-6)


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
    got = attend(step, sinks=torch.tensor([0.0, 3.0]))
    expected = 67 / (67 + torch.tensor([0.0, 3.0]).exp())
    torch.testing.assert_close(got, expected[None, :, None].expand_as(got), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_low_precision_is_as_accurate_as_eager(dtype: torch.dtype, options: dict[str, Any]) -> None:
    options = with_sinks(options, 9)
    step = mixed(Shape(9, 3, dtype=dtype))
    keys, values = step.filled()
    exact = attend_by_token(step.batch, step.query, keys, values, AttentionArgs(SCALE, **options))
    plain = attend_by_token(step.batch, step.query, keys, values, AttentionArgs(SCALE, **options), dtype)
    ours = (attend(step, **options).double() - exact).abs().max()
    theirs = (plain.double() - exact).abs().max()
    assert ours <= 2 * theirs + 1e-4


def test_layers_of_different_shapes_share_one_step() -> None:
    check_layers_of_different_shapes(TorchAttention)


def test_queries_may_be_strided_views() -> None:
    """A fused projection returns slices of one tensor."""
    step = mixed(Shape(4, 2))
    expected = attend(step)
    fused = torch.cat([step.query, step.key, step.value], 1)
    step.query, step.key, step.value = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    torch.testing.assert_close(attend(step), expected, rtol=0, atol=0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60), st.integers(0, 2)), max_size=6),
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 2)), max_size=8),
    st.sampled_from([None, 1, 7, 30]),
    st.sampled_from([4, 16]),
    st.integers(0, 1 << 20),
)
def test_any_step(
    chunks: list[tuple[int, int, int]], rows: list[tuple[int, int]], window: int | None, page_size: int, seed: int
) -> None:
    """Chunks with no prefix or one of two, rows in zero, one or two nested groups."""
    b = StepBuilder(Shape(4, 2, 8, 8, page_size), seed=seed)
    prefixes = [[], b.pages(2 * page_size), b.pages(3 * page_size)]
    for prefix in prefixes:
        b._fill(prefix, len(prefix) * page_size)
    for q_len, past, prefix in chunks:
        pages = prefixes[prefix]
        b.chunk(q_len, past=past + len(pages) * page_size, prefix=pages)
    members: list[list[int]] = [[], [], []]
    for own_len, depth in rows:
        members[depth].append(b.decode(own_len, own_start=depth * 2 * page_size))
    if members[1] + members[2]:
        b.group(members[2] + members[1], 0, 2)
    if members[2]:
        b.group(members[2], 2 * page_size, 2)
    check(b.build(), window=window)
