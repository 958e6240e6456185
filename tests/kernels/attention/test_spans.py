"""Runs of tokens that see one another, against attention by the definition, on every backend of a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from batchgen.kernels.attention.torch_attention import TorchAttention
from batchgen.kernels.cpu.attention import CompiledAttention
from batchgen.kernels.grouped import GroupedPool, attention_of, grouped_attention
from batchgen.kernels.types import AttentionArgs
from tests.kernels.oracle import attend_by_token
from tests.kernels.steps import Shape, Step, any_step, free_behind

SPANS = [(0, 7), (9, 12), (15, 16), (18, 100), (101, 103)]
"""In chunks of 17, 85 and 1 tokens after 0, 35 and 9 positions."""
CHUNKS = [(17, 0, 0), (85, 3, 2), (1, 9, 1)]
ROWS = [(1, 0), (40, 0), (9, 1), (17, 2)]


def step_of(dtype: torch.dtype = torch.float32, seed: int = 0) -> Step:
    step = any_step(CHUNKS, ROWS, Shape(6, 2, 16, 16, page_size=16, dtype=dtype), seed=seed)
    step.batch.spans = [(start, end) for start, end in SPANS if end <= 102]
    return step


@pytest.mark.parametrize("factory", [TorchAttention, CompiledAttention])
@pytest.mark.parametrize(
    ("window", "exceed"), [(None, False), (1, False), (5, False), (20, False), (1, True), (20, True)]
)
def test_a_step_with_runs_equals_the_oracle(factory: type[TorchAttention], window: int | None, exceed: bool) -> None:
    step = step_of()
    step.batch.spans_exceed_window = exceed
    if window is not None:
        free_behind(step, window)
    args = AttentionArgs(0.3, window)
    expected = attend_by_token(step.batch, step.query, *step.filled(), args)
    got = attention_of(factory, step.pool, step.batch).attend(0, step.query, step.key, step.value, args)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)
    assert not torch.equal(expected, attend_by_token(replace(step.batch, spans=[]), step.query, *step.filled(), args))


def test_soft_caps_and_sinks_hold_in_runs() -> None:
    step = step_of()
    args = AttentionArgs(0.3, 20, softcap=3.0, sinks=torch.randn(6))
    expected = attend_by_token(step.batch, step.query, *step.filled(), args)
    got = attention_of(TorchAttention, step.pool, step.batch).attend(0, step.query, step.key, step.value, args)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


def test_a_layer_may_be_causal_in_runs() -> None:
    step = step_of()
    args = AttentionArgs(0.3, None, runs=False)
    expected = attend_by_token(replace(step.batch, spans=[]), step.query, *step.filled(), args)
    got = attention_of(TorchAttention, step.pool, step.batch).attend(0, step.query, step.key, step.value, args)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


def test_a_run_has_the_same_bits_next_to_other_tokens() -> None:
    """A run is computed alone: chunks and rows around it do not change its results."""
    step = step_of()
    args = AttentionArgs(0.3, None)
    whole = attention_of(TorchAttention, step.pool, step.batch).attend(0, step.query, step.key, step.value, args)
    alone = replace(step.batch, spans=[(18, 100)])
    got = attention_of(TorchAttention, step.pool, alone).attend(0, step.query, step.key, step.value, args)
    assert torch.equal(whole[18:100], got[18:100])


def test_all_groups_of_layers_see_the_runs() -> None:
    one, other = step_of(seed=1), step_of(seed=2)
    pool = GroupedPool([one.pool, other.pool], ((0, 0), (1, 0)))
    attention = grouped_attention(TorchAttention, pool, [one.batch, other.batch])
    for layer, (step, window) in enumerate(((one, None), (other, 5))):
        args = AttentionArgs(0.3, window)
        got = attention.attend(layer, step.query, step.key, step.value, args)
        expected = attend_by_token(step.batch, step.query, *step.filled(), args)
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)
