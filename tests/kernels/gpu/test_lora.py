"""LoRA updates of many adapters in two launches, against one adapter after another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.device import HOST
from batchgen.kernels.gpu import lora as kernels
from batchgen.kernels.lora import LoraPair, LoraPairs, LoraStep, LoraTiles, add_lora, lora_step, tiles_of

CPU = torch.device("cpu")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def draw_pairs(
    ranks: list[int], inputs: int, outputs: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> LoraPairs:
    """A layer's pairs; rank 0 for an adapter that does not change the layer."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.3).to(dtype)

    return LoraPairs([LoraPair(draw(r, inputs), draw(outputs, r)) if r else None for r in ranks])


def draw_step(adapters: list[int] | np.ndarray) -> LoraStep:
    step = lora_step(np.asarray(adapters), HOST)
    assert step is not None
    return step


def errors(out: Tensor, x: Tensor, step: LoraStep, pairs: LoraPairs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernels' result, PyTorch's, the result in float64, and the sums of its terms' magnitudes."""
    truth, terms, pytorch, ours = out.double(), out.double().abs(), out.clone(), out.clone()
    doubles = [None if p is None else LoraPair(p.down.double(), p.up.double()) for p in pairs]
    magnitudes = [None if p is None else LoraPair(p.down.abs(), p.up.abs()) for p in doubles]
    add_lora(truth, x.double(), step, LoraPairs(doubles))
    add_lora(terms, x.double().abs(), step, LoraPairs(magnitudes))
    add_lora(pytorch, x, step, pairs)
    kernels.add_lora(ours, x, step, pairs)
    return ours, pytorch, truth, terms


def hold(ours: Tensor, pytorch: Tensor, truth: Tensor, terms: Tensor) -> None:
    """Allow twice PyTorch's error, plus one intermediate rounding: if terms cancel, PyTorch may be right by chance."""
    one = torch.finfo(ours.dtype).eps * terms.max()
    assert (ours.double() - truth).abs().max() <= 2 * (pytorch.double() - truth).abs().max() + one


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same numbers in any order of tests: bounds of twice PyTorch's error hold by chance at the edges."""
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs", "ranks"),
    [
        (1, 16, 16, [4]),
        (5, 33, 7, [8, 3]),
        (7, 64, 100, [16, 0, 4]),
        (19, 100, 130, [1, 64, 5]),
        (23, 63, 257, [0, 33, 16]),
        (17, 40, 48, [70, 2, 9, 130]),
    ],
)
def test_equals_pytorch(dtype: torch.dtype, tokens: int, inputs: int, outputs: int, ranks: list[int]) -> None:
    rng = np.random.default_rng(tokens)
    pairs = draw_pairs(ranks, inputs, outputs, dtype)
    step = draw_step(np.concatenate([rng.integers(-1, len(ranks), tokens - 1), [0]]))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, inputs, generator=generator).to(dtype)
    hold(*errors(torch.randn(tokens, outputs, generator=generator).to(dtype), x, step, pairs))


@pytest.mark.parametrize("rank", [4, 8, 16, 32, 64, 128, 256])
def test_every_rank(rank: int) -> None:
    pairs = draw_pairs([rank, 0], 48, 40, seed=rank)
    hold(*errors(torch.randn(3, 40), torch.randn(3, 48), draw_step([0, 1, 0]), pairs))


@pytest.mark.parametrize("tokens", [63, 64, 100, 200])
def test_tall_tiles(tokens: int) -> None:
    pairs = draw_pairs([5, 12], 32, 24)
    step = draw_step([0] * tokens)
    assert tiles_of(step, tokens, CPU).rows == (64 if tokens >= 64 else 16)
    hold(*errors(torch.randn(tokens, 24), torch.randn(tokens, 32), step, pairs))


@pytest.mark.parametrize("inputs", [512, 1000, 1537])
def test_parts_of_the_inner_size(inputs: int) -> None:
    pairs = draw_pairs([6, 16], inputs, 24)
    hold(*errors(torch.randn(4, 24), torch.randn(4, inputs), draw_step([1, 0, 0, -1]), pairs))


def test_same_bits_twice() -> None:
    pairs, step = draw_pairs([6, 16], 700, 24), draw_step([1, 0, 0, -1])
    out, x = torch.randn(4, 24), torch.randn(4, 700)
    first, second = out.clone(), out.clone()
    kernels.add_lora(first, x, step, pairs)
    kernels.add_lora(second, x, step, pairs)
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_gaps_between_rows_are_unchanged(dtype: torch.dtype) -> None:
    pairs = draw_pairs([4, 9], 20, 30, dtype)
    step = draw_step([0, 1, -1, 0, 1])
    wide = torch.full((5, 40), torch.nan, dtype=dtype)
    out = wide[:, 5:35]
    out.copy_(torch.randn(5, 30))
    expected = out.clone()
    x = torch.randn(5, 50).to(dtype)[:, 10:30]
    add_lora(expected, x, step, pairs)
    kernels.add_lora(out, x, step, pairs)
    torch.testing.assert_close(out, expected, atol=0.05 if dtype == torch.bfloat16 else 5e-3, rtol=0)
    assert wide[:, :5].isnan().all()
    assert wide[:, 35:].isnan().all()


