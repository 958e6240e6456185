"""Thoughts and answers of rows in a run: a model that writes what a script says, as far as its masks allow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from torch import Tensor

from batchgen import Completion, Engine
from batchgen.request.completion import StreamEvent
from batchgen.request.fields.prompts import ChatPrompt
from tests.e2e.engines import outcomes
from tests.e2e.model import TEMPLATE, save_model
from tests.e2e.rows import rows_of, write_lines
from tests.e2e.runner import interrupt, run

CHANNELS = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>"]
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "template": TEMPLATE.replace(
            "<|im_start|>assistant\n",
            "<|im_start|>assistant\n{{ '<think>\\n</think>' if enable_thinking is defined and not enable_thinking }}",
        ),
        "added": ["<think>", "</think>"],
    },
    "qwq": {
        "template": TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n{{ '</think>' if 0 }}")
    },
    "gpt_oss": {
        "template": "{% for m in messages %}<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}"
        "<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% if reasoning_effort %}<|message|>Reasoning: {{ reasoning_effort }}<|end|>{% endif %}"
        "<|start|>assistant",
        "added": CHANNELS,
        "specials": 4,
    },
}
"""Models by the family that batchgen finds: markers of one token, markers as text, and channels."""
HELLO = [{"role": "user", "content": "What is <think>?"}]
STARTS = {"qwen3": "<think>", "qwq": "", "gpt_oss": "<|channel|>analysis<|message|>"}
ENDS = {"qwen3": "</think>", "qwq": "</think>", "gpt_oss": "<|end|><|start|>assistant<|channel|>final<|message|>"}


def script(logits: Tensor, rows: Sequence[Any]) -> Tensor:
    """Wish for the next token of the row's script; behind the tokens `end` for that of its answer."""
    for i, row in enumerate(rows):
        wish, end, output = row.params["ids"], row.params["end"], list(row.output_ids)
        at = len(output)
        for begin in range(len(output) - len(end) + 1):
            if output[begin : begin + len(end)] == end:
                wish, at = row.params["answer"], len(output) - begin - len(end)
                break
        logits[i, wish[at] if at < len(wish) else 1] += 100.0
    return logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(tmp_path_factory.mktemp(name), **given) for name, given in MODELS.items()}


@pytest.fixture(scope="module")
def engines(folders: dict[str, Path]) -> Iterator[dict[str, Engine]]:
    found = {}
    for name, folder in folders.items():
        found[name] = Engine(str(folder), dtype="float32", attention="torch", logit_processor={"script": script})
    return found


def row(engine: Engine, name: str, thoughts: str, answer: str, **more: Any) -> dict[str, Any]:
    """A conversation whose model writes these thoughts and this answer."""
    texts = [f"{STARTS[name]}{thoughts}{ENDS[name]}{answer}", ENDS[name], answer]
    ids, end, behind = engine.tokenizer.encode_plain(texts)
    params = {"ids": ids, "end": end, "answer": behind}
    row = {"messages": HELLO, "temperature": 0, "max_new_tokens": 80, "custom_logit_processor": "script"}
    return {**row, "custom_params": params, **more}


def only(engine: Engine, given: dict[str, Any]) -> Completion:
    (done,) = engine.generate([given])
    assert done.error is None, done.error
    return done


def parts(done: Completion) -> tuple[Any, ...]:
    logprobs = None if done.output_logprobs is None else np.round(done.output_logprobs, 3).tolist()
    return done.text, done.reasoning, done.reasoning_tokens, done.reasoning_cut, done.constraint_ok, logprobs


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.field("separate_reasoning")
def test_thoughts_have_their_own_column(engines: dict[str, Engine], name: str) -> None:
    engine = engines[name]
    given = row(engine, name, "one two", "three")
    done = only(engine, given)
    assert (done.reasoning, done.text, done.reasoning_cut, done.stop_kind) == ("one two", "three", None, "eos")
    thoughts = len(engine.tokenizer.encode_plain(["one two"])[0])
    assert done.reasoning_tokens == thoughts
    together = only(engine, {**given, "separate_reasoning": False})
    assert together.output_ids == done.output_ids
    assert "one two" in (together.text or "")
    assert (together.text or "").endswith("three")
    assert (together.reasoning, together.reasoning_tokens) == (None, None)
    text = engine.tokenizer.render_chat(ChatPrompt(tuple(HELLO)))
    plain = {"text": text, **{key: value for key, value in given.items() if key != "messages"}}
    assert only(engine, plain).text == together.text
    assert only(engine, {**plain, "separate_reasoning": True}).text == "three"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("budget", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 5)), 2, 100])
