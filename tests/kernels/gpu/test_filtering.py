"""Filtered scores in Triton's interpreter, against PyTorch, which sorts."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from batchgen.kernels import filtering as pytorch
from batchgen.kernels.gpu.filtering import filtered_scores
from batchgen.kernels.gpu.sampling import SamplingTile
from tests.kernels.gpu.test_top_k_threshold import logits_of

Params = tuple[float, int, float, float]
SMALL = SamplingTile(block=64, capacity=32, spread=16, few_block=16, warps=4)
GRID: list[Params] = list(
    itertools.product([1e-6, 1e-5, 0.3, 1.0, 4.0], [-1, 0, 1, 2, 7, 40, 5000], [1.0, 0.95, 0.5, 1e-9], [0.0, 0.1, 1.0])
)


def both(logits: Tensor, params: list[Params], tile: SamplingTile = SMALL) -> tuple[Tensor, Tensor]:
    temperature, top_k, top_p, min_p = (torch.tensor(values) for values in zip(*params, strict=True))
    columns = (temperature, top_k, top_p.float(), min_p.float(), logits.float().argmax(-1))
    before = logits.clone()
    got = filtered_scores(logits, *columns, tile)
    assert torch.equal(logits, before)
    return got, pytorch.filtered_scores(logits.float(), *columns)


@pytest.mark.field("temperature", "top_p", "top_k", "min_p")
@pytest.mark.parametrize("kind", ["normal", "ties", "masked", "equal", "peaked", "clustered"])
@pytest.mark.parametrize("vocab", [1, 63, 200])
def test_scores_equal_pytorch(kind: str, vocab: int) -> None:
    params = GRID[(vocab + len(kind)) % 37 :: 61]
    got, expected = both(logits_of(kind, len(params), vocab), params)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    params: list[Params] = [(0.7, 20, 0.9, 0.0), (1.0, -1, 0.8, 0.05), (5.0, -1, 0.9, 0.0), (2.0, 90, 0.9, 0.0)]
    got, expected = both(logits_of("normal", 4, 180).to(dtype), params)
    assert torch.equal(got, expected)


def test_the_sampled_token_survives() -> None:
    columns = (torch.tensor([1.0]), torch.tensor([-1]), torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([3]))
    got = filtered_scores(torch.zeros(1, 4), *columns, SMALL)
    assert torch.isfinite(got).tolist() == [[True, True, False, True]]


def test_no_rows() -> None:
    empty = torch.empty(0)
    assert filtered_scores(torch.empty(0, 7), empty, empty.long(), empty, empty, empty.long(), SMALL).shape == (0, 7)
