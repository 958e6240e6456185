"""LoRA updates of a step, in PyTorch and compiled, against a loop over tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.cpu import lora as compiled
from batchgen.kernels.cpu.library import loaded, missing
from batchgen.kernels.device import HOST
from batchgen.kernels.lora import LoraPair, LoraPairs, LoraStep, add_lora, lora_step
from tests.cases import examples
from tests.engine.fake_cuda import fake_cuda
from tests.kernels.closeness import assert_as_close
from tests.kernels.numbers import Numbers
from tests.kernels.op_arguments import pairs_of

BF16 = torch.bfloat16
needs_library = pytest.mark.skipif(not loaded(), reason=str(missing()))


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads share any amount of work."""
    torch.set_num_threads(2)
    monkeypatch.setattr(compiled, "_SERIAL", 0)


def by_token(out: Tensor, x: Tensor, adapters: list[int], pairs: list[LoraPair | None]) -> Tensor:
    """The reference: one token and one dense matrix at a time, in float64."""
    result = out.double().clone()
    for t, adapter in enumerate(adapters):
        pair = pairs[adapter] if adapter >= 0 else None
        if pair is not None:
            result[t] += (pair.up.double() @ pair.down.double()) @ x[t].double()
    return result


def draw_pairs(ranks: list[int], inputs: int, outputs: int, dtype: torch.dtype, fused: bool = False) -> LoraPairs:
    """`fused`: B has two diagonal blocks, as for two fused projections."""
    pairs = pairs_of(Numbers(torch.device("cpu"), 1), ranks, inputs, outputs, dtype)
    for pair in pairs:
        if fused and pair is not None:
            half = pair.up.shape[1] // 2
            pair.up[: outputs // 2, half:] = 0
            pair.up[outputs // 2 :, :half] = 0
    return pairs


def draw_inputs(tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [T, I] and out [T, O], views with gaps between their rows, as fused products return."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, inputs + 3, generator=generator).to(dtype)[:, 1 : 1 + inputs]
    return x, torch.randn(tokens, outputs + 5, generator=generator).to(dtype)[:, 2 : 2 + outputs]


def step_of(adapters: list[int]) -> LoraStep:
    step = lora_step(np.array(adapters), HOST)
    assert step is not None
    return step


widths = st.integers(1, 70) | st.integers(120, 300)


@examples(100)
@given(
    adapters=st.lists(st.integers(-1, 3), min_size=1, max_size=90).filter(lambda a: max(a) >= 0),
    ranks=st.lists(st.sampled_from([0, 1, 3, 8, 9, 16, 33]), min_size=4, max_size=4),
    inputs=widths,
    outputs=widths,
    dtype=st.sampled_from([torch.float32, BF16]),
    fused=st.booleans(),
    threads=st.sampled_from([1, 2, 5]),
)
def test_each_token_gets_its_own_adapter(
    adapters: list[int],
    ranks: list[int],
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    fused: bool,
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    pairs = draw_pairs(ranks, inputs, outputs, dtype, fused)
    x, before = draw_inputs(len(adapters), inputs, outputs, dtype)
    exact = by_token(before, x, adapters, list(pairs))
    untouched = [a < 0 or not ranks[a] for a in adapters]
    plain = None
    for add in (add_lora, compiled.add_lora) if loaded() else (add_lora,):
        _, out = draw_inputs(len(adapters), inputs, outputs, dtype)
        assert out._base is not None
        edges = out._base.clone()
        add(out, x, step_of(adapters), pairs)
        plain = out if plain is None else plain
        assert_as_close(out, plain, exact)
        rtol = 1e-4 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        largest = 1.0 if dtype == torch.float32 else float(exact.abs().max())
        torch.testing.assert_close(out.double(), exact, rtol=rtol, atol=rtol * largest)
        assert torch.equal(out[untouched], before[untouched])
        for columns in (slice(0, 2), slice(2 + outputs, None)):
            assert torch.equal(out._base[:, columns], edges[:, columns])


# Steps


@pytest.mark.parametrize(
    ("adapters", "rows", "tiles"), [([2, -1, 0, 2, 0], 16, 2), ([1] * 130, 64, 3), ([-1, 3, *[0] * 17], 16, 3)]
)
def test_a_step_is_uploaded_in_one_transfer(adapters: list[int], rows: int, tiles: int) -> None:
    with fake_cuda() as gpu:
        step = lora_step(np.array(adapters), gpu.device)
    assert (gpu.device.counts.uploads, gpu.syncs) == (1, [])
    assert step is not None
    assert step.tiles is not None
    assert (step.tiles.rows, step.tiles.tiles.shape) == (rows, (tiles, 3))
    assert step.tiles.order.shape == (len(adapters) - adapters.count(-1),)
    assert [s.adapter for s in step.segments] == sorted(set(adapters) - {-1})


def test_a_step_without_adapters_is_none() -> None:
    assert lora_step(np.array([-1, -1]), HOST) is None
    alone = lora_step(np.array([4, 4]), HOST)
    assert alone is not None
    assert alone.tiles is not None
    assert (alone.tiles.order.tolist(), alone.tiles.tiles.tolist()) == ([0, 1], [[4, 0, 2]])
    assert [(s.adapter, s.rows) for s in alone.segments] == [(4, None)]


# Compiled


@needs_library
@pytest.mark.parametrize(("inputs", "outputs", "dtype"), [(256, 640, BF16), (65, 131, torch.float32)])
def test_a_tokens_result_does_not_depend_on_other_tokens(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    adapters = [int(a) for a in np.random.default_rng(3).integers(-1, 3, 150)]
    pairs = draw_pairs([8, 5, 48], inputs, outputs, dtype)
    x, out = draw_inputs(len(adapters), inputs, outputs, dtype)
    together = out.clone()
    compiled.add_lora(together, x, step_of(adapters), pairs)
    for token, adapter in enumerate(adapters):
        if adapter >= 0:
            one = out[token : token + 1].clone()
            compiled.add_lora(one, x[token : token + 1], step_of([adapter]), pairs)
            assert torch.equal(one[0], together[token])


@needs_library
def test_inner_sums_are_not_rounded() -> None:
    """The update by bfloat16 matrices is their float32 product, rounded once with the sum."""
    pairs = draw_pairs([16], 512, 96, BF16)
    x, out = draw_inputs(40, 512, 96, BF16)
    exact = by_token(out, x, [0] * 40, list(pairs))
    compiled.add_lora(out, x, step_of([0] * 40), pairs)
    assert (out != exact.bfloat16()).float().mean() < 0.002


@needs_library
def test_pairs_of_another_dtype_use_pytorch() -> None:
    pairs = draw_pairs([4], 8, 9, torch.float64)
    x, out = draw_inputs(3, 8, 9, torch.float64)
    expected = by_token(out, x, [0, -1, 0], list(pairs))
    compiled.add_lora(out, x, step_of([0, -1, 0]), pairs)
    torch.testing.assert_close(out, expected)


@needs_library
def test_pairs_are_views_of_the_stacked_memory() -> None:
    """No copy is kept, even if the pairs were stacked differently before."""
    pairs = draw_pairs([3, 0, 20], 16, 24, torch.float32)
    before = [None if pair is None else (pair.down.clone(), pair.up.clone()) for pair in pairs]
    assert pairs.stack.ranges.tolist() == [[0, 16], [16, 0], [16, 32]]
    call = compiled.stack_call(pairs)
    assert (call.kept.ranges.tolist(), call.width) == ([[0, 3], [3, 0], [3, 20]], 20)
    for pair, old in zip(pairs, before, strict=True):
        if pair is not None and old is not None:
            for matrix, was, stack in ((pair.down, old[0], call.kept.down), (pair.up, old[1], call.kept.up)):
                assert torch.equal(matrix, was)
                assert matrix.untyped_storage().data_ptr() == stack.untyped_storage().data_ptr()