@pytest.mark.field("thinking_budget")
def test_a_budget_is_exact_to_the_token(engines: dict[str, Engine], name: str, budget: int) -> None:
    engine = engines[name]
    given = row(engine, name, "one two three four five", "six")
    free = only(engine, given)
    done = only(engine, {**given, "thinking_budget": budget})
    assert (done.text, done.reasoning_cut) == ("six", budget < 100)
    assert free.reasoning_tokens is not None
    assert done.reasoning_tokens == min(budget, free.reasoning_tokens)
    whole, end = engine.tokenizer.encode_plain([STARTS[name], ENDS[name]])
    thoughts = (free.output_ids or [])[len(whole) : len(whole) + done.reasoning_tokens]
    ids = list(done.output_ids or ())
    assert ids[: len(whole) + len(thoughts) + len(end)] == [*whole, *thoughts, *end]
    also = only(engine, {**given, "thinking_token_budget": budget, "separate_reasoning": False})
    assert (also.output_ids, also.reasoning_cut) == (done.output_ids, done.reasoning_cut)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.field("constrain_reasoning")
def test_a_constraint_holds_for_the_answer_alone(engines: dict[str, Engine], name: str) -> None:
    engine = engines[name]
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    for answer in ('{"a": 2}', "not JSON"):
        given = row(engine, name, "Let me think.", answer, json_schema=schema)
        for more in ({}, {"thinking_budget": 2}):
            done = only(engine, {**given, **more})
            assert done.reasoning == (
                "Let me think."
                if not more
                else engine.tokenizer.decode_output(engine.tokenizer.encode_plain(["Let me think."])[0][:2]).strip()
            )
            assert done.constraint_ok
            assert json.loads(done.text or "")["a"] in (1, 2)
    whole = only(engine, {**given, "constrain_reasoning": True})
    assert whole.constraint_ok
    # Where the prompt opens the thoughts, the constraint leaves no way out of them.
    assert json.loads((whole.reasoning if name == "qwq" else whole.text) or "")


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_a_constrained_answer_may_come_without_thoughts(engines: dict[str, Engine], name: str) -> None:
    engine = engines[name]
    begin = "" if name == "qwen3" else "<|channel|>final<|message|>"
    (ids,) = engine.tokenizer.encode_plain([f"{begin}yes"])
    params = {"ids": ids, "end": [-1], "answer": []}
    done = only(engine, row(engine, name, "", "", custom_params=params, choice=["yes", "no"]))
    assert (done.reasoning, done.text, done.constraint_ok) == (None, "yes", True)


@pytest.mark.parametrize("name", MODELS)
def test_no_end_of_sequence_ends_the_thoughts_of_a_constrained_row(engines: dict[str, Engine], name: str) -> None:
    engine = engines[name]
    given = row(engine, name, "one</s>two", "no", choice=["yes", "no"], thinking_budget=9)
    done = only(engine, given)
    assert (done.text, done.constraint_ok) == ("no", True)
    short = only(engine, {**given, "max_new_tokens": 4})
    assert (short.text, short.constraint_ok, short.finish_reason) == ("", False, "length")


@pytest.mark.parametrize("name", MODELS)
def test_stops_and_logprobs_of_thinking_rows(engines: dict[str, Engine], name: str) -> None:
    engine = engines[name]
    given = row(engine, name, "stop, a STOP", "It is. STOP here", return_logprob=True)
    done = only(engine, {**given, "stop": "STOP"})
    assert (done.reasoning, done.text, done.matched_stop) == ("stop, a STOP", "It is. ", "STOP")
    assert done.output_logprobs is not None
    assert len(done.output_logprobs) == len(done.output_ids or ()) == done.completion_tokens
    again = only(engine, {**given, "stop_regex": "ST.P", "no_stop_trim": True})
    assert again.text == "It is. STOP"
    assert again.output_ids == done.output_ids
    assert np.array_equal(again.output_logprobs, done.output_logprobs)


@pytest.mark.parametrize("name", MODELS)
def test_events_have_the_answer_and_at_the_end_the_thoughts(engines: dict[str, Engine], name: str) -> None:
    engine = engines[name]
    rows = [
        row(engine, name, "one two", "\n\nthree four", stream=True),
        row(engine, name, "one two", "\n three STOP four", stream=True, stop="STOP", thinking_budget=1),
        row(engine, name, "one two", " \n", stream=True),
    ]
    events: list[StreamEvent] = []
    done = list(engine.generate(rows, ordered=True, on_event=events.append))
    assert [each.text for each in done] == ["three four", "three ", ""]
    for number, each in enumerate(done):
        own = [event for event in events if event.row_index == number]
        assert "".join(event.text for event in own) == each.text
        assert [event.token_id for event in own[:-1]] == each.output_ids
        assert (own[-1].reasoning, {event.reasoning for event in own[:-1]}) == (each.reasoning, {None})


