"""Run-wide sampling options: each equals a row's field, fields override options, and the fingerprint covers them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.rows import assert_same, by_id, read, rows_of, write_lines
from tests.e2e.runner import run
from tests.models.adapters import KINDS, save_adapter

F32 = ["--dtype", "float32"]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "tagged"}}
GRAMMAR = 'root ::= "ab" | "ba"\n'
ROW = {"text": "The quick", "temperature": 0, "max_new_tokens": 24}
PROCESSOR = ["--logit-processor", "boost=tests.e2e.processors:boost"]

CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "biases": (
        ["--logit-bias", "100=9,101=8.5", "--bad-words", "th", "--bad-words", "qu", "--echo", "--ignore-eos"],
        {"logit_bias": {"100": 9, "101": 8.5}, "bad_words": ["th", "qu"], "echo": True, "ignore_eos": True},
    ),
    "allowed": (
        ["--allowed-token-ids", "2,3,90,91,92", "--no-skip-special-tokens", "--no-spaces-between-special-tokens"],
        {"allowed_token_ids": [2, 3, 90, 91, 92], "skip_special_tokens": False, "spaces_between_special_tokens": False},
    ),
    "suppressed": (
        ["--allowed-token-ids", "90,91,92", "--suppress-tokens", "92", "--begin-suppress-tokens", "90"],
        {"allowed_token_ids": [90, 91, 92], "suppress_tokens": [92], "begin_suppress_tokens": [90]},
    ),
    "logprobs": (
        ["--return-logprob", "--token-ids-logprob", "13,2", "--logprob-start-len", "0"],
        {"return_logprob": True, "token_ids_logprob": [13, 2], "logprob_start_len": 0},
    ),
    "schema": (["--json-schema", "@schema.json"], {"json_schema": SCHEMA}),
    "regex": (["--regex", "@[a-c]{3}"], {"regex": "@[a-c]{3}"}),
    "grammar": (["--ebnf", "@answer.gbnf"], {"ebnf": GRAMMAR}),
    "tag": (["--structural-tag", json.dumps(TAG)], {"structural_tag": TAG}),
    "choice": (["--choice", "alpha", "--choice", "beta, gamma"], {"choice": ["alpha", "beta, gamma"]}),
    "states": (["--return-hidden-states", "last"], {"return_hidden_states": {"tokens": "last"}}),
    "layers": (
        ["--return-hidden-states", '{"layers": [0, 1], "pool": "mean"}'],
        {"return_hidden_states": {"layers": [0, 1], "pool": "mean"}},
    ),
    "processor": (["--custom-logit-processor", "boost"], {"custom_logit_processor": "boost"}),
    "processor params": (
        ["--custom-logit-processor", "boost", "--custom-params", '{"token": 41, "by": 3}'],
        {"custom_logit_processor": "boost", "custom_params": {"token": 41, "by": 3}},
    ),
    "adapter": (["--lora-path", "fr"], {"lora_path": "fr"}),
    "penalties": (
        ["--repetition-penalty", "1.6", "--frequency-penalty", "0.5", "--presence-penalty", "-0.25"],
        {"repetition_penalty": 1.6, "frequency_penalty": 0.5, "presence_penalty": -0.25},
    ),
}


def row_of(name: str) -> dict[str, Any]:
    """The row without its case's fields; "processor" has the `custom_params` that another case gives as an option."""
    return {"id": name, **ROW, **({"custom_params": {"token": 40, "by": 3}} if name == "processor" else {})}


