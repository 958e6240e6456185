"""Packed token masks against xgrammar's implementation and against a loop."""

from __future__ import annotations

import pytest
import torch
import xgrammar

from batchgen.kernels.bitmask import apply_bitmask, bitmask_width

SIZES = [1, 31, 32, 33, 63, 64, 100, 1000, 32_003]


def random_logits_and_masks(rows: int, vocab: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and masks with about a third of their bits set, also past the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator)
    bits = torch.rand(rows, bitmask_width(vocab) * 32, generator=generator) < 0.3
    words = (bits.view(rows, -1, 32).long() << torch.arange(32)).sum(-1)
    return logits, torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def apply_by_xgrammar(logits: torch.Tensor, masks: torch.Tensor) -> None:
    """xgrammar's in plain torch: its C++ writes past the end of rows whose size is not a multiple of a word."""
    xgrammar.apply_token_bitmask_inplace(logits, masks, vocab_size=logits.shape[1], backend="torch_native")


@pytest.mark.parametrize("vocab", SIZES)
def test_equals_a_loop(vocab: int) -> None:
    logits, masks = random_logits_and_masks(2, vocab, seed=vocab)
    expected = logits.clone()
    for row in range(2):
        for token in range(min(vocab, 1000)):
            if not int(masks[row, token // 32]) >> token % 32 & 1:
                expected[row, token] = -torch.inf
    apply_bitmask(logits, masks)
    assert torch.equal(logits[:, :1000], expected[:, :1000])


@pytest.mark.parametrize("rows", [1, 5, 63])
@pytest.mark.parametrize("vocab", SIZES)
def test_equals_xgrammar(rows: int, vocab: int) -> None:
    logits, masks = random_logits_and_masks(rows, vocab, seed=rows)
    expected = logits.clone()
    apply_by_xgrammar(expected, masks)
    apply_bitmask(logits, masks)
    assert torch.equal(logits, expected)


def test_rows_without_a_mask_are_unchanged() -> None:
    logits, masks = random_logits_and_masks(9, 1000, seed=1)
    index = [7, 0, 3]
    expected = logits.clone()
    for mask, row in zip(masks, index, strict=False):
        apply_by_xgrammar(expected[row : row + 1], mask[None])
    before = logits.clone()
    apply_bitmask(logits, masks[:3], torch.tensor(index))
    assert torch.equal(logits, expected)
    others = [row for row in range(9) if row not in index]
    assert torch.equal(logits[others], before[others])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_floating_type(dtype: torch.dtype) -> None:
    logits, masks = random_logits_and_masks(3, 100, seed=2)
    small = logits.to(dtype)
    apply_bitmask(small, masks)
    apply_bitmask(logits, masks)
    assert torch.equal(small.isinf(), logits.isinf())
