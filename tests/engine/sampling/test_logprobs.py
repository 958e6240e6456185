"""Logprobs of running sequences, up to the table of a part, against lists that grow token by token."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from batchgen.data.schema import OutputRow, completions_to_table
from batchgen.engine.sequence import Sequence
from batchgen.engine.step.input_batch import InputBatch
from batchgen.engine.step.logprobs import LogprobColumns, LogprobsGatherer, StepLogprobs, plain_logprobs
from batchgen.kernels.device import HOST, as_array
from batchgen.kernels.invariant import INVARIANT_OPS
from batchgen.kernels.ops import TORCH_OPS, Ops
from batchgen.kernels.sampling import SamplingColumns
from batchgen.request.completion import Completion
from batchgen.request.fields.params import SamplingParams
from batchgen.request.table.request_table import Request
from batchgen.text.stops.conditions import StopState
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.engine.reference import save_word_tokenizer

VOCAB = 40
DTYPES = {"logprobs": np.float32, "top_ids": np.int32, "top_logprobs": np.float32, "ids_logprobs": np.float32}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("words")
    save_word_tokenizer(folder, VOCAB)
    return Tokenizer.load(folder)


@dataclass
class Expected:
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)
    ids_logprobs: list[float] = field(default_factory=list)

    def columns(self, params: SamplingParams) -> dict[str, object]:
        """The row of the output."""
        total, returned = sum(self.logprobs), params.return_logprob
        return {
            "output_logprobs": self.logprobs if returned else None,
            "output_top_ids": self.top_ids if returned and params.top_logprobs_num else None,
            "output_top_logprobs": self.top_logprobs if returned and params.top_logprobs_num else None,
            "output_ids_logprobs": self.ids_logprobs if returned and params.token_ids_logprob else None,
            "cumulative_logprob": total if returned else None,
            "mean_logprob": total / len(self.logprobs) if returned and self.logprobs else None,
        }


def some_sequence(tokenizer: Tokenizer, index: int, rng: Random) -> Sequence:
    """A sequence that often returns logprobs."""
    params = SamplingParams(
        max_new_tokens=500,
        return_logprob=rng.random() < 0.8,
        top_logprobs_num=rng.choice([0, 0, 1, 3, 7]),
        token_ids_logprob=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 1, 4]))),
    )
    request = Request(index, index, 0, np.array([4, 5], np.int32), params, index, 500)
    return Sequence(request, 0, StopState(params, frozenset(), tokenizer), {}, None)


def found_of(rng: np.random.Generator, sequences: list[Sequence], places: list[int]) -> StepLogprobs:
    """Random logprobs for the given rows of a step, with the largest widths of their parameters."""
    params = [sequence.request.params for sequence in sequences]
    size, width = (len(places), max(p.top_logprobs_num for p in params)), max(len(p.token_ids_logprob) for p in params)
    top = rng.standard_normal(size).astype(np.float32)
    top[rng.random(size) < 0.1] = -np.inf
    return StepLogprobs(
        np.array(places, np.int64),
        rng.standard_normal(len(places)).astype(np.float32),
        rng.integers(0, 150_000, size),
        top,
        rng.standard_normal((len(places), width)).astype(np.float32),
    )


@pytest.mark.parametrize("seed", range(4))
def test_columns_equal_lists(tokenizer: Tokenizer, seed: int) -> None:
    """Sequences start and end in any step; a step may be read one step late, when a slot has been reused."""
    rng, numbers = Random(seed), np.random.default_rng(seed)
    batch, columns = InputBatch(), LogprobColumns([1, 3, 8, 64][seed])
    running: dict[int, tuple[Sequence, Expected]] = {}
    late, ended, wanted = [], [], []
    number = handed = discarded = 0
    for _ in range(300):
        while len(running) < 90 and (not running or rng.random() < 0.9):
            running[number] = some_sequence(tokenizer, number, rng), Expected()
            batch.add(number, running[number][0], plain=False)
            number += 1
        rows = batch.rows(np.array(rng.sample(sorted(running), rng.randint(1, len(running))), np.int64))
        drawn = [running[n][0] for n in rows.sequence_ids.tolist()]
        places = [i for i, s in enumerate(drawn) if s.request.params.needs_logprobs]
        if places:
            late.append((rows, found_of(numbers, [drawn[i] for i in places], places)))
        if len(late) <= seed % 2:
            continue
        rows, found = late.pop(0)
        columns.append(rows, found)
        for w, place in enumerate(found.rows.tolist()):
            if int(rows.sequence_ids[place]) not in running:
                discarded += 1
                continue
            sequence, expected = running[int(rows.sequence_ids[place])]
            params = sequence.request.params
            expected.logprobs.append(found.logprobs.tolist()[w])
            expected.top_ids += found.top_ids[w, : params.top_logprobs_num].tolist()
            expected.top_logprobs += found.top_logprobs[w, : params.top_logprobs_num].tolist()
            expected.ids_logprobs += found.ids_logprobs[w, : len(params.token_ids_logprob)].tolist()
            sequence.append(5)
            assert columns.last_logprob(batch.slot(int(rows.sequence_ids[place]))) == expected.logprobs[-1]
        for one in [n for n in running if rng.random() < 0.02]:
            sequence, expected = running.pop(one)
            if sequence.request.params.needs_logprobs:
                if expected.logprobs and rng.random() < 0.3:  # its last token was discarded
                    sequence.output_ids.pop()
                    expected = _without_last(expected, sequence.request.params)
                columns.finish(batch.slot(one), sequence)
                handed += len(expected.logprobs)
            for name, dtype in DTYPES.items():
                found = getattr(sequence, name)
                assert (found.dtype, found.ndim, found.tolist()) == (dtype, 1, getattr(expected, name)), name
            sequence.finish_reason = "length"
            ended.append(OutputRow(sequence.completion(0, prompt_ids=False), "x"))
            wanted.append(expected.columns(sequence.request.params))
            batch.mark_ended(one)
            batch.remove(one)
    assert completions_to_table(ended).select(list(wanted[0])).to_pylist() == wanted
    assert handed > 1000
    assert (discarded > 0) == bool(seed % 2)


def _without_last(expected: Expected, params: SamplingParams) -> Expected:
    top = len(expected.top_logprobs) - params.top_logprobs_num
    ids_logprobs = len(expected.ids_logprobs) - len(params.token_ids_logprob)
    tops = expected.top_ids[:top], expected.top_logprobs[:top]
    return Expected(expected.logprobs[:-1], *tops, expected.ids_logprobs[:ids_logprobs])


@pytest.mark.parametrize("ops", [TORCH_OPS, INVARIANT_OPS], ids=["torch", "invariant"])
def test_logprobs_of_all_rows_are_those_of_the_rows_that_return_them(tokenizer: Tokenizer, ops: Ops) -> None:
    """The same bits, whether a graph computes them for all rows of a step or the step for some."""
    batch, tops = InputBatch(), [3, None, 0, 7, None, 1]
    for number, top in enumerate(tops):
        params = SamplingParams(max_new_tokens=9, return_logprob=top is not None, top_logprobs_num=top or 0)
        request = Request(number, number, 0, np.array([4, 5], np.int32), params, number, 9)
        batch.add(number, Sequence(request, 0, StopState(params, frozenset(), tokenizer), {}, None), plain=True)
    places = np.array([i for i, top in enumerate(tops) if top is not None])
    sampling = SamplingColumns.of(*np.zeros((4, len(tops))))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(tops), VOCAB, generator=generator).to(torch.bfloat16)
    tokens = torch.randint(VOCAB, (len(tops),), generator=generator)
    gatherer = LogprobsGatherer(batch.rows(np.arange(len(tops))), places, (), sampling, "raw", HOST, ops)
    some = gatherer.gather(logits, tokens, gatherer.gather_raw(logits))
    for k in (7, 11):
        assert gatherer.fits_graph(k)
        want = gatherer.to_host([as_array(tensor) for tensor in some])
        got = gatherer.to_host([as_array(tensor) for tensor in plain_logprobs(logits, tokens, k, ops)])
        assert np.array_equal(got.rows, want.rows)
        assert np.array_equal(got.logprobs, want.logprobs)
        assert np.array_equal(got.top_ids[:, :7], want.top_ids)
        assert np.array_equal(got.top_logprobs[:, :7], want.top_logprobs)


def test_memory_follows_the_tokens(tokenizer: Tokenizer) -> None:
    """A long sequence reuses the blocks of many short ones, and all blocks are freed."""
    batch, columns, rng = InputBatch(), LogprobColumns(), np.random.default_rng(1)
    params = SamplingParams(max_new_tokens=10_000, return_logprob=True, top_logprobs_num=2)

    def begin(index: int) -> Sequence:
        request = Request(index, index, 0, np.array([4, 5], np.int32), params, index, 10_000)
        sequence = Sequence(request, 0, StopState(params, frozenset(), tokenizer), {}, None)
        batch.add(index, sequence, plain=False)
        return sequence

    def step(sequences: dict[int, Sequence]) -> None:
        some = list(sequences.values())
        columns.append(batch.rows(np.array(list(sequences))), found_of(rng, some, list(range(len(some)))))
        for sequence in some:
            sequence.append(5)

    for first in range(0, 10_000, 2000):
        long = begin(first)
        for wave in range(5):
            numbers = range(first + 1 + 200 * wave, first + 201 + 200 * wave)
            short = {number: begin(number) for number in numbers}
            for _ in range(10):
                step({first: long} | short)
            for number, sequence in short.items():
                columns.finish(batch.slot(number), sequence)
                batch.remove(number)
        for _ in range(1000):
            step({first: long})
        columns.finish(batch.slot(first), long)
        batch.remove(first)
        assert len(long.logprobs) == 1050
        assert len(long.top_ids) == 2100
        assert columns.capacity <= 2 * 201 * 64


def test_no_object_is_made_of_a_value(tokenizer: Tokenizer) -> None:
    """From the columns to the table, an id with its logprob takes few copies of 8 bytes at once."""
    batch, columns, rng = InputBatch(), LogprobColumns(), np.random.default_rng(2)
    tokens, params = 500, SamplingParams(max_new_tokens=500, return_logprob=True, top_logprobs_num=20)
    request = Request(0, 0, 0, np.array([4, 5], np.int32), params, 0, tokens)
    sequence = Sequence(request, 0, StopState(params, frozenset(), tokenizer), {}, None)
    batch.add(0, sequence, plain=False)
    for _ in range(tokens):
        columns.append(batch.rows(np.array([0])), found_of(rng, [sequence], [0]))
        sequence.append(5)
    rows = [OutputRow(Completion(0), "x")]
    completions_to_table([*rows, OutputRow(sequence.completion(0, prompt_ids=False), "x")])  # imports what it needs
    tracemalloc.start()
    columns.finish(batch.slot(0), sequence)
    table = completions_to_table([*rows, OutputRow(sequence.completion(0, prompt_ids=False), "x")])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(table["output_top_logprobs"][1]) == 20 * tokens
    assert peak < 24 * 20 * tokens