@pytest.fixture(scope="module")
def files(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a schema, a grammar, an adapter, and `rows.parquet`: results of one row with fields per case."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "schema.json").write_text(json.dumps(SCHEMA, indent=2))
    (folder / "answer.gbnf").write_text(GRAMMAR)
    save_adapter(model, folder / "fr", **KINDS["two"])
    write_lines(folder / "in.jsonl", [row_of(name) | fields for name, (_, fields) in CASES.items()])
    run(["run", "in.jsonl", "-o", "rows.parquet", *options(model, folder)], folder)
    return folder


def options(model: Path, files: Path) -> list[Any]:
    return ["--model", model, *F32, "--lora", f"fr={files / 'fr'}", *PROCESSOR]


def states(path: Path, name: str) -> list[dict[str, Any]]:
    table = pq.read_table(path) if path.exists() else pa.table({"id": pa.array([], pa.string())})
    return [{k: v for k, v in row.items() if k != "row_index"} for row in table.to_pylist() if row["id"] == name]


@pytest.mark.field("logit_bias", "bad_words", "allowed_token_ids", "token_ids_logprob", "echo")
@pytest.mark.field("suppress_tokens", "begin_suppress_tokens")
@pytest.mark.field("spaces_between_special_tokens", "json_schema", "regex", "ebnf", "structural_tag", "choice")
@pytest.mark.field("return_hidden_states", "lora_path", "custom_logit_processor", "custom_params")
@pytest.mark.field("repetition_penalty", "frequency_penalty", "presence_penalty")
@pytest.mark.parametrize("name", CASES)
def test_an_option_equals_the_field(name: str, model: Path, files: Path, tmp_path: Path) -> None:
    for file in ("schema.json", "answer.gbnf"):
        (tmp_path / file).write_bytes((files / file).read_bytes())
    score = {"id": "score", "text": "The quick", "completion": " brown"}
    write_lines(tmp_path / "in.jsonl", [row_of(name), score])
    run(["run", "in.jsonl", "-o", "out.parquet", *options(model, files), *CASES[name][0]], tmp_path)
    by_fields, by_option = read(files / "rows.parquet"), read(tmp_path / "out.parquet")
    expected = by_fields.slice(list(CASES).index(name), 1)
    assert expected["status"].to_pylist() == ["ok"], expected["error"].to_pylist()
    assert_same(by_option.slice(0, 1), expected, ignore=["row_index", "cached_tokens", "dedup_of"])
    scored = by_option.slice(1, 1).to_pylist()[0]
    assert (scored["status"], len(scored["scores"]), scored["constraint_ok"]) == ("ok", 1, None)
    got, wanted = (states(path, name) for path in (tmp_path / "out.hidden.parquet", files / "rows.hidden.parquet"))
    assert [{**row, "values": None} for row in got] == [{**row, "values": None} for row in wanted]
    assert bool(got) == (name in ("states", "layers"))
    for left, right in zip(got, wanted, strict=True):
        assert left["values"] == pytest.approx(right["values"], abs=1e-4)


def test_fields_override_options(model: Path, tmp_path: Path) -> None:
    """A field replaces its option, a constraint any constraint option; an empty value switches the option off."""
    plain = {"response_format": {"type": "text"}, "echo": False, "logit_bias": {}, "return_hidden_states": False}
    rows = [
        {"id": "default", **ROW},
        {"id": "pattern", **ROW, "regex": "[0-9]{2}"},
        {"id": "same", **ROW, "choice": ["row"]},
        {"id": "object", **ROW, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"id": "free", **ROW, **plain},
        {"id": "null", **ROW, **dict.fromkeys(plain)},
    ]
    write_lines(tmp_path / "in.jsonl", rows)
    given = ["--choice", "one", "--choice", "two", "--echo", "--logit-bias", "40=5", "--return-hidden-states", "mean"]
    run(["run", "in.jsonl", "-o", "out.parquet", "--model", model, *F32, *given], tmp_path)
    found = by_id(tmp_path / "out.parquet")
    assert {row["status"] for row in found.values()} == {"ok"}
    assert found["default"]["text"] in ("The quickone", "The quicktwo")
    assert found["null"]["text"] == found["default"]["text"]
    assert found["pattern"]["text"].removeprefix("The quick").isdecimal()
    assert found["same"]["text"] == "The quickrow"
    assert json.loads(found["object"]["text"].removeprefix("The quick"))["a"] in ("x", "y")
    assert found["free"]["constraint_ok"] is None
    without = {"id": "free", **ROW}
    write_lines(tmp_path / "plain.jsonl", [without])
    run(["run", "plain.jsonl", "-o", "plain.parquet", "--model", model, *F32], tmp_path)
    assert found["free"]["output_ids"] == rows_of(tmp_path / "plain.parquet")[0]["output_ids"]
    assert found["free"]["text"] == rows_of(tmp_path / "plain.parquet")[0]["text"]
    written = pq.read_table(tmp_path / "out.hidden.parquet").to_pylist()
    assert [row["id"] for row in written] == ["default", "pattern", "same", "object", "null"]


@pytest.mark.field("stream")
def test_events_of_every_row(model: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [{"id": "a", **ROW}, {"id": "b", **ROW, "stream": False}])
    command = ["run", "in.jsonl", "-o", "out.parquet", "--model", model, *F32, "--stream"]
    assert "--events PATH" in run(command, tmp_path, expect=2).stderr
    events = run([*command, "--events", "-"], tmp_path).stdout.splitlines()
    assert {json.loads(line)["id"] for line in events} == {"a"}
    assert "".join(json.loads(line)["text"] for line in events) == by_id(tmp_path / "out.parquet")["a"]["text"]


@pytest.mark.field("return_routed_experts")
def test_an_option_that_the_model_does_not_support_is_an_error_of_each_row(model: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [{"id": "a", **ROW}, {"id": "b", **ROW, "return_routed_experts": False}])
    command = ["run", "in.jsonl", "-o", "out.parquet", "--model", model, *F32, "--return-routed-experts"]
    run([*command], tmp_path)
    found = by_id(tmp_path / "out.parquet")
    assert (found["a"]["error"]["code"], found["b"]["status"]) == ("unsupported_field", "ok")
    assert found["a"]["error"]["param"] == "return_routed_experts"


def test_the_fingerprint_covers_the_content_of_option_files(model: Path, tmp_path: Path) -> None:
    """The same text under another name is the same job, another text is not, and a replay needs no file."""
    write_lines(tmp_path / "in.jsonl", [{"id": "a", **ROW}])
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    command = ["run", "in.jsonl", "-o", "out.parquet", "--model", model, *F32, "--deterministic"]
    more = ["--logit-bias", "40=0.3,7=-1e-7", "--bad-words", "th", "--return-logprob", "--token-ids-logprob", "7"]
    run([*command, *more, "--json-schema", "@schema.json"], tmp_path)
    written = (tmp_path / "out.parquet").stat().st_mtime_ns
    (tmp_path / "schema.json").rename(tmp_path / "moved.json")
    run([*command, *more, "--json-schema", "@moved.json"], tmp_path)
    assert (tmp_path / "out.parquet").stat().st_mtime_ns == written
    run([*command, *more, "--json-schema", json.dumps(SCHEMA)], tmp_path)
    (tmp_path / "moved.json").write_text(json.dumps(SCHEMA | {"title": "another"}))
    run([*command, *more, "--json-schema", "@moved.json"], tmp_path, expect=2)
    (tmp_path / "moved.json").unlink()
    assert run(["verify", "out.parquet"], tmp_path).stdout.endswith("1 of 1 rows are the same\n")