def test_blanks_before_an_answer_without_thoughts_are_kept(engines: dict[str, Engine]) -> None:
    engine = engines["qwen3"]
    (ids,) = engine.tokenizer.encode_plain(["\n\n three"])
    given = row(engine, "qwen3", "", "", stream=True, custom_params={"ids": ids, "end": [-1], "answer": []})
    events: list[StreamEvent] = []
    (done,) = engine.generate([given], on_event=events.append)
    assert (done.text, "".join(event.text for event in events)) == ("\n\n three", "\n\n three")
    assert any(event.text.startswith("\n\n ") for event in events[:-1])


def test_what_cannot_be_obeyed_is_refused(engines: dict[str, Engine], engine: Engine) -> None:
    chat = {"messages": HELLO, "max_new_tokens": 2}
    thinks = engines["qwen3"]
    cases: list[tuple[Engine, dict[str, Any], str, str]] = [
        (
            engine,
            {"separate_reasoning": True},
            "separate_reasoning",
            "name its family with Engine argument `reasoning`",
        ),
        (engine, {"thinking_budget": 4}, "thinking_budget", "name its family with Engine argument `reasoning`"),
        (thinks, {"constrain_reasoning": True}, "constrain_reasoning", "needs a constraint"),
        (thinks, {"thinking_budget": 4, "regex": "a+", "constrain_reasoning": True}, "thinking_budget", "whole text"),
        (thinks, {"thinking_budget": 4, "regex": "a+", "separate_reasoning": False}, "thinking_budget", "whole text"),
        (thinks, {"thinking_budget": -1}, "thinking_budget", "must be"),
        (thinks, {"reasoning_effort": "high"}, "reasoning_effort", "does not read it"),
        (thinks, {"chat_template_kwargs": {"think_hard": True}}, "chat_template_kwargs", "does not read it"),
    ]
    for used, fields, name, words in cases:
        (done,) = used.generate([{**chat, **fields}])
        assert done.error is not None, fields
        assert (done.error.param, words in done.error.message) == (name, True), done.error


@pytest.mark.field("reasoning_effort")
def test_template_switches_reach_the_prompt(engines: dict[str, Engine]) -> None:
    row = {"messages": HELLO, "max_new_tokens": 2, "temperature": 0}
    prompts = []
    for name, fields in (
        ("gpt_oss", {"reasoning_effort": "high"}),
        ("qwen3", {"chat_template_kwargs": {"enable_thinking": False}}),
    ):
        done = only(engines[name], {**row, **fields})
        assert done.prompt_ids is not None
        prompts.append(engines[name].tokenizer.decode(list(done.prompt_ids), skip_special_tokens=False))
        assert done.reasoning is None
    assert "Reasoning: high" in prompts[0]
    assert prompts[1].endswith("<think>\n</think>")


