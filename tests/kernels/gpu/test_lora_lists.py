"""The stack of a layer's adapters and the tiles of a step, which the LoRA kernels read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchgen.kernels.device import HOST
from batchgen.kernels.gpu.lora import add_lora
from batchgen.kernels.lora import LoraPair, LoraPairs, LoraStep, lora_step, static_tiles, tile_columns, tiles_of
from batchgen.kernels.lora import add_lora as plain_lora
from tests.cases import examples
from tests.kernels import op_exact as exact
from tests.kernels.closeness import DTYPES
from tests.kernels.numbers import Numbers
from tests.kernels.op_arguments import lora, pairs_of

CPU = torch.device("cpu")
NUMBERS = Numbers(CPU)


def test_zeros_of_projections_fused_along_their_outputs_are_not_read() -> None:
    """An adapter of q, k and v is zero in most of B."""
    up = torch.zeros(400, 48)
    for part, (start, end) in enumerate(((0, 200), (200, 300), (300, 400))):
        up[start:end, 16 * part : 16 * part + 16] = NUMBERS.randn(end - start, 16)
    pairs = LoraPairs([None, LoraPair(NUMBERS.randn(48, 32), up)])
    assert pairs.stack.spans[1].tolist() == [[0, 16], [0, 32], [16, 48], [32, 48]]
    assert pairs.stack.spans[0].tolist() == [[0, 0]] * 4
    x, out = NUMBERS.randn(3, 32), NUMBERS.randn(3, 400)
    want = out.double()
    want[[0, 2]] += x[[0, 2]].double() @ pairs[1].down.double().T @ up.double().T
    step = lora_step(np.array([1, 0, 1]), HOST)
    assert step is not None
    add_lora(out, x, step, pairs)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(5, 2, 8, 33, 7), (19, 3, 64, 100, 130), (17, 4, 130, 40, 48), (4, 2, 16, 1537, 24)])
def test_updates_are_as_exact_as_pytorchs(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Up to one intermediate rounding: where terms cancel, PyTorch may be right by chance."""
    out, x, step, pairs = lora(Numbers(CPU), dtype, *sizes).values()
    ours, plain, truth, terms = out.clone(), out.clone(), out.double(), out.double().abs()
    add_lora(ours, x, step, pairs)
    plain_lora(plain, x, step, pairs)
    wide = [pair and LoraPair(pair.down.double(), pair.up.double()) for pair in pairs]
    exact.lora(truth, x.double(), step, LoraPairs(wide))
    exact.lora(terms, x.double().abs(), step, LoraPairs([w and LoraPair(w.down.abs(), w.up.abs()) for w in wide]))
    allowed = 2 * (plain.double() - truth).abs().max() + torch.finfo(dtype).eps * terms.max()
    assert (ours.double() - truth).abs().max() <= allowed


def test_a_stack_contains_the_pairs_once() -> None:
    pairs = pairs_of(NUMBERS, [4, 0, 17], 12, 10, torch.bfloat16)
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


@examples(60)
@given(adapters=st.lists(st.integers(-1, 4), min_size=1, max_size=200).filter(lambda a: max(a) >= 0))
def test_tiles_contain_every_token_once(adapters: list[int]) -> None:
    step = lora_step(np.array(adapters), HOST)
    assert step is not None
    found = tiles_of(step, len(adapters), CPU)
    seen: dict[int, int] = {}
    for adapter, first, count in found.tiles.tolist():
        assert 0 < count <= found.rows
        for token in found.order[first : first + count].tolist():
            assert token not in seen
            seen[token] = adapter
    assert seen == {token: adapter for token, adapter in enumerate(adapters) if adapter >= 0}


@examples(60)
@given(
    adapters=st.lists(st.integers(-1, 4), min_size=1, max_size=200).filter(lambda a: max(a) >= 0),
    more=st.integers(0, 40),
)
def test_static_tiles_hold_any_step(adapters: list[int], more: int) -> None:
    """Of up to 5 adapters and as many tokens; further tiles are empty, further tokens in none."""
    tokens = len(adapters) + more
    columns = torch.zeros(4, tokens + more % 2, dtype=torch.int64)
    found = static_tiles(columns, tokens, 5)
    columns.copy_(torch.from_numpy(tile_columns(np.array(adapters), found.rows, columns.shape[1])))
    tiles = found.tiles.tolist()
    seen = {token: a for a, first, count in tiles for token in found.order[first : first + count].tolist()}
    assert seen == {token: adapter for token, adapter in enumerate(adapters) if adapter >= 0}
    assert sum(count for *_, count in tiles) == len(seen)
    assert max(count for *_, count in tiles) <= found.rows


@pytest.mark.parametrize(("tokens", "adapters"), [(1, 1), (8, 3), (24, 2), (80, 1)])
def test_static_tiles_give_the_updates_of_a_steps_own(tokens: int, adapters: int) -> None:
    """Steps of other sizes one after the other, in the same tiles."""
    pairs = pairs_of(NUMBERS, [4, 17, 0][:adapters], 24, 40, torch.float32)
    columns = torch.zeros(4, max(2, tokens), dtype=torch.int64)
    tiles = static_tiles(columns, tokens, adapters)
    rng = np.random.default_rng(tokens)
    for count in (tokens, -(-tokens // 2)):
        chosen = rng.integers(-1, adapters, count)
        chosen[rng.integers(count)] = 0
        columns.copy_(torch.from_numpy(tile_columns(chosen, tiles.rows, columns.shape[1])))
        x, out = NUMBERS.randn(tokens, 24), NUMBERS.randn(tokens, 40)
        want, step = out.clone(), lora_step(chosen, HOST)
        assert step is not None
        plain_lora(want[:count], x[:count], step, pairs)
        add_lora(out, x, LoraStep((), tiles), pairs)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-4)
