"""Attention on a CPU against the oracle: PyTorch's and both compiled ones, on steps of every kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.attention import torch_attention, work_items
from batchgen.kernels.attention.torch_attention import TorchAttention, product_heights
from batchgen.kernels.cpu import attention, attention_list
from batchgen.kernels.cpu.attention import CompiledAttention
from batchgen.kernels.cpu.library import loaded
from batchgen.kernels.types import AttentionArgs, AttentionBatch, KVPool, LayerKV, PagedAttention
from tests.cases import examples
from tests.kernels.oracle import attend_by_token, visible_slots
from tests.kernels.steps import (
    Shape,
    Step,
    StepBuilder,
    any_step,
    check_layers_of_different_shapes,
    free_behind,
    group_of_one,
    group_of_some,
    one_row,
    one_token,
    only_rows,
)

BF16 = torch.bfloat16
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"window": 40},
    {"window": 1000},
    {"softcap": 3.0},
    {"sinks": True},
    {"window": 21, "softcap": 2.0, "sinks": True},
]
Make = Callable[..., PagedAttention]
INVARIANT: dict[str, Make] = {"torch": TorchAttention}
"""Attentions whose result for a token has the same bits in every step."""
if loaded():
    INVARIANT["compiled-deterministic"] = partial(CompiledAttention, threads=2, deterministic=True)
MAKE = dict(INVARIANT)
if loaded():
    MAKE["compiled"] = partial(CompiledAttention, threads=2)
both = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def args_of(step: Step, **options: Any) -> AttentionArgs:
    sinks = {"sinks": torch.linspace(-3, 3, step.query.shape[1])} if options.get("sinks") is True else {}
    return AttentionArgs(step.query.shape[2] ** -0.5, **{**options, **sinks})


def attend(make: Make, step: Step, args: AttentionArgs | None = None) -> Tensor:
    made = make(step.pool, step.batch)
    return made.attend(0, step.query, step.key, step.value, args or args_of(step))


def check(step: Step, options: dict[str, Any] | None = None, tolerance: float = 1e-5, more: Any = ()) -> None:
    """Compare every attention, and `more`, with the oracle."""
    args = args_of(step, **(options or {}))
    expected = attend_by_token(step.batch, step.query, *step.filled(), args)
    for make in (*MAKE.values(), *more):
        got = attend(make, step, args)
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


@pytest.mark.parametrize(
    ("heads", "kv_heads", "options"),
    [*((9, 3, options) for options in OPTIONS), (4, 4, {}), (20, 1, {"window": 40})],
    ids=str,
)
def test_a_mixed_step(heads: int, kv_heads: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of any size, too, with the same bits."""
    step = mixed(Shape(heads, kv_heads, 32, 24))
    check(step, options)
    args = args_of(step, **options)
    whole = attend(TorchAttention, step, args)
    for tile in (1, 50, 512) if options == OPTIONS[-1] else (50,):
        assert torch.equal(attend_in_tiles(step, tile, args), whole)
    monkeypatch.setattr(torch_attention, "_GATHERED_BYTES", 1)  # items one at a time
    assert torch.equal(attend(TorchAttention, step, args), whole)


def attend_in_tiles(step: Step, tile: int, args: AttentionArgs) -> Tensor:
    """PyTorch's attention of `tile` tokens at a time, the last ones padded with not-a-numbers."""
    attention, tokens, parts = TorchAttention(step.pool, step.batch), len(step.query), []
    for start in range(0, tokens, tile):
        end = min(tokens, start + tile)
        given = [x[start:end] for x in (step.query, step.key, step.value)]
        padded = [torch.cat((x, x.new_full((tile - len(x), *x.shape[1:]), torch.nan))) for x in given]
        parts.append(attention.tile(start, end, tile).attend(0, *padded, args)[: end - start])
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("heads", "dims", "dtype"),
    [
        *((6, dims, torch.float32) for dims in ((64, 64), (48, 16), (33, 7), (160, 96))),
        *((6, dims, BF16) for dims in ((16, 48), (8, 40), (33, 7), (160, 96))),
        *((heads, (24, 16, "latent"), torch.float32) for heads in (4, 70)),
        *((heads, dims, BF16) for heads, dims in ((5, (40, 24, "latent")), (128, (96, 64, "latent")))),
        *((16, (576, 512, "latent"), dtype) for dtype in (torch.float32, BF16)),
    ],
    ids=str,
)
def test_head_sizes(heads: int, dims: tuple[Any, ...], dtype: torch.dtype) -> None:
    """Also of latents: one key head, whose values are the first numbers of its keys."""
    latent = "latent" in dims
    step = mixed(Shape(heads, 1 if latent else 2, *dims[:2], dtype=dtype, latent=latent))
    dots = [partial(CompiledAttention, threads=2, dots=True)] if latent and dtype == BF16 and loaded() else []
    for options in (OPTIONS[0], OPTIONS[-1]) if heads * dims[0] < 1000 else (OPTIONS[-1],):
        check(step, options, 1e-5 if dtype == torch.float32 else 0.03 if latent else 0.02, dots)


