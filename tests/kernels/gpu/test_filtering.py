"""Filtered scores in Triton's interpreter, against PyTorch, which sorts: the boundaries by rank and by mass."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels import filtering as pytorch
from batchgen.kernels.gpu.filtering import filtered_scores
from batchgen.kernels.gpu.sampling import SamplingTile
from tests.cases import examples
from tests.kernels.gpu.sampled_rows import SMALL, TINY, Params, some
from tests.kernels.logit_rows import MORE_KINDS, logits_of

GRID: list[Params] = list(
    itertools.product(
        [1e-6, 1e-5, 0.3, 1.0, 4.0], [-1, 0, 1, 2, 7, 20, 40, 5000], [1.0, 0.999, 0.7, 1e-9], [0.0, 0.1, 1.0]
    )
)


def check(logits: Tensor, params: list[Params], tile: SamplingTile = SMALL) -> None:
    temperature, top_k, top_p, min_p = (torch.tensor(values) for values in zip(*params, strict=True))
    columns = (temperature, top_k, top_p.float(), min_p.float(), logits.float().argmax(-1))
    before = logits.clone()
    got = filtered_scores(logits, *columns, tile)
    assert torch.equal(logits, before)
    assert torch.equal(got, pytorch.filtered_scores(logits.float(), *columns))


@pytest.mark.field("temperature", "top_p", "top_k", "min_p")
@pytest.mark.parametrize(
    ("kind", "vocab"), [*((kind, 200) for kind in MORE_KINDS), *zip(MORE_KINDS, itertools.cycle((1, 63)), strict=False)]
)
def test_scores_equal_pytorch(kind: str, vocab: int) -> None:
    params = some(GRID, 10, seed=vocab + len(kind))
    check(logits_of(kind, len(params), vocab), params)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    params: list[Params] = [(0.7, 20, 0.9, 0.0), (1.0, -1, 0.8, 0.05), (5.0, -1, 0.9, 0.0), (2.0, 90, 0.9, 0.0)]
    check(logits_of("normal", 4, 180).to(dtype), params)


@examples(20)
@given(
    st.lists(st.sampled_from([-torch.inf, -3e38, -2.0, -0.0, 0.0, 1e-40, 0.5]), min_size=1, max_size=40).filter(
        lambda values: max(values) > -torch.inf
    ),
    st.integers(1, 44),
)
def test_ranks_are_those_of_a_stable_sort(values: list[float], top_k: int) -> None:
    """By logit: PyTorch's ranks scores, in which the smallest differences are rounded away."""
    logits, column = torch.tensor([values]), torch.ones(1)
    first = logits.sort(descending=True, stable=True).indices[0, :top_k]
    got = filtered_scores(logits, column, torch.tensor([top_k]), column, 0 * column, logits.argmax(-1), TINY)
    kept = {i for i in first.tolist() if values[i] > -torch.inf}
    assert {i for i, score in enumerate(got[0].tolist()) if score > -torch.inf} == kept


def test_the_sampled_token_survives() -> None:
    columns = (torch.tensor([1.0]), torch.tensor([-1]), torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([3]))
    got = filtered_scores(torch.zeros(1, 4), *columns, SMALL)
    assert torch.isfinite(got).tolist() == [[True, True, False, True]]


def test_no_rows() -> None:
    empty = torch.empty(0)
    assert filtered_scores(torch.empty(0, 7), empty, empty.long(), empty, empty, empty.long(), SMALL).shape == (0, 7)
