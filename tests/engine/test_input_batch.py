"""`InputBatch`, against sequences that receive each token separately."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from batchgen.engine.sequence import Sequence
from batchgen.engine.step.input_batch import BatchView, InputBatch
from batchgen.request.fields.params import SamplingParams
from batchgen.request.table.request_table import Request
from batchgen.text.stops.conditions import StopState
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.engine.reference import save_word_tokenizer

VOCAB = 40
EOS = frozenset({2, 7})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("words")
    save_word_tokenizer(folder, VOCAB)
    return Tokenizer.load(folder)


def some_sequence(tokenizer: Tokenizer, index: int, rng: Random, *, plain: bool = False) -> tuple[Sequence, Sequence]:
    """Two sequences of the same sample, one as the reference. `plain`: without text stops and other conditions."""
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
    one, other = (Sequence(request, 0, StopState(params, EOS, tokenizer), {}, None) for _ in range(2))
    return one, other


@pytest.mark.parametrize("all_plain", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_batched_appends_equal_single_ones(tokenizer: Tokenizer, seed: int, all_plain: bool) -> None:
    """Ends, output ids and the number of discarded tokens, if a step is read at once or one step late.

    `all_plain`: only plain rows, which mostly stay together from step to step.
    """
    rng, batch = Random(seed), InputBatch()
    running: dict[int, tuple[Sequence, Sequence]] = {}
    late: list[BatchView] = []
    tokens_of: dict[int, list[int]] = {}
    number = plain = discarded = 0
    numbers_sampled: np.ndarray | None = None  # type: ignore[type-arg]
    for _ in range(400):
        while len(running) < 90 and rng.random() < (0.3 if all_plain else 0.9):
            running[number] = some_sequence(tokenizer, number, rng, plain=all_plain)
            batch.add(number, running[number][0], plain=all_plain or rng.random() < 0.9)
            tokens_of[number] = []
            number += 1
        others = numbers_sampled is None or not all_plain or rng.random() < 0.1
        if others or not running.keys() >= set(numbers_sampled.tolist()):
            least, most = min(len(running) // 2, 5), min(len(running), 9 if all_plain else 90)
            numbers_sampled = np.array(rng.sample(sorted(running), rng.randint(least, most)), np.int64)
        rows = batch.rows(numbers_sampled)
        rows.count_sampled()
        late.append(rows)
        assert all(rows[i] is running[n][0] for i, n in enumerate(numbers_sampled.tolist()))
        if len(late) < 1 + seed % 2:
            continue
        rows = late.pop(0)
        tokens = np.array([rng.randrange(VOCAB) for _ in range(len(rows))], np.int64)
        excluded = [i for i, n in enumerate(rows.sequence_ids.tolist()) if n in running and rng.random() < 0.005]
        notified, discarded_now = batch.append_tokens(rows, tokens, excluded)
        ended = []
        for place, one in enumerate(rows.sequence_ids.tolist()):
            if one not in running:
                discarded += 1
                discarded_now -= 1
                assert place not in notified
                continue
            mine, oracle = running[one]
            if place in excluded:
                assert place in notified
                ended.append(one)
                continue
            token = int(tokens[place])
            tokens_of[one].append(token)
            ends = oracle.append(token)
            if place in notified:
                assert mine.append(token) == ends
                plain += ends and mine.plain
            assert batch.output_ids(one).tolist() == tokens_of[one]
            assert batch.last_token[batch.slots(np.array([one]))] == token
            assert ends <= (place in notified)
            if ends:
                assert mine.output_ids == oracle.output_ids
                assert (mine.finish_reason, mine.stops.event) == (oracle.finish_reason, oracle.stops.event)
                ended.append(one)
        assert discarded_now == 0
        assert notified == sorted(notified)
        for one in ended:
            batch.mark_ended(one)
            if rng.random() < 0.9:  # the slot may be reused while a token is in flight
                batch.remove(one)
            del running[one]
    assert number > (100 if all_plain else 300)
    assert plain > 50
    assert (discarded > 0) == bool(seed % 2)


def test_sampled_tokens_are_counted_per_sequence(tokenizer: Tokenizer) -> None:
    batch, rng = InputBatch(), Random(1)
    made = [some_sequence(tokenizer, i, rng)[0] for i in range(100)]
    assert made[0].num_sampled == 0
    for i, sequence in enumerate(made):
        batch.add(i, sequence, plain=True)
    for _ in range(3):
        batch.rows(np.arange(40)).count_sampled()
    batch.rows(np.arange(39, 100)).count_sampled()
    assert [sequence.num_sampled for sequence in made] == [3] * 39 + [4] + [1] * 60


@pytest.mark.field("temperature")
def test_a_temperature_above_float32_stays_finite(tokenizer: Tokenizer) -> None:
    batch, sequence = InputBatch(), some_sequence(tokenizer, 0, Random(1))[0]
    sequence.request = replace(sequence.request, params=replace(sequence.request.params, temperature=1e39))
    with np.errstate(over="raise"):
        batch.add(0, sequence, plain=True)
    assert np.isfinite(batch.temperature).all()
