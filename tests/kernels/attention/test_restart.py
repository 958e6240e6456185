"""Steps of layers that attend in chunks, as steps whose sequences begin again, against attention by the definition."""

from __future__ import annotations

import pytest
import torch

from batchgen.kernels.attention.torch_attention import TorchAttention
from batchgen.kernels.grouped import restarted
from batchgen.kernels.types import AttentionArgs
from tests.kernels.oracle import attend_by_token
from tests.kernels.steps import Shape, Step, StepBuilder

SIZE = 8
"""Positions of a page."""


def nested_step(seed: int) -> Step:
    """Prompts from several positions, and decode rows with and without prefix groups, of one row and within one."""
    build = StepBuilder(Shape(6, 2, page_size=SIZE), seed=seed)
    for q_len, past in ((7, 0), (100, 0), (61, 30), (1, 31), (1, 32), (40, 24)):
        build.chunk(q_len, past)
    for own_len, own_start in ((1, 0), (64, 0), (65, 0), (1, 64), (9, 64), (30, 64), (3, 96), (40, 96)):
        build.decode(own_len, own_start)
    build.group([3, 4, 5, 6, 7], 0, 8)
    build.group([6, 7], 64, 4)
    return build.build()


@pytest.mark.parametrize("chunk", [8, 16, 24, 32, 64, 200])
@pytest.mark.parametrize("seed", range(2))
def test_a_restarted_step_equals_the_oracle(chunk: int, seed: int) -> None:
    step, args = nested_step(seed), AttentionArgs(0.3, chunk, restarts=True)
    expected = attend_by_token(step.batch, step.query, *step.filled(), args)
    got = TorchAttention(step.pool, restarted(step.batch, chunk, SIZE)).attend(
        0, step.query, step.key, step.value, args
    )
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)
