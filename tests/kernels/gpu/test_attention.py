from __future__ import annotations

from typing import Any

import pytest
import torch

from batchgen.kernels.gpu.attention import TritonAttention
from batchgen.kernels.reference import reference_attention
from tests.kernels.steps import Shape, Step, StepBuilder

SCALE = 0.3


def check(step: Step, tolerance: float = 1e-5, multiprocessors: int = 2, **options: Any) -> TritonAttention:
    keys, values = step.filled()
    exact = reference_attention(step.batch, step.query, keys, values, scale=SCALE, **options)
    attention = TritonAttention(step.pool, step.batch, multiprocessors=multiprocessors)
    got = attention.attend(0, step.query, step.key, step.value, scale=SCALE, **options)
    assert got.dtype == step.query.dtype
    assert got.shape == exact.shape
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=tolerance)
    return attention


def mixed(shape: Shape, seed: int = 0) -> Step:
    """Chunks with and without a past, decode rows alone, in a group and in two."""
    b = StepBuilder(shape, seed=seed)
    b.chunk(35)
    b.chunk(1, past=50)
    b.chunk(19, past=20)
    size = shape.page_size
    b.decode(1)
    b.decode(40)
    low = [b.decode(n, own_start=4 * size) for n in (1, 5)]
    high = [b.decode(n, own_start=2 * size) for n in (3, size)]
    b.group([low[1], high[0], low[0], high[1]], 0, 2)
    b.group(low, 2 * size, 2)
    return b.build()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"window": 40},
    {"softcap": 3.0},
    {"sinks": True},
    {"window": 21, "softcap": 2.0, "sinks": True},
]


def with_sinks(options: dict[str, Any], heads: int) -> dict[str, Any]:
    return {**options, "sinks": torch.linspace(-3, 3, heads)} if options.get("sinks") else options


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
def test_mixed_step_equals_the_oracle(heads: int, kv_heads: int, options: dict[str, Any]) -> None:
    check(mixed(Shape(heads, kv_heads)), **with_sinks(options, heads))
