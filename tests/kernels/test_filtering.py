"""Filtered scores against the reference of sampling, and against samples."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.kernels.filtering import filtered_scores
from batchgen.kernels.noise import row_keys
from batchgen.kernels.sampling import SamplingColumns, sample
from batchgen.kernels.sampling_reference import filtered_distribution

CPU = torch.device("cpu")
Params = tuple[float, int, float, float]

GRID: list[Params] = [
    *itertools.product([1e-5, 0.3, 1.0, 4.0], [-1, 0, 1, 2, 7, 40, 5000], [1.0, 0.95, 0.5, 1e-9], [0.0, 0.1, 1.0])
]


def logits_of(kind: str, rows: int, vocab: int) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    logits = 2 * torch.randn(rows, vocab, generator=generator)
    if kind == "ties":
        logits = logits.round()
    elif kind == "masked":
        logits[torch.rand(rows, vocab, generator=generator) < 0.7] = -torch.inf
        logits[:, vocab // 2] = 0.5
    return logits


def scores_of(logits: Tensor, params: list[Params], drawn: Tensor) -> Tensor:
    temperature, top_k, top_p, min_p = (torch.tensor(values) for values in zip(*params, strict=True))
    return filtered_scores(logits, temperature, top_k, top_p.float(), min_p.float(), drawn)


@pytest.mark.field("temperature", "top_p", "top_k", "min_p")
@pytest.mark.parametrize("kind", ["normal", "ties", "masked"])
@pytest.mark.parametrize("vocab", [1, 2, 63, 1000])
def test_probabilities_equal_the_reference(kind: str, vocab: int) -> None:
    logits = logits_of(kind, len(GRID), vocab)
    before = logits.clone()
    keys = row_keys(*(torch.arange(len(GRID)) for _ in range(3)))
    drawn = sample(logits, SamplingColumns.of(*zip(*GRID, strict=True)).with_keys(keys)).tokens  # type: ignore[arg-type]
    got = scores_of(logits, GRID, drawn).softmax(-1).numpy()
    assert torch.equal(logits, before)
    for row, params in enumerate(GRID):
        exact = filtered_distribution(logits[row].numpy(), *params)
        np.testing.assert_allclose(got[row], exact, atol=2e-6, rtol=0, err_msg=str(params))
        assert ((got[row] > 0) <= (exact > -1)).all()
        assert got[row][drawn[row]] > 0


def test_a_greedy_row_is_unfiltered_at_temperature_one() -> None:
    logits = logits_of("normal", 2, 50)
    got = scores_of(logits, [(0.0, 3, 0.5, 0.5), (1e-6, -1, 1.0, 0.0)], logits.argmax(-1))
    torch.testing.assert_close(got.log_softmax(-1), logits.log_softmax(-1))


def test_rows_do_not_depend_on_other_rows() -> None:
    logits = logits_of("normal", len(GRID), 100)
    drawn = logits.argmax(-1)
    whole = scores_of(logits, GRID, drawn)
    for row in range(0, len(GRID), 7):
        alone = scores_of(logits[row : row + 1], GRID[row : row + 1], drawn[row : row + 1])
        assert torch.equal(alone[0], whole[row])


def test_the_sampled_token_survives() -> None:
    logits = torch.zeros(1, 4)
    got = scores_of(logits, [(1.0, -1, 0.5, 0.0)], torch.tensor([3]))
    assert torch.isfinite(got).tolist() == [[True, True, False, True]]
