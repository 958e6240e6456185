"""Penalties, biases and masks against transformers' own processors, vLLM's rule and formulas written out."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from batchgen.kernels.noise import row_keys
from batchgen.kernels.sampling import SamplingColumns, sample
from batchgen.kernels.shaping import add_bias, drew_masked, keep_only, penalise


def drawn_logits(rows: int, vocab: int, seed: int) -> Tensor:
    logits = 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    logits[0, 0] = 0.0
    logits[-1, vocab // 2] = -torch.inf
    return logits


def histories(rows: int, vocab: int, seed: int, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, size=int(rng.integers(0, longest))).tolist() for _ in range(rows)]


def triples(outputs: list[list[int]], prompts: list[list[int]] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, ids, counts), prompt tokens with a count of 0."""
    found: list[tuple[int, int, int]] = []
    for row, output in enumerate(outputs):
        counts = Counter(output)
        seen = dict.fromkeys([*(prompts[row] if prompts else []), *output])
        found += [(row, token, counts[token]) for token in seen]
    table = torch.tensor(found, dtype=torch.int64).view(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2].float()


def column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.field("repetition_penalty")
@pytest.mark.parametrize(("rows", "vocab"), [(1, 2), (7, 63), (5, 1000)])
@pytest.mark.parametrize("scope", ["output", "prompt+output"])
def test_repetition_is_that_of_transformers(rows: int, vocab: int, scope: str) -> None:
    logits = drawn_logits(rows, vocab, rows)
    outputs, prompts = histories(rows, vocab, 1), histories(rows, vocab, 2)
    factors = [0.4 + 0.3 * (i % 6) for i in range(rows)]
    expected = logits.clone()
    for row in range(rows):
        seen = outputs[row] + (prompts[row] if scope == "prompt+output" else [])
        if seen:
            ids = torch.tensor([seen])
            expected[row] = RepetitionPenaltyLogitsProcessor(factors[row])(ids, logits[row : row + 1].clone())[0]
    zeros = torch.zeros(rows)
    penalise(logits, *triples(outputs, prompts if "prompt" in scope else None), column(factors), zeros, zeros)
    assert torch.equal(logits, expected)


@pytest.mark.field("frequency_penalty", "presence_penalty", "repetition_penalty")
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_all_three_follow_the_formula(data: st.DataObject) -> None:
    rows, vocab = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 60))
    logits = drawn_logits(rows, vocab, data.draw(st.integers(0, 99)))
    tokens = st.lists(st.integers(0, vocab - 1), max_size=30)
    outputs, prompts = ([data.draw(tokens) for _ in range(rows)] for _ in range(2))
    signed = st.floats(-2, 2, width=32)
    f, p = ([data.draw(signed) for _ in range(rows)] for _ in range(2))
    r = [data.draw(st.floats(0.0625, 2, width=32)) for _ in range(rows)]
    expected = logits.double()
    for row in range(rows):
        for token in set(outputs[row]) | set(prompts[row]):
            value = expected[row, token]
            value = value / r[row] if value > 0 else value * r[row]
            count = outputs[row].count(token)
            expected[row, token] = value - f[row] * count - p[row] * (count > 0)
    penalise(logits, *triples(outputs, prompts), column(r), column(f), column(p))
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("factor", [1e-45, 1e-38, 2.0])
def test_no_penalty_makes_a_row_unusable(factor: float) -> None:
    logits = torch.tensor([[3.0, -3.0, 0.0, -torch.inf, 1.0]])
    rows, ids = torch.zeros(4, dtype=torch.int64), torch.arange(4)
    penalise(logits, rows, ids, torch.ones(4), column([factor]), torch.zeros(1), torch.zeros(1))
    assert torch.isfinite(logits).tolist() == [[True, True, True, False, True]]
    assert logits.argmax() == 0


@pytest.mark.field("logit_bias")
def test_bias_is_that_of_transformers() -> None:
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


@pytest.mark.field("allowed_token_ids")
def test_keeping_some_is_suppressing_the_others() -> None:
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


def test_rows_that_are_not_named_are_not_touched() -> None:
    logits = drawn_logits(6, 40, 5)
    before = logits.clone()
    one = torch.tensor([2, 2])
    penalise(logits, one, torch.tensor([1, 7]), torch.ones(2), torch.full((6,), 1.5), torch.ones(6), torch.ones(6))
    add_bias(logits, one, torch.tensor([3, 3]), torch.ones(2))
    keep_only(logits, one[:1], one, torch.tensor([1, 7]))
    others = [0, 1, 3, 4, 5]
    assert torch.equal(logits[others], before[others])
    assert not torch.equal(logits[2], before[2])


def test_biases_of_a_token_named_twice_add_up() -> None:
    logits = torch.zeros(1, 3)
    add_bias(logits, torch.tensor([0, 0]), torch.tensor([1, 1]), torch.tensor([2.0, 0.5]))
    assert logits.tolist() == [[0.0, 2.5, 0.0]]


def test_a_masked_token_is_drawn_only_where_all_are_masked() -> None:
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
