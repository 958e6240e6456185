"""Recurrent layers by the compiled kernels, whose bits do not depend on where a row is cut."""

from __future__ import annotations

import pytest
import torch

from batchgen.kernels.backend import DETERMINISTIC
from batchgen.kernels.cpu.library import missing
from batchgen.kernels.device import HOST
from batchgen.kernels.mixers.conv import naive_causal_conv
from batchgen.kernels.mixers.states import Run, chunk_batches

pytestmark = pytest.mark.skipif(missing() is not None, reason="no compiled kernels here")


def test_a_convolution_takes_weights_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(60, 33, generator=generator).bfloat16(), torch.randn(33, 3, generator=generator)

    def convolved(*cuts: int) -> torch.Tensor:
        states, source, out = torch.zeros(2, 3, 33, dtype=x.dtype), 0, []
        for start, end in zip((0, *cuts), (*cuts, len(x)), strict=True):
            runs = chunk_batches([[Run(0, end - start, source, 1)]], HOST)
            out.append(DETERMINISTIC.ops.causal_conv(x[start:end], weight, None, states, runs, "silu"))
            source = 1
        return torch.cat(out)

    whole = convolved()
    expected, _ = naive_causal_conv(x.float(), weight, None, torch.zeros(3, 33))
    torch.testing.assert_close(whole, torch.nn.functional.silu(expected).bfloat16())
    assert torch.equal(convolved(7, 13), whole)
    assert torch.equal(convolved(*range(1, 60)), whole)


def test_numbers_that_are_not_finite_stay_in_their_run() -> None:
    """The size of a state is not a multiple of a vector."""
    runs = chunk_batches([[Run(0, 3, 0, 1)], [Run(3, 6, 0, 2)]], HOST)
    x, ones = torch.randn(6, 5), torch.ones(6, 3)
    results = []
    for first in (1.0, torch.nan, torch.inf):
        x[:3] = first
        states = torch.zeros(3, 5, 3)
        out = DETERMINISTIC.ops.selective_scan(x, torch.ones(6, 5), -torch.ones(5, 3), ones, ones, states, runs)
        results.append((out[3:], states[2]))
    assert results[0][0].isfinite().all()
    for out, state in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(state, results[0][1])
