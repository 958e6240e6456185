"""`-o x.jsonl`: each input row is answered in its own format, written at the end, resumed and repeated like Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchgen.data.results_file import read_footer
from tests.e2e.rows import write_lines
from tests.e2e.runner import interrupt, run

Lines = list[bytes | dict[str, Any]]


def batch(count: int = 12) -> Lines:
    """OpenAI lines of both endpoints; one is refused, one cannot be read."""
    lines: Lines = []
    for i in range(count):
        body: dict[str, Any] = {"model": "*", "max_tokens": 3 + i % 4, "seed": i}
        if i % 2:
            body |= {"messages": [{"role": "user", "content": f"Say {i}"}], "logprobs": True}
        else:
            body |= {"prompt": f"Say {i}", "temperature": 3 if i == 4 else 1, "n": 2}
        url = "/v1/chat/completions" if i % 2 else "/v1/completions"
        lines.append({"custom_id": f"id {i}", "method": "POST", "url": url, "body": body})
    return [*lines, b'{"custom_id": "cut", ']


def native(count: int = 8) -> Lines:
    """Native rows; one is refused."""
    rows: Lines = [
        {"id": str(i), "text": f"Say {i}", "max_new_tokens": 3, "n": 1 + i % 2, "k": i} for i in range(count)
    ]
    return [*rows, {"id": "bad", "text": "Say", "top_p": 7}]


def loaded(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_time(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for line in lines:
        line["response"]["body"].pop("created", None)
    return lines


@pytest.fixture
def command(model: Path) -> list[Any]:
    return ["run", "in.jsonl", "-o", "x.jsonl", "--model", model, "--dtype", "float32"]


def test_batch_lines_are_answered_as_export_does(command: list[Any], tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", batch())
    result = run(command, tmp_path)
    assert "see: x.errors.jsonl" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "x.errors.jsonl", "x.jsonl"]
    run([*command, "-o", "y.parquet"], tmp_path)
    run(["export", "y.parquet", "--format", "openai-batch"], tmp_path)
    for name, exported in (("x.jsonl", "y.openai.jsonl"), ("x.errors.jsonl", "y.openai.errors.jsonl")):
        assert without_time(loaded(tmp_path / name)) == without_time(loaded(tmp_path / exported))
    assert len(loaded(tmp_path / "x.errors.jsonl")) == 2
    before = (tmp_path / "x.jsonl").stat().st_mtime_ns
    report = run([*command, "--report", "-"], tmp_path).report
    assert (report["already_done"], report["rows"], report["rows_error"]) == (True, 13, 2)
    assert (tmp_path / "x.jsonl").stat().st_mtime_ns == before


def test_native_rows_are_answered_as_export_does(command: list[Any], tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", native())
    run(command, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "x.jsonl"]
    run([*command, "-o", "y.parquet"], tmp_path)
    run(["export", "y.parquet", "--format", "jsonl"], tmp_path)
    found = loaded(tmp_path / "x.jsonl")
    (job,) = {line.pop("batchgen")["job"] for line in found}
    assert found == loaded(tmp_path / "y.jsonl")
    assert (read_footer(tmp_path / "y.parquet") or {})["fingerprint"].startswith(job)
    before = (tmp_path / "x.jsonl").stat().st_mtime_ns
    report = run([*command, "--report", "-"], tmp_path).report
    assert (report["already_done"], report["rows"], report["rows_error"]) == (True, 9, 1)
    assert (tmp_path / "x.jsonl").stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.glob("x*")) == ["x.jsonl"]


def test_a_mixed_input_is_answered_row_by_row(command: list[Any], tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [*native(3), *batch(6)])
    run(command, tmp_path)
    found = loaded(tmp_path / "x.jsonl")
    assert [line.get("custom_id", line.get("id")) for line in found] == [
        *("0", "1", "1", "2", "bad"),
        *("id 0", "id 1", "id 2", "id 3", "id 5"),
    ]
    assert [line["custom_id"] for line in loaded(tmp_path / "x.errors.jsonl")] == ["id 4", "cut"]
    assert run([*command, "--report", "-"], tmp_path).report["already_done"]


def test_an_interrupted_run_is_resumed(command: list[Any], tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", batch(60))
    interrupt(command, tmp_path, "x.jsonl")
    assert not (tmp_path / "x.jsonl").exists()
    assert "id 1" in run(["show", "x.jsonl", "--limit", "0"], tmp_path).stdout, "the rows that are committed"
    assert run([*command, "--report", "-"], tmp_path).report["rows_resumed"] > 0
    resumed = without_time(loaded(tmp_path / "x.jsonl"))
    run([*command, "--overwrite"], tmp_path)
    assert [line["custom_id"] for line in resumed] == [line["custom_id"] for line in loaded(tmp_path / "x.jsonl")]


@pytest.mark.parametrize("rows", [batch(), native()], ids=["batch", "native"])
def test_lines_of_another_job_are_kept_unless_they_are_overwritten(
    command: list[Any], tmp_path: Path, rows: Lines
) -> None:
    write_lines(tmp_path / "in.jsonl", rows)
    run(command, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("x*")}
    write_lines(tmp_path / "in.jsonl", rows[1:])
    for options in ([], ["--resume-anyway"], ["--retry-errors"], ["--reuse", "x.jsonl"]):
        message = run([*command, *options], tmp_path, expect=2).stderr
        assert "--overwrite" in message or "-o OUT.parquet" in message
    write_lines(tmp_path / "in.jsonl", rows)
    assert "errors cannot be retried" in run([*command, "--retry-errors"], tmp_path, expect=2).stderr
    assert {path.name: path.read_bytes() for path in tmp_path.glob("x*")} == before
    write_lines(tmp_path / "in.jsonl", rows[1:])
    run([*command, "--overwrite"], tmp_path)
    assert len(loaded(tmp_path / "x.jsonl")) < before["x.jsonl"].count(b"\n")


def test_commands_that_read_parquet_say_so(command: list[Any], tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", native(1))
    run(command, tmp_path)
    for words in (["show"], ["export", "--format", "jsonl"], ["verify"], ["merge", "-o", "m.parquet"]):
        assert "JSON lines" in run([words[0], "x.jsonl", *words[1:]], tmp_path, expect=4).stderr
    assert "shards are Parquet" in run([*command, "--shard", "0/2"], tmp_path, expect=2).stderr
    (tmp_path / "y.errors.jsonl").write_text('{"text": "mine"}\n')
    other = run([*command, "-o", "y.jsonl"], tmp_path, expect=2).stderr
    assert "y.errors.jsonl exists and is not this job's output" in other


def test_a_mended_row_is_another_job(command: list[Any], tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", native(2))
    run(command, tmp_path)
    write_lines(tmp_path / "in.jsonl", [*native(2)[:-1], {"id": "bad", "text": "Say", "top_p": 0.7}])
    assert "x.jsonl exists and is not this job's output" in run(command, tmp_path, expect=2).stderr
    assert run([*command, "--overwrite", "--report", "-"], tmp_path).report["rows_error"] == 0
    assert loaded(tmp_path / "x.jsonl")[-1]["status"] == "ok"


@pytest.mark.parametrize(
    "options",
    [
        ["--carry", "k"],
        ["--carry", "none", "--include-source"],
        ["--include-prompt", "--n", "2"],
        ["--on-bad-row", "skip"],
        ["--limit", "0"],
    ],
    ids=" ".join,
)
def test_a_finished_job_is_complete_with_every_option(command: list[Any], tmp_path: Path, options: list[str]) -> None:
    write_lines(tmp_path / "in.jsonl", native(2))
    run([*command, *options], tmp_path)
    before = (tmp_path / "x.jsonl").read_bytes()
    report = run([*command, *options, "--report", "-"], tmp_path).report
    assert report["already_done"] is (before != b""), "a job without rows is run again"
    assert (tmp_path / "x.jsonl").read_bytes() == before


def test_a_carried_field_cannot_replace_the_name_of_the_job(command: list[Any], tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [{"text": "Say", "max_new_tokens": 1, "batchgen": 1}])
    assert "rename the field" in run([*command, "--carry", "batchgen"], tmp_path, expect=2).stderr
    run(command, tmp_path)
    (line,) = loaded(tmp_path / "x.jsonl")
    assert (line["extra"], list(line["batchgen"])) == ({"batchgen": 1}, ["job", "kernels"])


@pytest.mark.parametrize("whose", ["batchgen", "stranger"])
def test_overwriting_removes_only_batchgens_errors(command: list[Any], tmp_path: Path, whose: str) -> None:
    errors = tmp_path / "x.errors.jsonl"
    write_lines(tmp_path / "in.jsonl", batch(6))
    run(command, tmp_path)
    if whose == "stranger":
        with errors.open("ab") as stream:
            stream.write(b'{"text": "mine"}\n')
    before = errors.read_bytes()
    write_lines(tmp_path / "in.jsonl", native(1))
    run([*command, "--overwrite"], tmp_path)
    assert (errors.read_bytes() if errors.exists() else None) == (before if whose == "stranger" else None)
    assert run([*command, "--report", "-"], tmp_path).report["rows"] == 2, "the other file is not counted"


def constrained() -> Lines:
    """Rows of both formats with constraints, one cut short; empty answers; equal rows; a loop; scored texts."""
    fields: list[dict[str, Any]] = [
        {"max_tokens": 8, "regex": "[0-9]{2}"},
        {"max_tokens": 1, "regex": "[0-9]{9}"},
        {"max_tokens": 4, "stop_regex": "[^~]"},
        {"max_tokens": 60, "regex": "~{40}"},
        {"completions": [" a", " b"]},
    ]
    lines: Lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "*", "prompt": "Say", **own},
        }
        for i, own in enumerate(fields)
    ]
    equal = {"text": "Equal", "temperature": 0, "max_new_tokens": 3}
    return [*lines, *({"text": "Say", **own} for own in fields), equal, equal]


def copies() -> Lines:
    """OpenAI lines of equal greedy rows, of several greedy samples, and of samples that `best_of` drops."""
    body = {"model": "*", "prompt": "Equal", "temperature": 0, "max_tokens": 3}
    bodies = [body, body, body | {"n": 2}, {"model": "*", "prompt": "Say", "best_of": 3, "max_tokens": 2}]
    line = {"method": "POST", "url": "/v1/completions"}
    return [{"custom_id": str(i), **line, "body": own} for i, own in enumerate([*bodies, {"model": "*"}])]


REPORTED: dict[str, tuple[Lines, list[str]]] = {
    "constrained": (constrained(), []),
    "native": (native(), []),
    "batch": (batch(), []),
    "copies": (copies(), []),
    "native without bad rows": (native(), ["--on-bad-row", "skip"]),
    "batch without bad rows": (batch(), ["--on-bad-row", "skip"]),
    "some of batch": (batch(), ["--offset", "2", "--limit", "5"]),
}


@pytest.mark.parametrize(("rows", "options"), REPORTED.values(), ids=REPORTED)
def test_a_finished_job_reports_what_its_run_reported(
    command: list[Any], tmp_path: Path, rows: Lines, options: list[str]
) -> None:
    write_lines(tmp_path / "in.jsonl", rows)
    command = [*command, "--stop-on-repeat", "4", "--report", "-", *options]
    first, second = (run(command, tmp_path).report for _ in range(2))
    assert second["already_done"]
    names = ("rows", "rows_ok", "rows_error", "rows_skipped", "errors", "finish_reasons", "constraints", "empty_texts")
    assert {name: second[name] for name in names} == {name: first[name] for name in names}
    assert first["finish_reasons"]
    tokens = ["completion_tokens", "copied_tokens", "dropped_tokens"]
    tokens += ["cached_tokens"] if rows in (constrained(), native()) else []  # the usage of `n` counts a prompt once
    assert {name: second[name] for name in tokens} == {name: first[name] for name in tokens}
    assert second["kernels"] == (first["kernels"] if rows == native() else ""), "lines of OpenAI do not name them"
    if rows == copies():
        assert first["copied_tokens"] > 0
        assert first["dropped_tokens"] > 0
    if rows == constrained():
        assert len(first["constraints"]) == 2
        assert first["empty_texts"] >= 2
        assert len(first["finish_reasons"]) == 3


@pytest.mark.parametrize("lost", ["x.errors.jsonl", "an error", "an answer", "native"])
def test_missing_lines_are_noticed(command: list[Any], tmp_path: Path, lost: str) -> None:
    write_lines(tmp_path / "in.jsonl", native() if lost == "native" else batch())
    run(command, tmp_path)
    file = tmp_path / ("x.jsonl" if lost in ("an answer", "native") else "x.errors.jsonl")
    kept = file.read_bytes()
    if lost == "x.errors.jsonl":
        file.unlink()
    else:
        file.write_bytes(b"".join(kept.splitlines(keepends=True)[:-1]))
    before = {path.name: path.read_bytes() for path in tmp_path.glob("x*")}
    missing = run(command, tmp_path, expect=5).stderr
    assert "rows have no line" in missing
    assert "x.errors.jsonl" in missing
    assert {path.name: path.read_bytes() for path in tmp_path.glob("x*")} == before
    file.write_bytes(kept)
    assert run([*command, "--report", "-"], tmp_path).report["already_done"]


@pytest.mark.parametrize("kind", ["native", "batch"])
def test_missing_hidden_states_are_noticed(command: list[Any], tmp_path: Path, kind: str) -> None:
    row: dict[str, Any] = {"max_tokens": 2, "return_hidden_states": True}
    if kind == "native":
        rows: Lines = [{"text": "Say", **row}]
    else:
        body = {"model": "*", "prompt": "Say", **row}
        rows = [{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}]
    write_lines(tmp_path / "in.jsonl", rows)
    run(command, tmp_path)
    assert run([*command, "--report", "-"], tmp_path).report["already_done"]
    (tmp_path / "x.jsonl.hidden.parquet").unlink()
    missing = run(command, tmp_path, expect=5).stderr
    assert "its hidden states x.jsonl.hidden.parquet are missing" in missing
    run([*command, "--overwrite"], tmp_path)
    assert (tmp_path / "x.jsonl.hidden.parquet").exists()
