"""Biases and masks against transformers' and xgrammar's own."""

from __future__ import annotations

import itertools

import pytest
import torch
import xgrammar
from torch import Tensor
from transformers import SequenceBiasLogitsProcessor, SuppressTokensLogitsProcessor

from batchgen.kernels.noise import row_keys
from batchgen.kernels.sampling import SamplingColumns, sample
from batchgen.kernels.shaping import add_bias, apply_bitmask, bitmask_width, drew_masked, keep_only


def drawn_logits(rows: int, vocab: int, seed: int) -> Tensor:
    logits = 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    logits[0, 0] = 0.0
    logits[-1, vocab // 2] = -torch.inf
    return logits


@pytest.mark.field("logit_bias")
def test_bias_equals_transformers() -> None:
    logits = drawn_logits(3, 50, 3)
    biases = [{4: 2.5, 49: -100.0}, {}, {0: 100.0}]
    expected = logits.clone()
    for row, bias in enumerate(biases):
        if bias:
            processor = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
            expected[row] = processor(torch.tensor([[1, 2]]), logits[row : row + 1].clone())[0]
    pairs = [(row, token, value) for row, bias in enumerate(biases) for token, value in bias.items()]
    rows, ids, values = zip(*pairs, strict=True)
    add_bias(logits, torch.tensor(rows), torch.tensor(ids), torch.tensor(values))
    assert torch.equal(logits, expected)
    zeros = torch.zeros(1, 3)
    add_bias(zeros, torch.tensor([0, 0]), torch.tensor([1, 1]), torch.tensor([2.0, 0.5]))
    assert zeros.tolist() == [[0.0, 2.5, 0.0]], "biases of a repeated token are added"


@pytest.mark.field("allowed_token_ids")
def test_keep_only_equals_suppressing_the_others() -> None:
    logits = drawn_logits(4, 30, 4)
    keep = {0: [3, 29], 2: [0], 3: list(range(30))}
    expected = logits.clone()
    for row, ids in keep.items():
        others = [token for token in range(30) if token not in ids]
        if others:
            processor = SuppressTokensLogitsProcessor(others, device="cpu")
            expected[row] = processor(torch.tensor([[1]]), logits[row : row + 1].clone())[0]
    pairs = torch.tensor([(row, token) for row, ids in keep.items() for token in ids])
    keep_only(logits, torch.tensor(list(keep)), pairs[:, 0], pairs[:, 1])
    assert torch.equal(logits, expected)


def test_a_masked_token_is_drawn_only_if_all_are_masked() -> None:
    mixes = list(itertools.product([0.0, 1.0], [-1, 1, 3], [1.0, 0.3], [0.0, 0.2]))
    for left in (0, 1, 3):
        logits = torch.randn(len(mixes), 500, generator=torch.Generator().manual_seed(left))
        kept = torch.arange(left) * 7
        whole = torch.arange(0, len(mixes), 2)
        keep_only(logits, whole, whole.repeat_interleave(left), kept.repeat(len(whole)))
        columns = SamplingColumns.of(*zip(*mixes, strict=True))  # type: ignore[arg-type]
        keys = row_keys(*(torch.arange(len(mixes)) for _ in range(3)))
        tokens = sample(logits, columns.with_keys(keys)).tokens
        everyone = torch.arange(len(mixes))
        assert everyone[drew_masked(logits, everyone, tokens)].tolist() == ([] if left else whole.tolist())


@pytest.mark.parametrize("index", [None, [7, 0, 3]], ids=["all", "some"])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 63, 64, 1000, 32_003])
def test_packed_masks_equal_xgrammar(vocab: int, index: list[int] | None) -> None:
    """About a third of the bits are set, also past the vocabulary; rows without a mask are unchanged."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(9, vocab, generator=generator)
    places = list(range(9)) if index is None else index
    bits = torch.rand(len(places), bitmask_width(vocab), 32, generator=generator) < 0.3
    words = (bits.long() << torch.arange(32)).sum(-1)
    masks = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    expected, half = logits.clone(), logits.bfloat16()
    for mask, row in zip(masks, places, strict=True):
        # In plain torch: xgrammar's C++ writes past the end of rows whose size is not a multiple of a word.
        one = expected[row : row + 1]
        xgrammar.apply_token_bitmask_inplace(one, mask[None], vocab_size=vocab, backend="torch_native")
    for found in (logits, half):
        apply_bitmask(found, masks, None if index is None else torch.tensor(index))
    assert torch.equal(logits, expected)
    assert torch.equal(half, expected.bfloat16())