@pytest.mark.parametrize(("page_size", "window"), [(1, None), (1, 33), (8, 3), (32, 33), (64, None), (64, 3)])
def test_page_sizes(page_size: int, window: int | None) -> None:
    check(mixed(Shape(4, 2, page_size=page_size)), {"window": window})


def only_chunk(b: StepBuilder) -> None:
    b.chunk(100, past=63)


def many_lengths(b: StepBuilder) -> None:
    for i in range(70):
        b.decode(1 + i * i % 97)


def two_thousand(b: StepBuilder) -> None:
    b.chunk(100, past=1700)


def long_row(b: StepBuilder) -> None:
    b.decode(9000)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    "fill",
    [only_chunk, one_token, only_rows, one_row, group_of_one, group_of_some, many_lengths, two_thousand, long_row],
)
def test_steps_of_one_kind(fill: Callable[[StepBuilder], None], window: int | None) -> None:
    b = StepBuilder(Shape(4, 2))
    fill(b)
    more = [partial(CompiledAttention, threads=n, deterministic=d) for n in (1, 5) for d in (False, True)]
    check(b.build(), {"window": window}, more=more if loaded() else ())


CHUNKS = st.lists(st.tuples(st.integers(1, 70), st.integers(0, 60), st.integers(0, 3)), max_size=5)
ROWS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2)), max_size=6)


@examples(40)
@given(
    CHUNKS,
    ROWS,
    st.sampled_from([(4, 2), (3, 1), (5, 5), (14, 2)]),
    st.sampled_from([(16, 16), (32, 48), (20, 9)]),
    st.sampled_from([None, 1, 7, 30]),
    st.sampled_from([1, 5, 16]),
    st.integers(0, 1 << 20),
)
def test_any_step(
    chunks: list[tuple[int, int, int]],
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    window: int | None,
    page_size: int,
    seed: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work_items, "LEAST_KEYS", 2 * page_size)
        for name, value in {"_ROWS": 24, "_LEAST_KEYS": 16, "_STEP": 8}.items():
            patch.setattr(attention_list, name, value)
        patch.setattr(attention, "_block", lambda _: 48)
        patch.setattr(torch_attention, "_GATHERED_BYTES", 1 << 16)
        more = [partial(CompiledAttention, threads=3, deterministic=d) for d in (False, True)]
        step = any_step(chunks, rows, Shape(*heads, *dims, page_size), seed)
        check(step, {"window": window}, more=more if loaded() else ())


