"""Packed masks in Triton's interpreter, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels import bitmask as pytorch
from batchgen.kernels.gpu import bitmask as gpu
from tests.kernels.closeness import DTYPES
from tests.kernels.logit_rows import drawn, strided

torch.set_num_threads(1)

SIZES = [1, 31, 32, 33, 100, 1000]


def masks_of(count: int, vocab: int, seed: int = 0, spare: int = 0) -> Tensor:
    """Masks [count, words] int32 with about a third of the bits set, also past the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.rand(count, pytorch.bitmask_width(vocab) + spare, 32, generator=generator) < 0.3
    words = (bits.long() << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def check(logits: Tensor, masks: Tensor, rows: Tensor | None = None) -> None:
    expected = logits.clone()
    gpu.apply_bitmask(logits, masks, rows)
    pytorch.apply_bitmask(expected, masks, rows)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("vocab", SIZES)
def test_a_mask_for_every_row(vocab: int, dtype: torch.dtype) -> None:
    check(drawn(3, vocab, dtype), masks_of(3, vocab, seed=vocab))


@pytest.mark.parametrize("vocab", [7, 64, 333])
@pytest.mark.parametrize("rows", [[5], [4, 0, 2], [3, 1, 0, 2, 4, 5]])
def test_masks_of_given_rows(rows: list[int], vocab: int) -> None:
    check(drawn(6, vocab), masks_of(len(rows), vocab), torch.tensor(rows))


@pytest.mark.parametrize("kind", ["padded", "transposed", "every second"])
def test_any_strides(kind: str) -> None:
    wide = torch.full((2, 105), torch.nan)
    wide[:, :100] = drawn(2, 100)
    check(strided(drawn(3, 70), kind), masks_of(3, 70))
    gpu.apply_bitmask(wide[:, :100], masks_of(2, 100))
    assert bool(wide[:, 100:].isnan().all())


def test_masks_may_be_wider_and_have_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_WORDS", 2)
    logits, wide = drawn(3, 150), masks_of(6, 150, spare=2)[::2]
    expected = logits.clone()
    gpu.apply_bitmask(logits, wide)
    pytorch.apply_bitmask(expected, wide[:, :5].contiguous())
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("word", [0, -1])
def test_all_or_nothing(word: int) -> None:
    logits = drawn(2, 40)
    before = logits.clone()
    gpu.apply_bitmask(logits, torch.full((2, 2), word, dtype=torch.int32))
    assert torch.equal(logits, before if word else torch.full_like(before, -torch.inf))


def test_unmasked_logits_are_unchanged() -> None:
    logits = torch.full((1, 40), torch.nan)
    gpu.apply_bitmask(logits, torch.tensor([[1 << 5, 0]], dtype=torch.int32))
    assert logits.isnan().nonzero().tolist() == [[0, 5]]


def test_no_masks() -> None:
    logits = drawn(2, 40)
    before = logits.clone()
    gpu.apply_bitmask(logits, torch.empty(0, 2, dtype=torch.int32), torch.empty(0, dtype=torch.int64))
    assert torch.equal(logits, before)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_mask(data: st.DataObject) -> None:
    vocab, count = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 4))
    words = st.lists(
        st.integers(-(1 << 31), (1 << 31) - 1),
        min_size=pytorch.bitmask_width(vocab),
        max_size=pytorch.bitmask_width(vocab),
    )
    masks = torch.tensor([data.draw(words) for _ in range(count)], dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "_WORDS", data.draw(st.sampled_from([1, 4])))
        check(drawn(5, vocab), masks, torch.randperm(5)[:count])
