"""Samples as columns, against sequences that are told of each token one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from batchgen.engine.row_table import Rows, RowTable
from batchgen.engine.sequence import Sequence
from batchgen.params import SamplingParams
from batchgen.request import Request
from batchgen.text.stops import StopState
from batchgen.text.tokenizer import Tokenizer
from tests.engine.reference import save_word_tokenizer

VOCAB = 40
EOS = frozenset({2, 7})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("words")
    save_word_tokenizer(folder, VOCAB)
    return Tokenizer.load(folder)


def some_sequence(tokenizer: Tokenizer, index: int, rng: Random, *, plain: bool = False) -> tuple[Sequence, Sequence]:
    """A sample twice, one of them to be told of every token. `plain`: one that follows nothing."""
    longest = rng.choice([1, 2, 9, 70, 300])
    params = SamplingParams(
        max_new_tokens=longest,
        temperature=rng.choice([0.0, 0.7]),
        top_k=rng.choice([-1, 5]),
        seed=index,
        ignore_eos=rng.random() < 0.7,
        stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 0, 1, 3 if plain else 20]))),
        min_new_tokens=rng.choice([0, 0, min(longest, 3)]),
        stop=("zz",) if rng.random() < 0.2 and not plain else (),
        return_logprob=rng.random() < 0.1 and not plain,
    )
    request = Request(index, index, 0, np.array([4, 5], np.int32), params, index, longest)
    one, other = (Sequence(request, 0, StopState(params, EOS, tokenizer), (), None) for _ in range(2))
    return one, other


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_all_at_once_equals_one_by_one(tokenizer: Tokenizer, seed: int, alike: bool) -> None:
    """Ends, the tokens of whoever ended, and those drawn in vain, where a step is read one step late or at once.

    `alike`: plain rows alone, which go on together from step to step.
    """
    rng, table = Random(seed), RowTable()
    running: dict[int, tuple[Sequence, Sequence]] = {}
    late: list[Rows] = []
    tokens_of: dict[int, list[int]] = {}
    number = plain = overrun = 0
    drawn: np.ndarray | None = None  # type: ignore[type-arg]
    for _ in range(400):
        while len(running) < 90 and rng.random() < (0.3 if alike else 0.9):
            running[number] = some_sequence(tokenizer, number, rng, plain=alike)
            table.begin(number, running[number][0], plain=alike or rng.random() < 0.9)
            tokens_of[number] = []
            number += 1
        if drawn is None or not alike or rng.random() < 0.1 or not running.keys() >= set(drawn.tolist()):
            some = rng.sample(
                sorted(running), rng.randint(min(len(running) // 2, 5), min(len(running), 9 if alike else 90))
            )
            drawn = np.array(some, np.int64)
        rows = table.rows(drawn)
        rows.drew()
        late.append(rows)
        assert [rows[i] is running[n][0] for i, n in enumerate(drawn.tolist())] == [True] * len(drawn)
        if len(late) < 1 + seed % 2:
            continue
        rows = late.pop(0)
        tokens = np.array([rng.randrange(VOCAB) for _ in range(len(rows))], np.int64)
        apart = [i for i, n in enumerate(rows.numbers.tolist()) if n in running and rng.random() < 0.005]
        told, vain = table.take(rows, tokens, apart)
        ended = []
        for place, one in enumerate(rows.numbers.tolist()):
            if one not in running:
                overrun += 1
                vain -= 1
                assert place not in told
                continue
            mine, oracle = running[one]
            if place in apart:
                assert place in told
                ended.append(one)
                continue
            token = int(tokens[place])
            tokens_of[one].append(token)
            ends = oracle.append(token)
            if place in told:
                assert mine.append(token) == ends
                plain += ends and mine.plain
            assert table.output_ids(one).tolist() == tokens_of[one]
            assert table.last[table.slots(np.array([one]))] == token
            assert ends <= (place in told)
            if ends:
                assert mine.output_ids == oracle.output_ids
                assert (mine.finish_reason, mine.stops.event) == (oracle.finish_reason, oracle.stops.event)
                ended.append(one)
        assert vain == 0
        assert told == sorted(told)
        for one in ended:
            table.close(one)
            if rng.random() < 0.9:  # the slot goes to someone else while a draw may be on its way
                table.leave(one)
            del running[one]
    assert number > (100 if alike else 300)
    assert plain > 50
    assert (overrun > 0) == bool(seed % 2)


def test_draws_are_counted_by_sequence(tokenizer: Tokenizer) -> None:
    table, rng = RowTable(), Random(1)
    made = [some_sequence(tokenizer, i, rng)[0] for i in range(100)]
    assert made[0].drawn == 0
    for i, sequence in enumerate(made):
        table.begin(i, sequence, plain=True)
    for _ in range(3):
        table.rows(np.arange(40)).drew()
    table.rows(np.arange(39, 100)).drew()
    assert [sequence.drawn for sequence in made] == [3] * 39 + [4] + [1] * 60


@pytest.mark.field("temperature")
def test_a_temperature_past_float32_stays_finite(tokenizer: Tokenizer) -> None:
    table, sequence = RowTable(), some_sequence(tokenizer, 0, Random(1))[0]
    sequence.request = replace(sequence.request, params=replace(sequence.request.params, temperature=1e39))
    with np.errstate(over="raise"):
        table.begin(0, sequence, plain=True)
    assert np.isfinite(table.temperature).all()