def check_alone(make: Make, step: Step, args: AttentionArgs, page_size: int, every: int = 1) -> None:
    """Each token has the same bits in a step and a pool without other tokens, whose pages have another size."""
    together = attend(make, step, args)
    for token, (position, slots) in list(enumerate(visible_slots(step.batch, step.pool.page_size)))[::every]:
        one, pages = slice(token, token + 1), np.arange(1, position // page_size + 2)
        shapes = [LayerKV(*step.key.shape[1:], step.value.shape[2], bool(step.pool.latent))]
        pool = KVPool.allocate(shapes, len(pages) + 1, page_size, step.key.dtype, torch.device("cpu"))
        for cache, old in ((pool.keys[0], step.pool.keys[0]), (pool.values[0], step.pool.values[0])):
            cache.fill_(torch.nan).flatten(0, 1)[page_size : page_size + position + 1] = old.flatten(0, 1)[slots]
        batch = AttentionBatch(torch.tensor([page_size + position]))
        batch.decode_pages, batch.decode_lens = pages[None], np.array([position + 1])
        batch.decode_own_start, batch.max_decode_len = np.array([0]), position + 1
        alone = Step(pool, batch, step.query[one], step.key[one], step.value[one])
        assert torch.equal(attend(make, alone, args), together[one])


@pytest.mark.parametrize("make", INVARIANT.values(), ids=INVARIANT)
@examples(40)
@given(
    CHUNKS,
    ROWS,
    st.sampled_from([(4, 2, 16), (3, 1, 40), (14, 2, 64)]),
    st.sampled_from([{}, {"window": 7}, {"window": 30}, *OPTIONS[4:]]),
    st.sampled_from([(1, 16), (12, 40), (16, 16), (16, 1)]),
    st.sampled_from([torch.float32, BF16]),
    st.integers(0, 1 << 20),
)
def test_a_token_has_the_same_bits_alone(
    make: Make,
    chunks: list[tuple[int, int, int]],
    rows: list[tuple[int, int]],
    heads: tuple[int, int, int],
    options: dict[str, Any],
    page_sizes: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
) -> None:
    """As in a step with chunks over shared pages and rows of nested groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work_items, "LEAST_KEYS", page_sizes[0])
        patch.setattr(attention, "_block", lambda _: 48)
        step = any_step(chunks, rows, Shape(*heads, heads[2], page_sizes[0], dtype), seed)
        check_alone(make, step, args_of(step, **options), page_sizes[1])


@pytest.mark.parametrize("options", [OPTIONS[0], {"window": 300}, OPTIONS[-1]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("make", INVARIANT.values(), ids=INVARIANT)
def test_a_token_of_several_blocks_has_the_same_bits_alone(
    make: Make, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    for shape in (Shape(9, 3, 64, 64, dtype=dtype), Shape(6, 1, 96, 64, dtype=dtype, latent=True)):
        check_blocks_alone(make, shape, options)


def check_blocks_alone(make: Make, shape: Shape, options: dict[str, Any]) -> None:
    b = StepBuilder(shape)
    b.chunk(97, past=603)
    low, high = ([b.decode(n, own_start=start) for n in (700 - start, 30, 1)] for start in (448, 320))
    b.group([*low, *high], 0, 20)
    b.group(low, 320, 8)
    step = b.build()
    check_alone(make, step, args_of(step, **options), 40, every=8)
    check_alone(make, step, args_of(step, **options), 1, every=51)


@pytest.mark.parametrize(("group", "low", "high"), [(1, 16, 64), (3, 16, 64), (17, 32, 64), (70, 80, 80)])
def test_heights_of_products_hold_the_heads_that_share_a_key_head(group: int, low: int, high: int) -> None:
    found = product_heights(group, 64, 32, torch.get_num_threads())
    assert found.low == low
    assert found.high in (low, high)


@both
def test_an_empty_step_gives_an_empty_result(make: Make) -> None:
    assert attend(make, StepBuilder(Shape(4, 2)).build()).shape == (0, 4, 16)


@both
def test_layers_of_different_shapes(make: Make) -> None:
    check_layers_of_different_shapes(make)


@both
def test_keys_and_values_are_stored_where_the_slots_say(make: Make) -> None:
    step = mixed(Shape(4, 2))
    filled = step.filled()
    attend(make, step)
    for stored, expected in zip((step.pool.keys[0], step.pool.values[0]), filled, strict=True):
        torch.testing.assert_close(stored, expected, equal_nan=True)


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


@both
def test_not_a_numbers_of_other_rows_do_not_spread(make: Make) -> None:
    b = StepBuilder(Shape(4, 2))
    rows = [b.decode(n, own_start=32) for n in (9, 30, 12)]
    b.group(rows, 0, 2)
    step = b.build()
    clean = attend(make, step)
    for tensor in (step.query, step.key, step.value):
        tensor[1] = torch.nan
    got = attend(make, step)
    assert got[1].isnan().all()
    torch.testing.assert_close(got[[0, 2]], clean[[0, 2]], rtol=0, atol=0)


@both
@pytest.mark.parametrize("window", [1, 5, 40])
def test_freed_pages_behind_the_window_are_not_read(make: Make, window: int) -> None:
    step = mixed(Shape(9, 3))
    args = args_of(step, window=window)
    clean = attend(make, step, args)
    free_behind(step, window)
    assert torch.equal(attend(make, step, args), clean)


@both
def test_sinks_count_once_with_several_parts(make: Make) -> None:
    """With values of 1, the output is the softmax weight of all positions, without the sink's."""
    b = StepBuilder(Shape(2, 1))
    rows = [b.decode(3, own_start=64) for _ in range(2)]
    b.group(rows, 0, 2)
    b.group(rows, 32, 2)
    step = b.build()
    step.pool.values[0].fill_(1.0)
    step.value.fill_(1.0)
    step.query.zero_()  # every score is 0: 67 positions and a sink of exp(s)
    got = attend(make, step, args_of(step, sinks=torch.tensor([0.0, 3.0])))
    expected = 67 / (67 + torch.tensor([0.0, 3.0]).exp())
    torch.testing.assert_close(got, expected[None, :, None].expand_as(got), rtol=1e-5, atol=0)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    step = mixed(Shape(4, 2))
    step.query *= 200
    check(step, tolerance=2e-3)


@both
def test_queries_of_another_dtype_and_layout(make: Make) -> None:
    """A fused projection returns slices of one tensor, and a model may compute in another dtype than the pool's."""
    step = mixed(Shape(4, 2, dtype=BF16))
    expected = attend(make, step)
    fused = torch.cat([step.query, step.key, step.value], 1)
    step.query, step.key, step.value = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    assert torch.equal(attend(make, step), expected)
    step.query = step.query.float().transpose(0, 1).contiguous().transpose(0, 1)
    got = attend(make, step)
    assert got.dtype == torch.float32
    if make is TorchAttention:  # computes in float32, without a rounding
        assert torch.equal(got.to(BF16), expected)
    else:
        assert torch.equal(got, expected.float())


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_low_precision_is_as_exact_as_plain_products(dtype: torch.dtype, options: dict[str, Any]) -> None:
    step = mixed(Shape(9, 3, 64, 64, dtype=dtype))
    args, filled = args_of(step, **options), step.filled()
    exact = attend_by_token(step.batch, step.query, *filled, args)
    plain = attend_by_token(step.batch, step.query, *filled, args, dtype)
    for make in MAKE.values() if dtype == BF16 else (TorchAttention,):
        ours = (attend(make, step, args).double() - exact).abs().max()
        assert ours <= (plain.double() - exact).abs().max() + 1e-4


@pytest.mark.skipif(not loaded(), reason="no C++ compiler here")
@pytest.mark.parametrize(
    ("dims", "capped"),
    [
        ((64, 64), 1.04e-3),
        pytest.param((128, 128), 1.25e-3, marks=pytest.mark.slow),
        pytest.param((320, 288), 1.30e-3, marks=pytest.mark.slow),
        ((576, 512), 1.33e-3),
    ],
    ids=str,
)
def test_keys_of_several_blocks_with_dot_products(dims: tuple[int, int], capped: float) -> None:
    """Rows alone, in a group and in a chunk, with several blocks of keys of which the last is not full.

    The errors allowed, `capped` for small scores, are at most those of bfloat16 products of the prefix and the rest.
    """
    b = StepBuilder(Shape(6, 2, *dims, dtype=BF16), num_pages=900)
    b.chunk(70, past=1203)
    for n in (1, 257, 1101):
        b.decode(n)
    b.group([b.decode(n, own_start=1120) for n in (3, 40, 16, 9, 1)], 0, 70)
    step = b.build()
    for options, allowed in (({}, 0.012), ({"window": 700}, 0.012), ({"softcap": 3.0}, capped)):
        args = args_of(step, **options)
        got = attend(partial(CompiledAttention, threads=2, dots=True), step, args)
        exact = attend_by_token(step.batch, step.query, *step.filled(), args)
        assert (got.double() - exact).abs().max() <= allowed


@pytest.mark.skipif(not loaded(), reason="no C++ compiler here")
def test_results_do_not_depend_on_threads_while_no_run_is_cut() -> None:
    step = mixed(Shape(9, 3, 64, 64))
    first = attend(MAKE["compiled"], step)
    for threads in (1, 2, 2, 3):
        assert torch.equal(attend(partial(CompiledAttention, threads=threads), step), first)
