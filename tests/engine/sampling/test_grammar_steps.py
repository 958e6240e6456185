"""Masks and tokens of all constrained rows of a step, against rows that are computed one by one."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from batchgen.engine.sampling.constraints import GrammarState
from batchgen.engine.sequence import Sequence
from batchgen.engine.step.input_batch import InputBatch
from batchgen.engine.step.sampler import GrammarMasks
from batchgen.kernels.device import HOST, Device
from batchgen.kernels.ops import TORCH_OPS
from batchgen.kernels.shaping import bitmask_width
from batchgen.request.fields.params import SamplingParams
from batchgen.request.table.request_table import Request
from batchgen.text.grammar.grammars import Grammars
from batchgen.text.stops.conditions import StopState
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.engine.fake_device import LateDevice
from tests.engine.sampling.grammar_model import EOS, PADDING, VOCAB, save_grammar_tokenizer
from tests.models.tiny import save_tiny

FIELDS: list[dict[str, Any]] = [
    {"regex": "[a-f]{3,9}"},
    {"regex": "[ab]{4}c?", "ignore_eos": True},
    {"choice": ("yes", "no", "nothing", "not")},
    {"ebnf": 'root ::= "(" root ")" | [xyz]'},
    {"json_schema": '{"type": "object", "properties": {"n": {"enum": ["x", "xy"]}}, "required": ["n"]}'},
    {"json_schema": '{"type": "integer", "minimum": 0, "maximum": 90, "multipleOf": 15}'},
    {"regex": "[ab]+", "stop": ("ab",)},
    {"regex": "[ab]+", "stop_token_ids": (EOS + 3, VOCAB - 1)},
    {},
]
"""Fields of rows; the masks of the second JSON schema are llguidance's."""


class Failing:
    """A matcher that fails at its third token, or at its third mask."""

    def __init__(self, matcher: Any, failure: str) -> None:
        self._matcher, self._failure = matcher, failure
        self._accepted = 0

    @property
    def _handle(self) -> Any:
        if self._failure == "masks" and self._accepted == 2:
            raise RuntimeError("out of states")
        return self._matcher._handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def fill_next_token_bitmask(self, words: Any) -> None:
        if self._failure == "masks" and self._accepted == 2:
            raise RuntimeError("out of states")
        self._matcher.fill_next_token_bitmask(words)

    def accept_token(self, token: int) -> bool:
        self._accepted += 1
        if self._failure == "raises" and self._accepted == 3:
            raise RuntimeError("out of states")
        return not (self._failure == "rejects" and self._accepted == 3) and bool(self._matcher.accept_token(token))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("grammar")
    save_tiny("llama", folder, vocab_size=VOCAB + PADDING, num_hidden_layers=1, eos_token_id=EOS)
    save_grammar_tokenizer(folder)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    grammars = Grammars(tokenizer, VOCAB + PADDING)
    grammars.prepare(found for each in FIELDS if (found := SamplingParams(**each).constraint) is not None)
    return grammars


def sequence_of(grammars: Grammars, index: int, failure: str) -> Sequence:
    """A sample of row `index`; `failure`: that of the matcher of some rows."""
    params = SamplingParams(**FIELDS[index % len(FIELDS)])
    longest = 4 + index % 5 * 3
    stops = StopState(params, grammars.tokenizer.eos_ids, grammars.tokenizer)
    grammar = None if params.constraint is None else GrammarState(grammars, params, params.constraint)
    if grammar is not None and index % 7 == 3:
        grammar.matcher = Failing(grammar.matcher, failure)
    request = Request(index, index, 0, np.array([4, 5], np.int32), params, index, longest)
    return Sequence(request, 0, stops, {}, grammar=grammar)


def mask_alone(sequence: Sequence) -> npt.NDArray[np.int32]:
    words: npt.NDArray[np.int32] = np.full(bitmask_width(VOCAB + PADDING), -1, np.int32)
    if sequence.grammar is not None and not sequence.ended:
        sequence.grammar.fill(words)
    return words


def outcome(sequence: Sequence) -> tuple[Any, ...]:
    return sequence.output_ids, sequence.finish_reason, sequence.error, sequence.stops.event


@pytest.mark.field("regex", "choice", "ebnf", "json_schema")
@pytest.mark.parametrize("failure", ["rejects", "raises", "masks"])
@pytest.mark.parametrize("late", [False, True])
def test_steps_of_all_rows_equal_rows_alone(
    grammars: Grammars, failure: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random walks: masks, ends, errors and tokens, also where masks leave nothing; several times on more threads."""
    device: Device = LateDevice(poison_uploads=True) if late else HOST
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 + 2 * late)
    monkeypatch.setattr("batchgen.engine.step.sampler._LEAST_FILLED", 3)
    for seed in range(3):
        rng, batch = Random(seed), InputBatch()
        mine, alone = ([sequence_of(grammars, i, failure) for i in range(37)] for _ in range(2))
        for i, sequence in enumerate(mine):
            batch.add(i, sequence, plain=True)
        running = list(range(len(mine)))
        while running:
            rows = batch.rows(np.array(running, np.int64))
            held = [(place, mine[i]) for place, i in enumerate(running) if mine[i].grammar is not None]
            if held:
                masks = GrammarMasks(held, device, TORCH_OPS).fill(VOCAB + PADDING).numpy()
                for (place, _), words in zip(held, masks, strict=True):
                    assert (words == mask_alone(alone[running[place]])).all()
            tokens, excluded = np.zeros(len(running), np.int64), []
            for place, i in enumerate(running):
                bits = np.unpackbits(mask_alone(alone[i]).view(np.uint8), bitorder="little")[:VOCAB]
                tokens[place] = rng.choice(np.flatnonzero(bits).tolist() or [0])
                if not bits.any() or (alone[i].grammar is not None and rng.random() < 0.02):
                    excluded.append(place)
            notified, _ = batch.append_tokens(rows, tokens, excluded)
            for place, i in enumerate(running):
                for one in [alone[i], *([mine[i]] if place in notified else [])]:
                    if place in excluded:
                        one.end_exhausted()
                    else:
                        one.append(int(tokens[place]))
                assert batch.output_ids(i).tolist() == alone[i].output_ids
                assert mine[i].ended == alone[i].ended
                if mine[i].ended:
                    assert outcome(mine[i]) == outcome(alone[i])
                    batch.mark_ended(i)
                    batch.remove(i)
            running = [i for i in running if not mine[i].ended]
        assert any("failed" in str(each.error) or "rejects" in str(each.error) for each in mine)
        assert {each.finish_reason for each in mine} == {None, "stop", "length"}
