"""Whatever a step raises for one row becomes that row's error; all other rows are right, and the run ends with 0."""

from __future__ import annotations

import errno
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from batchgen.errors import DeviceError, ErrorCode, OutputError, RowError, row_error
from batchgen.tables.text_fields import TextFields
from batchgen.text.stops.conditions import StopState
from tests.e2e.rows import rows_of, write_lines
from tests.e2e.runner import run

CHAT = [{"role": "user", "content": "poison 4"}]
SCORED = {"completion": " u", "max_new_tokens": None, "temperature": None, "stop": None}


class Step(NamedTuple):
    """A step of a row's way: the function that does it, and what a row needs to come by."""

    function: str
    """MODULE:NAME or MODULE:CLASS.NAME, in `batchgen`"""
    fields: Mapping[str, Any] = {}
    is_row: Callable[..., bool] | None = None
    """Whether a call with these arguments is for the row of this step; None: it can be seen from them."""


STEPS = [
    Step("request.rows.row_memory:parse_json_object"),
    Step("engine.row_reader:parse_row"),
    Step("engine.row_reader:EmbedsReader.store", {"input_embeds": [[0.5] * 64], "text": None}, lambda *_: True),
    Step("text.param_checks:check_stops"),
    Step("text.tokens.tokenizer:Tokenizer.render_chats", {"messages": CHAT, "text": None}),
    Step("text.tokens.tokenizer:Tokenizer.encode_plain"),
    Step("text.grammar.compiler:GrammarCompiler.compile", {"regex": "poison 6"}),
    Step("job.rows.ingest:extra_json", {"note": "poison 7"}),
    Step("job.rows.ingest:_prompt_ids", {"input_ids": [99, 9], "text": None}, lambda prompt: 99 in prompt.ids),
    Step("engine.sampling.logits_processor:RulesCache.start"),
    Step("text.stops.conditions:StopState.__init__"),
    Step("text.grammar.grammars:Grammars.matcher", {"regex": "poison 11"}),
    Step(
        "engine.sampling.constraints:GrammarState.accept",
        {"choice": ["a", "b"]},
        lambda state, token: '"a"' in state.constraint.text,
    ),
    Step("text.stops.conditions:StopState.append"),
    Step("text.stops.conditions:StopState.finish"),
    Step("engine.step.logprobs:LogprobColumns.finish", {"return_logprob": True}),
    Step(
        "engine.capture.hidden_states:HiddenStateCollector.finish",
        {"return_hidden_states": True, "max_new_tokens": 3, "stop": None},
        lambda collector, number, num_tokens: num_tokens == 3,
    ),
    Step("text.grammar.grammars:Grammars.satisfied", {"ebnf": 'root ::= "c" | "d"', "max_new_tokens": 9}),
    Step("engine.outputs.processor:add_echo_and_suffix", {"echo": True}),
    Step("text.stops.conditions:StopState.next_output_text", {"stream": True}),
    Step("engine.outputs.processor:OutputProcessor.finish_prompt", {"n": 2, "temperature": 1}),
    Step(
        "engine.capture.prompt_logprobs:PromptLogprobs.add_to_completions",
        {"return_logprob": True, "logprob_start_len": 0},
    ),
    Step("engine.capture.prompt_logprobs:PromptLogprobs.target_logprobs", SCORED, lambda *_: True),
    Step("job.rows.request_hashes:RequestHashes.of", {}, lambda hashes, row, prompt: row == 47),
    Step(
        "data.store.parts:completions_to_table",
        {},
        lambda rows, asked: any(row.id == "bad 24" for row in rows if good(row)),
    ),
]


def good(row: Any) -> bool:
    return row.completion.error is None


def row_of(number: int, step: Step) -> dict[str, Any]:
    """The row that the step raises for: its text and its stop hold the step's number."""
    base = {"id": f"bad {number}", "text": f"poison {number}", "stop": f"poison {number}"}
    fields = {**base, "temperature": 0, "max_new_tokens": 4, **step.fields}
    return {name: value for name, value in fields.items() if value is not None}


def good_row(number: int) -> dict[str, Any]:
    return {"id": f"good {number}", "text": f"Hello {number}", "max_new_tokens": 5}


