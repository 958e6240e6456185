"""Constrained rows in the engine: masks, stops, failures, and independence from other rows."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from batchgen import Completion, Engine, SamplingParams
from batchgen.engine.sampling.constraints import GrammarState
from batchgen.engine.sampling.logits_processor import LogitsRules
from batchgen.request.completion import StreamEvent
from tests.e2e.engines import outcomes
from tests.engine.sampling.grammar_model import CLOSING, EOS, VOCAB, save_grammar_model
from tests.models.tiny import save_tiny
from tests.text.conftest import save_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["x", "y"]}, "n": {"type": "integer"}},
    "required": ["name", "kind", "n"],
}
PAIR = {
    "allOf": [
        {"type": "object", "properties": {"code": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 4}}},
        {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 90, "multipleOf": 15}}},
    ],
    "required": ["code", "n"],
}
"""A schema for llguidance."""
CONSTRAINTS: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"json_schema": PAIR},
    {"regex": "[a-f]{3,9}"},
    {"choice": ["yes", "no", "nothing"]},
    {"ebnf": 'root ::= "(" root ")" | [xyz]'},
    {"structural_tag": {"format": {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]+"}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": SCHEMA}}},
    {"response_format": {"type": "json_object"}},
]
CONSTRAINTS[5]["structural_tag"]["format"]["end"] = "</a>"
SEVEN = {"type": "regex", "pattern": "7"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_grammar_model(tmp_path_factory.mktemp("grammar"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def transformers_engine(folder: Path) -> Engine:
    return Engine(str(folder), dtype="float32", model_impl="transformers")


@pytest.fixture(scope="module")
def closing(engine: Engine) -> dict[str, float]:
    """A bias towards tokens that end a text."""
    return {str(ids[0]): 4.0 for ids in engine.tokenizer.encode_plain(list(CLOSING))} | {str(EOS): 2.0}


@pytest.mark.field("choice", "regex", "echo", "stop")
def test_a_leading_space_is_text_if_the_decoder_strips_it(tmp_path: Path) -> None:
    """As with SentencePiece: prompt and output concatenate correctly, and a constraint may start with a space."""
    save_tiny("llama", tmp_path, vocab_size=512, eos_token_id=1)
    save_tokenizer(tmp_path, "bytefallback", bos=False)
    engine = Engine(str(tmp_path), dtype="float32")
    for constraint in ({"choice": [" fox", " dog"]}, {"regex": " (fox|dog)"}):
        done = only(engine, text="the lazy", **constraint)
        assert (done.text, done.constraint_ok) in ((" fox", True), (" dog", True))
        echo = only(engine, text="the lazy", echo=True, **constraint)
        assert echo.text == f"the lazy{done.text}"
        assert only(engine, text="the lazy", stop=[" "], **constraint).text == ""
    events: list[StreamEvent] = []
    row = {"text": "the lazy", "stream": True, "temperature": 0, "choice": [" fox"]}
    list(engine.generate([row, row | {"echo": True}], on_event=events.append))
    for index, text in enumerate((" fox", "the lazy fox")):
        assert "".join(event.text for event in events if event.row_index == index) == text


def test_constraints_of_single_rows_are_not_kept(engine: Engine) -> None:
    """A job may have as many constraints as rows; rules of other fields are kept once."""

    def kept(count: int) -> int:
        rows = [{"text": "a", "choice": [f"yes {count} {i}"], "max_new_tokens": 2} for i in range(count)]
        rows += [{"text": "a", "presence_penalty": 0.5, "max_new_tokens": 2}] * count
        assert all(c.error is None for c in engine.generate(rows))
        gc.collect()
        return sum(type(found) is LogitsRules for found in gc.get_objects())

    assert kept(2) == kept(9)


def rows_of(closing: dict[str, float], count: int = 28) -> list[dict[str, Any]]:
    """Rows with every kind of constraint and without, greedy and sampled."""
    rows: list[dict[str, Any]] = []
    for i in range(count):
        row: dict[str, Any] = {"id": f"c{i}", "text": f"Row {i % 7}: ", "max_new_tokens": 10 + 8 * (i % 9)}
        row |= {"temperature": 0.0 if i % 3 == 0 else 1.0, "logit_bias": closing}
        if i % 4 != 3:
            row |= CONSTRAINTS[(i - i // 4) % len(CONSTRAINTS)]
        rows.append(row | ({"n": 2} if i % 5 == 1 else {}) | ({"return_logprob": True} if i % 6 == 2 else {}))
    return rows


def run(engine: Engine, rows: Sequence[dict[str, Any]]) -> list[Completion]:
    return list(engine.generate(rows, ordered=True))


def only(engine: Engine, **row: Any) -> Completion:
    (found,) = engine.generate([{"text": "Row: ", "temperature": 0.0, "max_new_tokens": 40} | row])
    return found


def named(found: Sequence[Completion]) -> dict[tuple[Any, ...], Any]:
    return {
        (c.id, c.sample_index): (outcome, c.constraint_ok) for c, outcome in zip(found, outcomes(found), strict=True)
    }


@pytest.mark.field("json_schema", "regex", "ebnf", "structural_tag", "choice", "response_format")
@pytest.mark.parametrize("path", ["engine", "transformers_engine"])
def test_every_kind_of_constraint_holds(request: pytest.FixtureRequest, closing: dict[str, float], path: str) -> None:
    engine = request.getfixturevalue(path)
    common = {"text": "Row: ", "logit_bias": closing, "max_new_tokens": 120}
    cases = [(constraint, temperature) for constraint in CONSTRAINTS for temperature in (0.0, 1.0)]
    rows = [{**common, **constraint, "temperature": temperature} for constraint, temperature in cases]
    for (constraint, _), done in zip(cases, run(engine, rows), strict=True):
        assert done.error is None, (constraint, done.error)
        assert (done.finish_reason, done.constraint_ok) == ("stop", True), (constraint, done.text)
        assert done.stop_kind in ("grammar", "eos")
        _check(constraint, done.text or "")


def _check(constraint: dict[str, Any], text: str) -> None:
    ((kind, value),) = constraint.items()
    if kind == "regex":
        assert re.fullmatch(value, text)
    elif kind == "choice":
        assert text in value
    elif kind == "ebnf":
        assert re.fullmatch(r"(\(*)[xyz]\)*", text)
        assert text.count("(") == text.count(")")
    elif kind == "structural_tag":
        assert re.fullmatch("<a>[0-9]+</a>", text)
    else:
        schema = {"type": "object"} if constraint == CONSTRAINTS[-1] else PAIR if value == PAIR else SCHEMA
        jsonschema.validate(json.loads(text), schema)


@pytest.fixture(scope="module")
def alone(engine: Engine, closing: dict[str, float]) -> dict[tuple[Any, ...], Any]:
    """The results of every row, generated alone."""
    return {key: value for row in rows_of(closing) for key, value in named(run(engine, [row])).items()}


@pytest.mark.field("json_schema", "regex", "ebnf", "structural_tag", "choice", "response_format")
def test_a_mixed_batch_equals_each_row_alone(
    engine: Engine, closing: dict[str, float], alone: dict[tuple[Any, ...], Any]
) -> None:
    found = named(run(engine, rows_of(closing)))
    assert found == alone
    assert {ok for _, ok in found.values()} == {True, False, None}, "some reach their length, some are unconstrained"


def test_preempted_rows_equal_undisturbed_ones(
    engine: Engine, closing: dict[str, float], alone: dict[tuple[Any, ...], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchgen.engine.engine.pool_pages", lambda *_: 60)
    config = replace(engine.config, page_size=4, max_num_seqs=40, max_tokens_per_step=64)
    small = Engine.from_parts(config, engine.model, engine.tokenizer, engine.grammars)
    small.order, small.admission = "tree", "free"  # rows are to be preempted
    assert named(run(small, rows_of(closing))) == alone
    assert small.last_run.scheduler.stats.preemptions > 0


def test_each_distinct_constraint_is_compiled_once(folder: Path, closing: dict[str, float]) -> None:
    engine = Engine(str(folder), dtype="float32")
    rows = rows_of(closing)
    run(engine, rows)
    # json_schema and response_format of the same schema are one constraint.
    assert engine.grammars.compiled == len(CONSTRAINTS) - 1
    run(engine, [row | {"id": f"again {row['id']}"} for row in rows])
    assert engine.grammars.compiled == len(CONSTRAINTS) - 1


def test_ids_without_text_are_not_sampled(engine: Engine) -> None:
    """Neither ids outside the tokenizer nor special tokens."""
    padding = {str(VOCAB + i): 100.0 for i in range(13)}
    free = only(engine, logit_bias=padding)
    assert any(token >= VOCAB for token in free.output_ids or ())
    bound = only(engine, logit_bias=padding, regex="[a-z]{20}")
    assert re.fullmatch("[a-z]{20}", bound.text or "")
    special = {"2": 100.0, "3": 100.0, "0": 100.0}
    done = only(engine, logit_bias=special, regex="[<|>a-z]{8}", ignore_eos=True)
    assert re.fullmatch(r"[<|>a-z]{8}", done.text or "")


def test_one_choice_may_be_a_prefix_of_another(engine: Engine) -> None:
    choices = ["foo", "foo bar", "foobar", "fo", 'f"\\\n', "日本", "😀"]
    row = {"text": "Row", "choice": choices, "temperature": 2.0}
    rows = [row | {"seed": seed, "logit_bias": {str(EOS): seed % 4 * 3.0}} for seed in range(80)]
    found = {c.text: c for c in run(engine, rows)}
    assert found.keys() <= set(choices)
    assert {"fo", "foo"} <= found.keys(), "the shorter ones end with a sampled EOS"
    assert found["fo"].stop_kind == "eos"
    assert all(c.constraint_ok for c in found.values())


BIASED = {"logit_bias": {str(EOS): 100.0}}
ENDS: list[tuple[dict[str, Any], str, str | None, bool]] = [
    ({"regex": "abc"}, "stop", "grammar", True),
    ({"regex": "[ab]+", **BIASED}, "stop", "eos", True),
    ({"regex": "[ab]{1,5}", "ignore_eos": True, **BIASED}, "stop", "grammar", True),
    ({"regex": "[ab]+", "ignore_eos": True, "max_new_tokens": 7}, "length", None, True),
    ({"regex": "[ab]{30}", "max_new_tokens": 7}, "length", None, False),
    ({"regex": "abc", "max_new_tokens": 3}, "stop", "grammar", True),
    ({"ebnf": 'root ::= ""'}, "stop", "eos", True),
    ({"ebnf": 'root ::= ""', "ignore_eos": True}, "stop", "grammar", True),
]
"""(fields, finish_reason, stop_kind, constraint_ok)"""


def test_ends_of_constrained_rows(engine: Engine) -> None:
    found = [only(engine, **fields) for fields, *_ in ENDS]
    assert [(c.finish_reason, c.stop_kind, c.constraint_ok) for c in found] == [tuple(ends) for _, *ends in ENDS]
    whole, eos, longest, *_, empty, ignoring = found
    assert (whole.text, whole.matched_stop, len(longest.text or "")) == ("abc", None, 5)
    assert (eos.matched_stop, len(eos.text or "") >= 1) == (str(EOS), True)
    assert (empty.text, ignoring.text, list(ignoring.output_ids or [])) == ("", "", [])


def test_stop_ids_of_the_row(engine: Engine) -> None:
    special = only(engine, regex="[ab]+", stop_token_ids=[3], ignore_eos=True, logit_bias={"3": 100.0})
    assert (special.stop_kind, special.matched_stop, special.constraint_ok) == ("token", "3", True)
    letter = engine.tokenizer.encode_plain(["b"])[0][0]
    plain = only(engine, regex="[ab]+", stop_token_ids=[letter], logit_bias={str(letter): 100.0})
    assert (plain.stop_kind, plain.text, plain.constraint_ok) == ("token", "", False), "its own text is cut off"
    kept = only(engine, regex="[ab]+", stop_token_ids=[letter], logit_bias={str(letter): 100.0}, no_stop_trim=True)
    assert (kept.text, kept.constraint_ok) == ("b", True)


@pytest.mark.parametrize(
    ("constraint", "last", "text"),
    [
        ({"json_schema": {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]}}, "}", '{"n": 1}'),
        ({"structural_tag": {"format": {"type": "tag", "begin": "<a>", "content": SEVEN, "end": "!"}}}, "!", "<a>7!"),
        ({"choice": ["x", "xy"]}, "y", "xy"),
        ({"ebnf": 'root ::= "x" "y"?'}, "y", "xy"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_kept_stop_id_is_text(engine: Engine, constraint: dict[str, Any], last: str, text: str) -> None:
    """A stop id that is text counts as text if it is kept; a special token never does."""
    letter = engine.tokenizer.encode_plain([last])[0][0]
    row = {**constraint, "stop_token_ids": [letter], "logit_bias": {str(letter): 100.0}}
    kept = only(engine, **row, no_stop_trim=True)
    assert (kept.stop_kind, kept.text, kept.constraint_ok) == ("token", text, True)
    cut = only(engine, **row)
    assert (cut.stop_kind, cut.text, cut.constraint_ok) == ("token", text[:-1], text[:-1] == "x")


def test_a_kept_eos_does_not_count_as_text(engine: Engine) -> None:
    shown = {"no_stop_trim": True, "skip_special_tokens": False, "logit_bias": {str(EOS): 100.0}}
    done = only(engine, regex="[ab]+", **shown)
    assert ((done.text or "")[-4:], done.stop_kind, done.constraint_ok) == ("</s>", "eos", True)


def test_stop_strings_still_stop(engine: Engine) -> None:
    whole = only(engine, regex="a[bc]{20}")
    done = only(engine, regex="a[bc]{20}", stop=["bb", "bc", "cb", "cc"], no_stop_trim=True)
    assert done.stop_kind == "string"
    assert (whole.text or "").startswith(done.text or "?")
    assert done.constraint_ok is False
    done = only(engine, regex="a[bc]*", stop=["b", "c"])
    assert (done.text, done.constraint_ok) == ("a", True), "the remaining text satisfies it"


@pytest.mark.field("min_new_tokens")
def test_a_grammar_overrides_min_new_tokens(engine: Engine) -> None:
    bias = {str(EOS): 100.0}
    longer = only(engine, regex="[ab]{1,20}", min_new_tokens=12, logit_bias=bias)
    assert (len(longer.output_ids or ()), longer.min_new_tokens_unmet, longer.stop_kind) == (13, False, "eos")
    done = only(engine, regex="[ab]{4}", min_new_tokens=12)
    assert (done.stop_kind, done.min_new_tokens_unmet, done.constraint_ok) == ("grammar", True, True)
    letter = engine.tokenizer.encode_plain(["b"])[0][0]
    done = only(engine, regex="ab", min_new_tokens=12, stop_token_ids=[letter], no_stop_trim=True)
    assert (done.text, done.stop_kind, done.min_new_tokens_unmet, done.constraint_ok) == ("ab", "token", True, True)


def test_rows_of_the_second_compiler_end_as_others(engine: Engine) -> None:
    eos = {str(EOS): 100.0}
    multiple = {"type": "integer", "minimum": 0, "multipleOf": 5}
    done = only(engine, json_schema=multiple, logit_bias=eos)
    assert (done.stop_kind, int(done.text or "") % 5, done.constraint_ok) == ("eos", 0, True)
    longer = only(engine, json_schema=multiple, logit_bias=eos, min_new_tokens=6)
    assert (longer.min_new_tokens_unmet, longer.stop_kind, longer.constraint_ok) == (False, "eos", True)
    whole = only(engine, json_schema={**multiple, "minimum": 3, "maximum": 7}, min_new_tokens=6)
    assert (whole.text, whole.stop_kind) == ("5", "grammar")
    assert whole.min_new_tokens_unmet is whole.constraint_ok is True
    cut = only(engine, json_schema=PAIR, max_new_tokens=2)
    assert (cut.finish_reason, cut.constraint_ok) == ("length", False)
    letter = engine.tokenizer.encode_plain(["a"])[0][0]
    stuck = only(engine, json_schema=PAIR, allowed_token_ids=[letter])
    assert (stuck.error.code, stuck.error.param) == ("grammar_error", "json_schema")
    assert set(engine.grammars.backends) >= {"llguidance"}


def test_a_row_ends_if_its_masks_leave_no_token(engine: Engine) -> None:
    a, b = (engine.tokenizer.encode_plain([letter])[0][0] for letter in "ab")
    done = only(engine, regex="[ab]{3}c", allowed_token_ids=[a, b])
    assert (done.error.code, done.error.param) == ("grammar_error", "regex")
    done = only(engine, regex="[ab]{3}c?", allowed_token_ids=[a, b])
    assert (done.error, done.stop_kind, len(done.text or "")) == (None, "grammar", 3)


@pytest.mark.parametrize("failure", ["rejects", "raises"])
def test_a_failing_matcher_only_ends_its_row(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, closing: dict[str, float], failure: str
) -> None:
    rows = [
        {"text": "one", "regex": "[ab]{9}", "temperature": 1.0, "id": "broken"},
        {"text": "two", "regex": "[cd]{9}", "temperature": 1.0, "id": "whole"},
        {"text": "three", "max_new_tokens": 12, "temperature": 1.0, "id": "free"},
    ]
    before = named(run(engine, rows))
    made = GrammarState.__init__

    class Broken:
        def __init__(self, matcher: Any) -> None:
            self._matcher, self._left = matcher, 4

        def __getattr__(self, name: str) -> Any:
            return getattr(self._matcher, name)

        def accept_token(self, token: int) -> bool:
            self._left -= 1
            if self._left:
                return bool(self._matcher.accept_token(token))
            if failure == "raises":
                raise RuntimeError("out of states")
            return False

    def init(this: GrammarState, *arguments: Any) -> None:
        made(this, *arguments)
        if this.constraint.text == "[ab]{9}":
            this.matcher = Broken(this.matcher)

    monkeypatch.setattr(GrammarState, "__init__", init)
    found = run(engine, rows)
    assert (found[0].error.code, found[0].error.param) == ("grammar_error", "regex")
    assert named(found[1:]) == {key: value for key, value in before.items() if key[0] != "broken"}


def test_each_sample_has_its_matcher(engine: Engine) -> None:
    row = {"text": "Row", "regex": "[a-z]{4}(-[0-9]{3})?", "temperature": 1.0, "n": 8, "best_of": 10, "seed": 5}
    greedy = {"text": "Row", "regex": "[a-z]{4}", "temperature": 0.0}
    *found, first, copy = run(engine, [row, greedy, greedy])
    assert len({c.text for c in found}) > 5
    assert all(c.constraint_ok for c in found)
    assert (copy.dedup_of, copy.text, copy.constraint_ok) == (1, first.text, True)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_of_constrained_rows(folder: Path, engine: Engine, mode: str) -> None:
    """Raw logprobs are of the model's distribution, processed ones of the masked distribution."""
    config = replace(engine.config, logprobs_mode=mode)
    other = Engine.from_parts(config, engine.model, engine.tokenizer, engine.grammars)
    done = only(other, choice=["q"], return_logprob=True, top_logprobs_num=2)
    assert done.output_logprobs is not None
    (logprob,) = done.output_logprobs
    assert logprob == pytest.approx(0.0) if mode == "processed" else logprob < -0.1


