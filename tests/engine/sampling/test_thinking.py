"""Masks of samples that think, for every family: whatever is drawn from them, budget and constraint are kept."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchgen.engine.sampling.constraints import GrammarState
from batchgen.engine.sampling.thinking import ThinkingMask
from batchgen.engine.sequence import Sequence
from batchgen.kernels.shaping import bitmask_width
from batchgen.request.completion import Completion
from batchgen.request.fields.params import SamplingParams
from batchgen.request.fields.prompts import ChatPrompt
from batchgen.request.table.request_table import Request
from batchgen.text.grammar.grammars import Grammars
from batchgen.text.reasoning import ReasoningParser, reasoning_of
from batchgen.text.stops.conditions import StopState
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.text.conftest import save_tokenizer
from tests.text.reasoning_families import FAMILIES

CHAT = ChatPrompt(({"role": "user", "content": "Hi"},))
MOST = 40


@pytest.fixture(
    scope="module", params=["qwen3", "qwq", "gpt_oss", "granite", "hunyuan", "granite_sentences", "any other"]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ReasoningParser:
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("thinking")
    save_tokenizer(folder, "bytelevel", template=family.template, added=family.added, special=family.special)
    found = reasoning_of(Tokenizer.load(folder), "auto")
    assert found is not None
    return found


def draw(parser: ReasoningParser, grammars: Grammars, seed: int, **fields: Any) -> tuple[Completion, list[int]]:
    """A sample that is drawn at random from its masks, with a liking for the family's markers; and its token ids."""
    tokenizer, chance = parser.tokenizer, random.Random(seed)
    params = SamplingParams(separate_reasoning=True, **fields)
    prompt = np.array(tokenizer.encode_chat(CHAT), np.int32)
    state = parser.start(prompt.tolist())
    grammar = None if params.constraint is None else GrammarState(grammars, params, params.constraint)
    mask = ThinkingMask(state, params.thinking_budget, grammar)
    stops = StopState(params, tokenizer.eos_ids, tokenizer, state)
    sequence = Sequence(Request(0, 0, 0, prompt, params, 0, MOST), 0, stops, {}, None, None, mask)
    markers = [token for text in parser.format.markers for token in parser.encode(text)]
    words = np.zeros(bitmask_width(tokenizer.vocab_size), np.int32)
    while not sequence.ended:
        mask.fill(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: tokenizer.vocab_size]
        allowed = np.flatnonzero(bits).tolist()
        assert allowed, "nothing may be written"
        liked = [token for token in markers if bits[token]] if chance.random() < 0.5 else []
        sequence.append(chance.choice(liked or allowed))
    return sequence.completion(0, prompt_ids=False), sequence.output_ids


@pytest.mark.field("thinking_budget", "constrain_reasoning")
def test_whatever_is_drawn_keeps_the_budget_and_the_constraint(model: ReasoningParser) -> None:
    grammars = Grammars(model.tokenizer, model.tokenizer.vocab_size)
    fields: list[dict[str, Any]] = [{}, {"regex": "[0-9]{2,4}"}, {"choice": ["<", "<b", "Here I am"]}]
    fields += [{"regex": "[^x]{0,9}y"}]
    grammars.prepare(constraint for each in fields if (constraint := SamplingParams(**each).constraint) is not None)
    cut = finished = 0
    for seed in range(60):
        budget = (None, 0, 1, 3, 7)[seed % 5]
        done, ids = draw(model, grammars, seed, thinking_budget=budget, **fields[seed % 4])
        assert done.error is None, done.error
        assert len(ids) <= MOST
        if budget is not None:
            assert (done.reasoning_tokens or 0) <= budget
        if done.reasoning_cut:
            cut += 1
            assert done.reasoning_tokens == budget
            if len(ids) < MOST:
                close = list(model.close_ids(calls=False))
                assert any(ids[at : at + len(close)] == close for at in range(len(ids)))
        if fields[seed % 4] and done.finish_reason == "stop":
            finished += 1
            assert done.constraint_ok, (ids, done)
    assert cut > 3
    assert finished > 3


def test_a_token_that_a_marker_and_the_grammar_begin_with_is_the_answers(model: ReasoningParser) -> None:
    """Where a marker is text, the grammar goes on behind its first token; a marker of one token is a marker."""
    first, second = model.tokenizer.encode_plain(["<b"])[0]
    params = SamplingParams(separate_reasoning=True, choice=("<b",))
    grammars = Grammars(model.tokenizer, model.tokenizer.vocab_size)
    assert params.constraint is not None
    grammars.prepare([params.constraint])
    state = model.start(model.tokenizer.encode_chat(CHAT))
    if state.part == "thoughts" or model.format.header is not None:
        return
    mask = ThinkingMask(state, None, GrammarState(grammars, params, params.constraint))
    words = np.zeros(bitmask_width(model.tokenizer.vocab_size), np.int32)
    for token in (first, second):
        mask.fill(words)
        assert np.unpackbits(words.view(np.uint8), bitorder="little")[token]
        state.append(token)
        mask.accept(token)
    assert mask.error is None
    assert state.answer_ids == [first, second]


def test_blank_lines_of_the_template_may_be_in_front_of_a_constrained_answer(model: ReasoningParser) -> None:
    """As many as the family's template writes there; the answer and its grammar begin behind them."""
    tokenizer, gap = model.tokenizer, model.format.gap
    ((line,),) = tokenizer.encode_plain(["\n"])
    params = SamplingParams(separate_reasoning=True, json_schema='{"type": "integer"}')
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    assert params.constraint is not None
    grammars.prepare([params.constraint])
    for breaks in range(len(gap) + 2):
        state = model.start(tokenizer.encode_plain(["Hi"])[0])
        mask = ThinkingMask(state, None, GrammarState(grammars, params, params.constraint))
        words, allowed = np.zeros(bitmask_width(tokenizer.vocab_size), np.int32), True
        starts = model.encode(model.format.starts[0] if state.part == "answer" else "")
        tokens = [*starts, *model.close_ids(calls=False), *[line] * breaks, *tokenizer.encode_plain(["12"])[0]]
        for token in tokens:
            mask.fill(words)
            allowed = allowed and bool(np.unpackbits(words.view(np.uint8), bitorder="little")[token])
            if allowed:
                state.append(token)
                mask.accept(token)
        assert allowed == (breaks <= len(gap))
        if allowed:
            assert mask.error is None
            assert mask.satisfied("12", state.answer_ids)
            assert state.answer(tokenizer.decode_output(state.answer_ids)) == "12"


def test_the_grammar_receives_an_answers_characters_in_a_marker_once(tmp_path: Path) -> None:
    family = FAMILIES["any other"]
    save_tokenizer(tmp_path, "bytelevel", template=family.template, added=[">1"], special=family.special)
    tokenizer = Tokenizer.load(tmp_path)
    parser, params = reasoning_of(tokenizer, "auto"), SamplingParams(separate_reasoning=True, regex="123")
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    assert params.constraint is not None
    grammars.prepare([params.constraint])
    state = parser.start([])
    mask = ThinkingMask(state, None, GrammarState(grammars, params, params.constraint))
    for token in tokenizer.encode_plain(["<think>a</think>123"])[0]:
        state.append(token)
        mask.accept(token)
    assert (mask.error, state.answer(tokenizer.decode_output(state.answer_ids))) == (None, "123")
