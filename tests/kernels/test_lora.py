"""LoRA updates of a step against a loop over tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.device import HOST
from batchgen.kernels.lora import LoraPair, LoraPairs, add_lora, lora_step
from tests.engine.fake_cuda import fake_cuda


def by_token(out: Tensor, x: Tensor, adapters: list[int], pairs: list[LoraPair | None]) -> Tensor:
    """The reference: one token and one dense matrix at a time, in float64."""
    result = out.double().clone()
    for t, adapter in enumerate(adapters):
        pair = pairs[adapter] if adapter >= 0 else None
        if pair is not None:
            result[t] += (pair.up.double() @ pair.down.double()) @ x[t].double()
    return result


@settings(deadline=None, max_examples=60)
@given(
    adapters=st.lists(st.integers(-1, 3), min_size=1, max_size=40),
    ranks=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    sizes=st.tuples(st.integers(1, 33), st.integers(1, 33)),
    seed=st.integers(0, 1000),
)
def test_each_token_gets_its_own_adapter(
    adapters: list[int], ranks: list[int], sizes: tuple[int, int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    inputs, outputs = sizes
    pairs = [LoraPair(draw(r, inputs), draw(outputs, r)) if r else None for r in ranks]
    x = draw(len(adapters), inputs)
    wide = draw(len(adapters), outputs + 5)  # a view with gaps between its rows, as a fused product returns
    out = wide[:, 2 : 2 + outputs]
    expected, edges = by_token(out, x, adapters, pairs), wide.clone()
    step = lora_step(np.array(adapters), HOST)
    if step is not None:
        add_lora(out, x, step, LoraPairs(pairs))
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(wide[:, :2], edges[:, :2])
    assert torch.equal(wide[:, 2 + outputs :], edges[:, 2 + outputs :])


@pytest.mark.parametrize(
    ("adapters", "rows", "tiles"), [([2, -1, 0, 2, 0], 16, 2), ([1] * 130, 64, 3), ([-1, 3, *[0] * 17], 16, 3)]
)
def test_a_step_is_uploaded_in_one_transfer(adapters: list[int], rows: int, tiles: int) -> None:
    with fake_cuda() as gpu:
        step = lora_step(np.array(adapters), gpu.device)
    assert (gpu.device.counts.uploads, gpu.syncs) == (1, [])
    assert step is not None
    assert step.tiles is not None
    order = step.tiles.order
    assert (step.tiles.rows, step.tiles.tiles.shape) == (rows, (tiles, 3))
    assert order.shape == (len(adapters) - adapters.count(-1),)
    assert [s.adapter for s in step.segments] == sorted(set(adapters) - {-1})
    assert [len(s.rows) for s in step.segments if s.rows is not None] == [
        adapters.count(s.adapter) for s in step.segments
    ]


def test_a_step_without_adapters_is_none() -> None:
    assert lora_step(np.array([-1, -1]), HOST) is None
    alone = lora_step(np.array([4, 4]), HOST)
    assert alone is not None
    assert alone.tiles is not None
    assert (alone.tiles.order.tolist(), alone.tiles.tiles.tolist()) == ([0, 1], [[4, 0, 2]])
    assert [(s.adapter, s.rows) for s in alone.segments] == [(4, None)]