def test_rows_without_an_adapter_keep_their_bits() -> None:
    pairs = draw_pairs([4, 0], 20, 30)
    out = torch.randn(6, 30)
    before = out.clone()
    kernels.add_lora(out, torch.randn(6, 20), draw_step([-1, 0, 1, 1, -1, 0]), pairs)
    assert torch.equal(out[[0, 2, 3, 4]], before[[0, 2, 3, 4]])
    assert not torch.equal(out[[1, 5]], before[[1, 5]])


def test_columns_of_x_that_are_not_contiguous() -> None:
    pairs = draw_pairs([4, 7], 12, 10)
    hold(*errors(torch.randn(5, 10), torch.randn(12, 5).T, draw_step([0, 1, -1, 0, 1]), pairs))


def test_tiles_that_pad_the_list_do_nothing() -> None:
    pairs, step = draw_pairs([4, 7], 12, 10), draw_step([0, 1, -1, 0, 1])
    made = tiles_of(step, 5, CPU)
    padded = torch.cat([made.tiles, torch.zeros(3, 3, dtype=torch.int64)])
    padding = replace(step, tiles=LoraTiles(torch.cat([made.order, made.order.new_zeros(2)]), padded, made.rows))
    out, x = torch.randn(5, 10), torch.randn(5, 12)
    expected = out.clone()
    kernels.add_lora(expected, x, step, pairs)
    kernels.add_lora(out, x, padding, pairs)
    assert torch.equal(out, expected)


def test_projections_fused_along_their_outputs() -> None:
    """An adapter of q, k and v is zero in most of B; zeros are not read."""
    generator = torch.Generator().manual_seed(3)
    up = torch.zeros(400, 48)
    for part, (start, end) in enumerate(((0, 200), (200, 300), (300, 400))):
        up[start:end, 16 * part : 16 * part + 16] = torch.randn(end - start, 16, generator=generator)
    pairs = LoraPairs([None, LoraPair(torch.randn(48, 32, generator=generator), up)])
    assert pairs.stack.spans[1].tolist() == [[0, 16], [0, 32], [16, 48], [32, 48]]
    assert pairs.stack.spans[0].tolist() == [[0, 0]] * 4
    hold(*errors(torch.randn(3, 400), torch.randn(3, 32), draw_step([1, 0, 1]), pairs))


def test_a_stack_contains_the_pairs_once() -> None:
    pairs = draw_pairs([4, 0, 17], 12, 10, torch.bfloat16)
    before = [None if p is None else (p.down.clone(), p.up.clone()) for p in pairs]
    stack = pairs.stack
    assert stack.ranges.tolist() == [[0, 16], [16, 0], [16, 32]]
    assert (stack.width, stack.down.shape, stack.up.shape) == (32, (48, 12), (48, 10))
    assert stack.down[4:16].eq(0).all()
    assert stack.up[33:].eq(0).all()
    for pair, old in zip(pairs, before, strict=True):
        assert (pair is None) == (old is None)
        if pair is not None and old is not None:
            assert pair.down.untyped_storage().data_ptr() == stack.down.untyped_storage().data_ptr()
            assert pair.up.untyped_storage().data_ptr() == stack.up.untyped_storage().data_ptr()
            assert torch.equal(pair.down, old[0])
            assert torch.equal(pair.up, old[1])
    assert pairs.stack is stack


@settings(deadline=None, max_examples=60)
@given(adapters=st.lists(st.integers(-1, 4), min_size=1, max_size=200).filter(lambda a: max(a) >= 0))
def test_tiles_contain_every_token_once(adapters: list[int]) -> None:
    found = tiles_of(draw_step(adapters), len(adapters), CPU)
    seen: dict[int, int] = {}
    for adapter, first, count in found.tiles.tolist():
        assert 0 < count <= found.rows
        for token in found.order[first : first + count].tolist():
            assert token not in seen
            seen[token] = adapter
    assert seen == {token: adapter for token, adapter in enumerate(adapters) if adapter >= 0}


@settings(deadline=None, max_examples=15)
@given(
    adapters=st.lists(st.integers(-1, 3), min_size=1, max_size=24).filter(lambda a: max(a) >= 0),
    ranks=st.lists(st.integers(0, 20), min_size=4, max_size=4).filter(any),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 140)),
    dtype=st.sampled_from(_DTYPES),
    seed=st.integers(0, 1000),
)
def test_any_step(adapters: list[int], ranks: list[int], sizes: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pairs = draw_pairs(ranks, *sizes, dtype, seed)
    x = torch.randn(len(adapters), sizes[0], generator=generator).to(dtype)
    out = torch.randn(len(adapters), sizes[1], generator=generator).to(dtype)
    hold(*errors(out, x, draw_step(adapters), pairs))