class Raising:
    """Makes the function of each step raise `error` for the row of that step."""

    def __init__(self, patch: pytest.MonkeyPatch, error: type[Exception]) -> None:
        self._error = error
        self._stops: dict[int, str] = {}
        """The stop strings of a `StopState`, as text."""
        self.calls = [0] * len(STEPS)
        started = StopState.__init__

        def remember(state: StopState, params: Any, *more: Any) -> None:
            self._stops[id(state)] = repr(params.stop)
            started(state, params, *more)

        patch.setattr(StopState, "__init__", remember)
        for number, step in enumerate(STEPS):
            self._replace(patch, number, step)

    def _replace(self, patch: pytest.MonkeyPatch, number: int, step: Step) -> None:
        module, _, path = step.function.partition(":")
        owner: Any = importlib.import_module(f"batchgen.{module}")
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        original = getattr(owner, name)
        is_row = step.is_row or (lambda *arguments: self._is_named(number, arguments))

        def raising(*arguments: Any, **named: Any) -> Any:
            if is_row(*arguments):
                self.calls[number] += 1
                raise self._error("injected")
            return original(*arguments, **named)

        patch.setattr(owner, name, raising)

    def _is_named(self, number: int, arguments: tuple[Any, ...]) -> bool:
        """Whether one of the arguments holds the row's mark, itself or in the parameters of its request."""
        for argument in arguments:
            request = getattr(argument, "request", argument)
            held = getattr(request, "params", argument)
            for text in (self._stops.get(id(argument), ""), repr(held)):
                if f"poison {number}'" in text or f'poison {number}"' in text or (number == 17 and "root ::=" in text):
                    return True
        return False


def options(model: Path) -> list[object]:
    events = ["--events", "events.jsonl", "--include-prompt", "--max-errors", "99%"]
    return ["--model", model, "--dtype", "float32", "--temperature", "0", *events]


@pytest.mark.parametrize("error", [RecursionError, MemoryError])
def test_what_a_step_raises_is_the_error_of_its_row_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    rows = [row for number, step in enumerate(STEPS) for row in (good_row(number), row_of(number, step))]
    write_lines(tmp_path / "in.jsonl", rows)
    with monkeypatch.context() as patch:
        raising = Raising(patch, error)
        run(["run", "in.jsonl", "-o", "out.parquet", *options(model)], tmp_path)
    assert [step.function for step, calls in zip(STEPS, raising.calls, strict=True) if not calls] == []
    found = rows_of(tmp_path / "out.parquet")
    assert [row["row_index"] for row in found] == list(range(len(rows)))  # one row each, whatever it asked for
    failed = {
        step.function: row["error"] and row["error"]["code"] for step, row in zip(STEPS, found[1::2], strict=True)
    }
    assert set(failed.values()) == {"internal" if error is RecursionError else "oom"}, failed

    write_lines(tmp_path / "good.jsonl", rows[::2])
    run(["run", "good.jsonl", "-o", "good.parquet", *options(model)], tmp_path)
    expected = [(row["id"], row["text"]) for row in rows_of(tmp_path / "good.parquet")]
    assert [(row["id"], row["text"]) for row in found[::2]] == expected


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_row_of_a_table_that_cannot_be_converted_fails_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    texts = [f"Hello {number}" for number in range(20)]
    texts[7] = "poison"
    table = pa.table({"id": [f"id {number}" for number in range(20)], "text": texts})
    if kind == "parquet":
        pq.write_table(table, tmp_path / "in.parquet")
    else:
        (tmp_path / "in.csv").write_text("id,text\n" + "".join(f"id {i},{text}\n" for i, text in enumerate(texts)))
    read = TextFields.read

    def raising(fields: TextFields, row: dict[str, Any]) -> dict[str, Any]:
        if row.get("text") == "poison":
            raise RecursionError("injected")
        return read(fields, row)

    monkeypatch.setattr(TextFields, "read", raising)
    run(["run", f"in.{kind}", "-o", "out.parquet", *options(model), "--max-new-tokens", "3"], tmp_path)
    rows = rows_of(tmp_path / "out.parquet")
    assert [row["row_index"] for row in rows if row["error"]] == [7]
    assert (rows[7]["id"], rows[7]["error"]["code"]) == ("id 7", "internal")


NOT_OF_A_ROW = [
    OutputError("disk"),
    DeviceError("device"),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EMFILE, "Too many open files"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    torch.OutOfMemoryError("CUDA out of memory"),
]


@pytest.mark.parametrize("error", NOT_OF_A_ROW, ids=repr)
def test_what_is_not_a_rows_is_raised(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        row_error(error, "a step")
    assert caught.value is error


OF_A_ROW = [
    (RowError(ErrorCode.INVALID_FIELD, "`n` must be 1", "n"), "invalid_field", "`n` must be 1"),
    (FileNotFoundError(errno.ENOENT, "No such file"), "internal", "a step raised FileNotFoundError: "),
    (RuntimeError("shape"), "internal", "a step raised RuntimeError: shape; change the row"),
    (ValueError(), "internal", "a step raised ValueError; change"),
    (KeyError("half \ud800 a pair\nand more"), "internal", r"a step raised KeyError: "),
    (MemoryError(), "oom", "a step ran out of memory"),
]


@pytest.mark.parametrize(("error", "code", "message"), OF_A_ROW, ids=repr)
def test_the_error_of_a_row_names_the_step_and_what_was_raised(error: Exception, code: str, message: str) -> None:
    info = row_error(error, "a step")
    assert info.code == code
    assert info.message.startswith(message)
    assert info.message.encode()
