"""Biases and masks in Triton's interpreter, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchgen.kernels import shaping as pytorch
from batchgen.kernels.gpu import shaping as gpu
from tests.kernels.closeness import DTYPES
from tests.kernels.logit_rows import drawn, strided

torch.set_num_threads(1)

KINDS = ["packed", "padded", "transposed"]


def distinct_pairs(rows: int, vocab: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    places = torch.randperm(rows * vocab, generator=torch.Generator().manual_seed(seed))[:count]
    return places // vocab, places % vocab


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pairs", [0, 1, 30, 300])
def test_biases_of_a_repeated_pair_add_up(pairs: int, kind: str) -> None:
    logits = strided(drawn(3, 17), kind)
    expected = logits.clone()
    generator = torch.Generator().manual_seed(pairs)
    rows, ids = (torch.randint(0, most, (pairs,), generator=generator) for most in (3, 17))
    values = torch.randint(-8, 8, (pairs,), generator=generator) / 4
    gpu.add_bias(logits, rows, ids, values)
    pytorch.add_bias(expected, rows, ids, values)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "pairs"), [(5, 0), (63, 40), (5000, 200)])
def test_keep_only(vocab: int, pairs: int, kind: str, dtype: torch.dtype) -> None:
    logits = strided(drawn(4, vocab, dtype), kind)
    expected = logits.clone()
    whole = torch.tensor([3, 0])
    places, ids = distinct_pairs(2, vocab, pairs)
    gpu.keep_only(logits, whole, whole[places], ids)
    pytorch.keep_only(expected, whole, whole[places], ids)
    assert torch.equal(logits, expected)


def test_a_pair_that_is_kept_twice_stays() -> None:
    logits = drawn(2, 9)
    expected = logits.clone()
    rows, ids = torch.tensor([1, 1, 1]), torch.tensor([4, 4, 0])
    for ours, those in ((gpu, logits), (pytorch, expected)):
        ours.keep_only(those, torch.tensor([1]), rows, ids)
    assert torch.equal(logits, expected)


def test_keep_only_without_rows() -> None:
    logits, none = drawn(2, 9), torch.empty(0, dtype=torch.int64)
    before = logits.clone()
    gpu.keep_only(logits, none, none, none)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 6, 200])
def test_drew_masked(count: int, dtype: torch.dtype) -> None:
    logits = drawn(max(count, 1), 33, dtype)
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(0, 33, (len(logits),), generator=generator)
    rows = torch.randperm(len(logits), generator=generator)[:count]
    logits[rows[::3]] = -torch.inf
    got = gpu.drew_masked(logits, rows, tokens)
    assert got.dtype == torch.bool
    assert torch.equal(got, pytorch.drew_masked(logits, rows, tokens))