def test_a_row_s_constraint_overrides_the_run_s(engine: Engine) -> None:
    free_row = {"text": "none", "response_format": {"type": "text"}}
    rows: list[Any] = ["plain", {"text": "own", "choice": ["own"]}, free_row]
    params = SamplingParams(regex="[ab]{3}", max_new_tokens=9, temperature=0.0)
    plain, own, free = engine.generate(rows, params, ordered=True)
    assert re.fullmatch("[ab]{3}", plain.text or "")
    assert (own.text, own.constraint_ok) == ("own", True)
    assert (free.constraint_ok, free.finish_reason) == (None, "length")


def test_a_grammar_that_takes_too_long_ends_its_row(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"id": "slow", "text": "Row", "ebnf": 'root ::= "a" root | "a" "a" root | ""', "ignore_eos": True},
        {"id": "free", "text": "Row", "temperature": 0.0},
    ]
    before = named(run(engine, rows))
    monkeypatch.setattr("batchgen.engine.sampling.constraints.MAX_SECONDS", 1e-4)
    slow, free = run(engine, rows)
    assert slow.error.code == "grammar_error"
    assert "took more than" in slow.error.message
    assert named([free]) == {key: value for key, value in before.items() if key[0] == "free"}


def test_masks_filled_one_by_one_are_the_same(
    engine: Engine, closing: dict[str, float], alone: dict[tuple[Any, ...], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchgen.engine.step.sampler._SLOW_FILL_SECONDS", 0.0)
    assert named(run(engine, rows_of(closing))) == alone


def test_a_discarded_token_has_no_event(engine: Engine) -> None:
    a, b = (engine.tokenizer.encode_plain([letter])[0][0] for letter in "ab")
    row = {"text": "Row", "regex": "[ab]{3}c?", "allowed_token_ids": [a, b], "stream": True, "temperature": 0.0}
    events: list[StreamEvent] = []
    (done,) = engine.generate([row], on_event=events.append)
    assert done.stop_kind == "grammar"
    assert [event.token_id for event in events] == [*(done.output_ids or ()), None]
    assert "".join(event.text for event in events) == done.text
    assert engine.last_run.loop.state.output_tokens == 3
    (states,) = engine.generate([{**row, "stream": False, "return_hidden_states": True}])
    (block,) = states.states or ()
    assert len(block.values) == (states.prompt_tokens or 0) + 3 - 1
