"""Log-probabilities in PyTorch, where `test_ops.py` does not compare them with float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchgen.kernels.logprobs import (
    argmax_lse,
    gather_logprobs,
    log_normalizers,
    mask_tokens,
    token_logprobs,
    top_logprobs,
)


@pytest.mark.field("top_logprobs_num")
@pytest.mark.parametrize(("rows", "vocab", "k"), [(4, 1, 1), (7, 63, 63), (50, 8192, 20)])
def test_top_logprobs_come_most_likely_first_with_ties_by_id(rows: int, vocab: int, k: int) -> None:
    logits = (5 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1))).bfloat16().float()
    ids, values = top_logprobs(logits, k)
    exact = torch.log_softmax(logits.double(), -1)
    for row in range(rows):
        order = np.lexsort((np.arange(vocab), -logits[row].numpy()))[:k]
        assert ids[row].tolist() == order.tolist()
    torch.testing.assert_close(values.double(), exact.gather(1, ids), rtol=0, atol=1e-5)
    one = torch.randint(0, vocab, (rows, 1), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(
        token_logprobs(logits, one[:, 0]).double(), exact.gather(1, one)[:, 0], rtol=0, atol=1e-5
    )


def test_masked_tokens_have_no_mass() -> None:
    logits = torch.zeros(3, 4)
    mask_tokens(logits, torch.tensor([0, 0, 2]), torch.tensor([1, 3, 0]))
    assert torch.isinf(logits).nonzero().tolist() == [[0, 1], [0, 3], [2, 0]]
    torch.testing.assert_close(token_logprobs(logits, torch.tensor([0, 0, 0]))[:2], -torch.tensor([2.0, 4.0]).log())


def test_argmax_comes_with_its_lse() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [torch.nan, 0.0, 0.0], [torch.inf, 0.0, 0.0], [-torch.inf] * 3])
    ids, largest, normalizers, bad = argmax_lse(logits)
    assert bad.tolist() == [False, True, True, True]
    assert ids[0] == 1
    assert largest[0] == 3.0
    torch.testing.assert_close(largest[0] - normalizers[0], torch.log_softmax(logits[0], -1)[1])
    assert bool(((ids >= 0) & (ids < 3)).all())
    assert normalizers[1].isnan()
    assert normalizers[2:].tolist() == [torch.inf, -torch.inf]


@pytest.mark.field("return_logprob")
@pytest.mark.parametrize(("k", "dtype"), [(0, torch.float32), (4, torch.float32), (4, torch.bfloat16)])
def test_gather_logprobs_equals_its_parts(k: int, dtype: torch.dtype) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(k)).to(dtype)
    targets = torch.arange(5) * 7
    found = gather_logprobs(logits, targets, k)
    assert torch.equal(found.normalizers, log_normalizers(logits))
    assert torch.equal(found.targets, token_logprobs(logits, targets))
    assert torch.equal(found.targets, token_logprobs(logits, targets, found.normalizers))
    assert token_logprobs(logits[:0], targets[:0]).shape == (0,)
    assert found.top_ids.shape == found.top.shape == (5, k)
    if k:
        ids, values = top_logprobs(logits, k)
        assert torch.equal(found.top_ids, ids)
        assert torch.equal(found.top, values)
    assert {t.dtype for t in (found.normalizers, found.targets, found.top)} == {torch.float32}
