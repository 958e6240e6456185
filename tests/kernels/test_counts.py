"""Token counts against Python counters; penalties against transformers' processor and the formulas."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from batchgen.kernels.counts import CountLists, Penalties, count_tokens, penalise
from tests.cases import examples
from tests.kernels.penalised import expected_penalties, listed, lists_of


def drawn_logits(rows: int, vocab: int, seed: int) -> Tensor:
    logits = 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    logits[0, 0] = 0.0
    logits[-1, vocab // 2] = -torch.inf
    return logits


def histories(rows: int, vocab: int, seed: int, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, size=int(rng.integers(0, longest))).tolist() for _ in range(rows)]


def column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.field("repetition_penalty")
@pytest.mark.parametrize(("rows", "vocab"), [(1, 2), (7, 63), (5, 1000)])
@pytest.mark.parametrize("scope", ["output", "prompt+output"])
def test_repetition_equals_transformers(rows: int, vocab: int, scope: str) -> None:
    logits = drawn_logits(rows, vocab, rows)
    outputs, prompts = histories(rows, vocab, 1), histories(rows, vocab, 2)
    factors = [0.4 + 0.3 * (i % 6) for i in range(rows)]
    expected = logits.clone()
    for row in range(rows):
        seen = outputs[row] + (prompts[row] if scope == "prompt+output" else [])
        if seen:
            ids = torch.tensor([seen])
            expected[row] = RepetitionPenaltyLogitsProcessor(factors[row])(ids, logits[row : row + 1].clone())[0]
    zeros, places = torch.zeros(rows), torch.arange(rows)
    lists = lists_of(outputs, prompts if "prompt" in scope else None)
    penalise(logits, places, places + 1, lists, Penalties(column(factors), zeros, zeros), int(lists.used.max()) or 1)
    assert torch.equal(logits, expected)


@pytest.mark.field("frequency_penalty", "presence_penalty", "repetition_penalty")
@examples(60)
@given(st.data())
def test_all_penalties_follow_the_formula(data: st.DataObject) -> None:
    rows, vocab = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 60))
    logits = drawn_logits(rows, vocab, data.draw(st.integers(0, 99)))
    tokens = st.lists(st.integers(0, vocab - 1), max_size=30)
    outputs, prompts = ([data.draw(tokens) for _ in range(rows)] for _ in range(2))
    signed = st.floats(-2, 2, width=32)
    f, p = ([data.draw(signed) for _ in range(rows)] for _ in range(2))
    r = [data.draw(st.floats(0.0625, 2, width=32)) for _ in range(rows)]
    lists = lists_of(outputs, prompts)
    order = data.draw(st.permutations(range(rows)))[: data.draw(st.integers(0, rows))]
    slots = [data.draw(st.sampled_from([row + 1, row + 1, 0, -1])) for row in order]
    expected = logits.double()
    for row, slot in zip(order, slots, strict=True):
        expected_penalties(expected, row, listed(lists, max(slot, 0)), r[row], f[row], p[row])
    width = data.draw(st.integers(max(1, int(lists.used.max())), lists.ids.shape[1]))
    columns = [column(values)[list(order)] for values in (r, f, p)]
    penalise(logits, *(torch.tensor(x, dtype=torch.int64) for x in (order, slots)), lists, Penalties(*columns), width)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("factor", [1e-45, 1e-38, 2.0])
def test_no_penalty_makes_a_row_unusable(factor: float) -> None:
    logits = torch.tensor([[3.0, -3.0, 0.0, -torch.inf, 1.0]])
    lists = lists_of([[0, 1, 2, 3]])
    one = torch.tensor([0])
    penalise(logits, one, one + 1, lists, Penalties(column([factor]), torch.zeros(1), torch.zeros(1)), 4)
    assert torch.isfinite(logits).tolist() == [[True, True, True, False, True]]
    assert logits.argmax() == 0


@pytest.mark.field("frequency_penalty")
@pytest.mark.parametrize("seed", range(2))
def test_token_counts_equal_a_counter(seed: int) -> None:
    """Steps of changing rows in changing order, some of them without a slot."""
    rng, vocab = Random(seed), 30
    prompts = histories(6, vocab, seed, longest=12)
    lists = lists_of([[]] * 6, prompts).grown(7, 64)
    expected = [dict.fromkeys(prompt, 0.0) for prompt in prompts]
    for _ in range(60):
        slots = rng.sample(range(1, 7), rng.randint(0, 6)) + [0, -1, 0][: rng.randint(0, 3)]
        rng.shuffle(slots)
        drawn = [rng.randrange(vocab) for _ in range(9)]
        rows = rng.sample(range(9), len(slots))
        for slot, row in zip(slots, rows, strict=True):
            if slot > 0:
                expected[slot - 1][drawn[row]] = expected[slot - 1].get(drawn[row], 0.0) + 1
        at = [torch.tensor(x, dtype=torch.int64) for x in (slots, rows, drawn)]
        count_tokens(lists, *at, rng.randint(vocab, 64))
    assert [listed(lists, slot) for slot in range(1, 7)] == expected
    assert listed(lists, 0) == {}


def test_lists_grow_and_keep_their_entries() -> None:
    lists = lists_of([[3, 3, 5], [], [1]])
    grown = lists.grown(9, 33)
    assert (grown.ids.shape, grown.counts.shape, grown.used.shape) == ((9, 33), (9, 33), (9,))
    assert [listed(grown, slot) for slot in range(9)] == [{}, {3: 2, 5: 1}, {}, {1: 1}, {}, {}, {}, {}, {}]
    assert CountLists.empty(2, 4, torch.device("cpu")).used.tolist() == [0, 0]