def test_a_job_and_its_files(folders: dict[str, Path], tmp_path: Path) -> None:
    """Columns, footer, report, export and JSON lines of a whole run; another family is another job."""
    (tmp_path / "mine.py").write_text("from tests.e2e.test_reasoning import script\n")
    engine = Engine(str(folders["qwen3"]), dtype="float32", attention="torch")
    given = row(engine, "qwen3", "one two", "three", thinking_budget=1)
    body = {"model": "*", **{key: value for key, value in given.items() if key != "max_new_tokens"}, "max_tokens": 30}
    line = {"custom_id": "line", "method": "POST", "url": "/v1/chat/completions", "body": body}
    write_lines(
        tmp_path / "in.jsonl", [{"id": "native", **given}, line, {"id": "text", "text": "Hi", "max_new_tokens": 2}]
    )
    model = ["--model", folders["qwen3"], "--dtype", "float32", "--logit-processor", "script=mine:script"]
    report = run(["run", "in.jsonl", "-o", "out.parquet", "--report", "-", *model], tmp_path).report
    assert report["reasoning"] == "qwen3"
    rows = rows_of(tmp_path / "out.parquet")
    found = [(each["text"], each["reasoning"], each["reasoning_tokens"], each["reasoning_cut"]) for each in rows]
    assert found[:2] == [("three", "o", 1, True)] * 2
    assert found[2][1:] == (None, None, None)
    footer = json.loads(pq.read_schema(tmp_path / "out.parquet").metadata[b"batchgen.run"])
    assert footer["reasoning"] == "qwen3"
    lines = run(["export", "out.parquet", "--format", "openai-batch", "-o", "-"], tmp_path).stdout.splitlines()
    exported = list(map(json.loads, lines))
    answer = exported[1]["response"]["body"]
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "three",
        "refusal": None,
        "reasoning": "o",
    }
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    run(["run", "in.jsonl", "-o", "out.jsonl", *model], tmp_path)
    lines = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert (lines[0]["reasoning"], lines[0]["batchgen"]["reasoning"]) == ("o", "qwen3")
    assert "2 of 2 rows are the same" in run(["verify", "out.parquet", "--rows", "2", *model[4:]], tmp_path).stdout
    refused = run(["run", "in.jsonl", "-o", "out.parquet", *model, "--reasoning", "off"], tmp_path, expect=2)
    assert "reasoning" in refused.stderr
    assert (
        "must be auto, off or one of" in run(["run", "in.jsonl", *model, "--reasoning", "x"], tmp_path, expect=2).stderr
    )
    named = run(["check", "in.jsonl", *model, "--reasoning", "think", "--json"], tmp_path)
    assert json.loads(named.stdout)["model"]["reasoning"] == "think"


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "qwen3")]
)
def test_results_do_not_depend_on_the_batch(engines: dict[str, Engine], name: str) -> None:
    """Rows of all kinds together, sampled without a script where they have none, and each alone."""
    engine = engines[name]
    hot: dict[str, Any] = {"messages": HELLO, "max_new_tokens": 30, "temperature": 1.5}
    rows = [
        {**hot, "thinking_budget": 3, "n": 3},
        {**hot, "thinking_budget": 0, "choice": ["yes", "no"], "return_logprob": True},
        {**hot, "json_schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}},
        {**hot, "stop": ["a", "e"], "min_new_tokens": 5, "best_of": 2},
        {**hot, "separate_reasoning": False},
        {**hot, "regex": "[ab]+", "constrain_reasoning": True},
        {"text": "one <think>", "max_new_tokens": 9, "temperature": 1.0, "thinking_budget": 2},
        row(engine, name, "one two", "three", thinking_budget=2),
        row(engine, name, "one two", "three", stop="r", return_logprob=True),
        row(engine, name, "naïve 東京", "é東", thinking_budget=4, logit_bias={"40": 3}),
    ]
    rows = [{"id": str(number), **each} for number, each in enumerate(rows)]
    together = list(engine.generate(rows, ordered=True))
    alone = [done for each in rows for done in engine.generate([each])]
    assert [parts(done) for done in together] == [parts(done) for done in alone]
    assert outcomes(together) == outcomes(alone)
    assert all(done.error is None for done in together)
    for done in together:
        limit = rows[done.row_index].get("thinking_budget")
        assert limit is None or (done.reasoning_tokens or 0) <= limit
    (yes_or_no,) = (done for done in together if done.row_index == 1)
    assert (yes_or_no.text in ("yes", "no"), yes_or_no.constraint_ok) == (True, True)


@pytest.mark.parametrize("masked", [{"allowed_token_ids": [40, 41, 42]}, {"bad_words": [ENDS["qwen3"]]}])
def test_masks_that_forbid_the_marker_end_the_row(engines: dict[str, Engine], masked: dict[str, Any]) -> None:
    engine = engines["qwen3"]
    given = {"input_ids": [*engine.tokenizer.encode_plain(["<|im_start|>assistant\n<think>"])[0]], **masked}
    (done,) = engine.generate([{**given, "thinking_budget": 2, "max_new_tokens": 9}])
    assert done.error is not None
    assert (done.error.code, done.error.param) == ("grammar_error", "thinking_budget")
    assert "forbid the marker that ends the thoughts" in done.error.message


def test_interrupted_and_sharded_jobs(folders: dict[str, Path], tmp_path: Path) -> None:
    chat = {"messages": HELLO, "max_new_tokens": 12, "thinking_budget": 3}
    write_lines(tmp_path / "in.jsonl", [{"id": f"r{i}", **chat, "seed": i} for i in range(40)])
    model = ["--model", folders["qwq"], "--dtype", "float32"]
    run(["run", "in.jsonl", "-o", "whole.parquet", *model], tmp_path)
    command = ["run", "in.jsonl", "-o", "out.parquet", *model]
    interrupt(command, tmp_path)
    run(command, tmp_path)
    for shard in ("0/2", "1/2"):
        run(["run", "in.jsonl", "-o", "shards", "--shard", shard, *model], tmp_path)
    run(["merge", "shards", "-o", "merged.parquet"], tmp_path)
    run(["run", "in.jsonl", "-o", "reused.parquet", "--reuse", "whole.parquet", *model], tmp_path)
    expected = rows_of(tmp_path / "whole.parquet")
    assert {each["reasoning_tokens"] for each in expected} == {3}
    write_lines(tmp_path / "short.jsonl", [{"messages": HELLO, "max_new_tokens": 3}])
    advice = run(["run", "short.jsonl", "--report", "-", *model], tmp_path).report["advice"]
    assert any("the model ended in its thoughts, or at once" in line for line in advice), advice
    for name in ("out", "merged", "reused"):
        found = rows_of(tmp_path / f"{name}.parquet")
        for column in ("text", "reasoning", "reasoning_tokens", "reasoning_cut", "output_ids"):
            assert [each[column] for each in found] == [each[column] for each in expected], (name, column)
