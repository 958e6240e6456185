"""Rows that an earlier job finished with the same request are reused: the output is that of a run of the new input."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.e2e.rows import assert_same, mixed_lines, prompts, read, rows_of, write_lines
from tests.e2e.runner import interrupt, parts_of, run, start

F32 = ["--dtype", "float32"]
Lines = list[bytes | dict[str, Any]]


def lines(count: int = 60) -> Lines:
    """Rows of every kind with ids, some of them wrong, duplicates, samples, scores and hidden states."""
    rows: Lines = []
    for i, row in enumerate(mixed_lines(count, seed=8)):
        named = isinstance(row, bytes) or "id" in row or "custom_id" in row
        rows.append(row if isinstance(row, bytes) or named else {**row, "id": f"own {i}"})
    states = {"layers": [0, -1]}
    rows.append({"id": "states", "text": "Inside", "max_new_tokens": 3, "return_hidden_states": states, "n": 2})
    return [*rows, {"id": "twin", "text": "Every eleventh row is the same.", "temperature": 0, "max_new_tokens": 20}]


def mended(rows: Lines) -> Lines:
    """A row mended, one changed, one carried field changed, one removed, some appended, all in another order."""
    found = [*rows]
    found[28] = {"id": "mended", "text": "no longer cut", "max_new_tokens": 3}
    found[2] = {**found[2], "seed": 77}  # type: ignore[dict-item]
    found[0] = {**found[0], "source": "elsewhere"}  # type: ignore[dict-item]
    del found[13]
    found += [{"id": f"new {i}", "text": text, "max_new_tokens": 4} for i, text in enumerate(prompts(5, 3))]
    return found[::-1]


@pytest.fixture(scope="module")
def done(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the finished outputs of `lines` (old) and of the mended rows (new)."""
    folder = tmp_path_factory.mktemp("done")
    for name, rows in (("old", lines()), ("new", mended(lines()))):
        write_lines(folder / "in.jsonl", rows)
        run(["run", "in.jsonl", "-o", f"{name}.parquet", "--model", model, *F32], folder)
    return folder


@pytest.fixture
def job(done: Path, model: Path, tmp_path: Path) -> list[Any]:
    """The command of a finished job whose input was mended afterwards."""
    for name in ("out.parquet", "out.hidden.parquet"):
        shutil.copy(done / name.replace("out", "old"), tmp_path / name)
    write_lines(tmp_path / "in.jsonl", mended(lines()))
    return ["run", "in.jsonl", "-o", "out.parquet", "--model", model, *F32]


def assert_as_new(out: Path, done: Path) -> None:
    """The output is that of a run that computed every row of the new input."""
    assert_same(read(out), read(done / "new.parquet"))
    hidden = [
        folder.with_name(folder.name.replace(".parquet", ".hidden.parquet")) for folder in (out, done / "new.parquet")
    ]
    assert pq.read_table(hidden[0]).to_pylist() == pq.read_table(hidden[1]).to_pylist()


@pytest.mark.parametrize(
    "option", [["--reuse", "out.parquet"], ["--resume-anyway"], ["--retry-errors"]], ids=lambda o: o[0]
)
def test_a_finished_output_gives_the_rows_that_stayed_the_same(
    job: list[Any], done: Path, tmp_path: Path, option: list[str]
) -> None:
    result = run([*job, *option, "--report", "-"], tmp_path)
    assert_as_new(tmp_path / "out.parquet", done)
    report = result.report
    assert report["rows"] - report["rows_resumed"] == 5 + 2 + 1, "appended, mended or changed, and failed rows"
    assert "are reused" in result.stderr
    assert not (tmp_path / "out.parquet.work").exists()
    assert run([*job, "--report", "-"], tmp_path).report["already_done"]


def test_a_changed_input_is_refused_with_what_differs_and_what_can_be_reused(job: list[Any], tmp_path: Path) -> None:
    before = (tmp_path / "out.parquet").read_bytes()
    message = run(job, tmp_path, expect=2).stderr
    assert "out.parquet exists and is not this job's output" in message
    assert "input file in.jsonl had " in message
    rows = len(mended(lines()))
    assert f"{rows - 8} of this job's {rows} rows can be reused: add --reuse out.parquet or --resume-anyway" in message
    assert (tmp_path / "out.parquet").read_bytes() == before
    assert not (tmp_path / "out.parquet.work").exists()


def test_another_output_gives_its_rows(job: list[Any], done: Path, tmp_path: Path) -> None:
    """A finished one, whose file stays; one that is not finished; and a folder of shards."""
    write_lines(tmp_path / "old.jsonl", lines())
    old = ["run", "old.jsonl", *job[4:]]
    for i in range(2):
        run([*old, "-o", "shards", "--shard", f"{i}/2"], tmp_path)
    interrupt([*old, "-o", "half.parquet"], tmp_path, "half.parquet", parts=4)
    before = (tmp_path / "out.parquet").read_bytes()
    for name in ("out.parquet", "shards", "half.parquet"):
        command = ["run", "in.jsonl", "-o", "other.parquet", *job[4:], "--overwrite", "--reuse", name, "--report", "-"]
        report = run(command, tmp_path).report
        assert (report["rows"] - report["rows_resumed"] == 8) == (name != "half.parquet")
        assert report["rows_resumed"] > 4
        assert_as_new(tmp_path / "other.parquet", done)
    assert (tmp_path / "out.parquet").read_bytes() == before


def test_killed_runs_with_a_changed_input_lose_nothing(job: list[Any], done: Path, tmp_path: Path) -> None:
    """`kill -9` of the first job, and of the one that takes its rows over; no row is computed twice that was kept."""
    (tmp_path / "out.parquet").unlink()
    (tmp_path / "out.hidden.parquet").unlink()
    small = [*job, "--commit-every", "4", "--max-num-seqs", "4"]
    write_lines(tmp_path / "in.jsonl", lines())
    parts = tmp_path / "out.parquet.work" / "parts"
    for rows, options in ((lines(), []), (mended(lines()), ["--resume-anyway"])):
        write_lines(tmp_path / "in.jsonl", rows)
        before = parts.stat().st_ino if parts.exists() else None
        running = start([*small, *options], tmp_path)
        running.wait_for(
            lambda before=before: (
                parts.exists() and parts.stat().st_ino != before and len(parts_of(tmp_path / "out.parquet")) >= 3
            )
        )
        running.signal(signal.SIGKILL)
        assert running.wait().code == -signal.SIGKILL
    kept = {row["id"] for part in parts_of(tmp_path / "out.parquet") for row in rows_of(part) if row["status"] == "ok"}
    report = run([*job, "--report", "-"], tmp_path).report
    assert report["rows_resumed"] >= len(kept) > 0
    assert_as_new(tmp_path / "out.parquet", done)
    assert not (tmp_path / "out.parquet.work").exists()


def test_rows_without_an_id_are_found_where_their_index_stays(model: Path, tmp_path: Path) -> None:
    """Their seed derives from the index: a row that moved is another request. With a given seed it is the same."""
    rows = [{"text": text, "max_new_tokens": 3} for text in prompts(12, 5)]
    rows += [{"text": text, "max_new_tokens": 3, "seed": i} for i, text in enumerate(prompts(8, 6))]
    command = [
        "run",
        "in.jsonl",
        "-o",
        "out.parquet",
        "--model",
        model,
        *F32,
        "--report",
        "-",
        "--reuse",
        "out.parquet",
    ]
    write_lines(tmp_path / "in.jsonl", rows)
    run(command[:-2], tmp_path)
    write_lines(tmp_path / "in.jsonl", [*rows, {"text": "appended"}])
    report = run(command, tmp_path).report
    assert report["rows_resumed"] == 20
    write_lines(tmp_path / "in.jsonl", [{"text": "inserted"}, *rows])
    report = run(command, tmp_path).report
    assert report["rows_resumed"] == 8
    run([*command[:-2], "-o", "fresh.parquet"], tmp_path)
    assert_same(read(tmp_path / "out.parquet"), read(tmp_path / "fresh.parquet"))


@pytest.mark.parametrize(
    ("options", "rows", "code"),
    [
        ([], [{"txt": "a"}, {"txt": "b"}], 3),
        (["--max-errors", "0"], [{"text": "a", "max_new_tokens": 2}, {"text": "a", "max_new_tokens": "2"}], 3),
        (["--on-bad-row", "fail"], [{"text": "a"}, {"text": 5}], 4),
        (["--max-output-bytes", "1"], [{"text": "a"}], 2),
        (["--max-time", "0"], [{"text": "a"}], 75),
    ],
    ids=["all refused", "too many", "bad row", "too large", "stopped"],
)
def test_a_job_that_computed_nothing_has_no_consequences(
    model: Path, tmp_path: Path, options: list[str], rows: list[dict[str, Any]], code: int
) -> None:
    command = ["run", "in.jsonl", "-o", "out.parquet", "--model", model, *F32]
    write_lines(tmp_path / "in.jsonl", rows)
    message = run([*command, *options], tmp_path, expect=code).stderr
    kept = (tmp_path / "out.parquet.work").exists()
    assert kept == (options in (["--max-errors", "0"], ["--max-time", "0"])), message
    write_lines(tmp_path / "in.jsonl", [{"text": "a", "max_new_tokens": 2}])
    run(command, tmp_path)
    assert [row["status"] for row in rows_of(tmp_path / "out.parquet")] == ["ok"]
    assert not (tmp_path / "out.parquet.work").exists()


SAME = [
    ({"id": "a", "text": "x"}, {"id": "a", "text": "x", "n": 1, "note": "carried"}),
    ({"id": "b", "text": "x", "seed": 3}, {"id": "another", "text": "x", "seed": 3}),
    ({"id": "c", "text": ["x", "y"]}, {"id": "c", "prompt": ["x", "y"]}),
    ({"id": "d", "text": "x", "stop": "q"}, {"id": "d", "sampling_params": {"stop": ["q"]}, "text": "x"}),
    ({"id": "e", "text": "x", "completions": [" a", " b"]}, {"text": "x", "completions": [" a", " b"], "id": "e"}),
]
"""Rows before and after that ask for the same."""
CHANGED = [
    ({"text": "x"}, {"text": "x "}),
    ({"text": "x"}, {"text": "x", "id": "renamed"}),
    ({"text": "x"}, {"text": "x", "seed": 1}),
    ({"text": "x"}, {"text": "x", "temperature": 0.5}),
    ({"text": "x"}, {"text": "x", "max_new_tokens": 4}),
    ({"text": "x"}, {"text": "x", "n": 2}),
    ({"text": "x"}, {"text": "x", "stop": ["q"]}),
    ({"text": "x"}, {"text": "x", "return_logprob": True}),
    ({"text": "x", "return_logprob": True}, {"text": "x", "return_logprob": True, "top_logprobs_num": 2}),
    ({"text": "x"}, {"text": "x", "logit_bias": {"9": 1}}),
    ({"text": "x"}, {"text": "x", "return_hidden_states": True}),
    ({"text": "x"}, {"text": "x", "choice": ["a", "b"]}),
    ({"text": "x", "suffix": "s"}, {"text": "x", "suffix": "t"}),
    ({"text": "x"}, {"messages": [{"role": "user", "content": "x"}]}),
    ({"text": "x", "completions": [" a", " b"]}, {"text": "x", "completions": [" a", " c"]}),
    ({"text": "x", "completions": [" a b"]}, {"text": "x a", "completions": [" b"]}),
    ({"input_embeds": [[0.1] * 64] * 2}, {"input_embeds": [[0.1] * 63 + [0.2]] * 2}),
    ({"input_ids": [9, 10]}, {"input_ids": [10, 9]}),
]
"""Rows before and after that do not."""


def test_a_row_is_reused_if_and_only_if_it_asks_for_the_same(model: Path, tmp_path: Path) -> None:
    rows: tuple[Lines, Lines] = ([], [])
    for i, pair in enumerate([*SAME, *CHANGED]):
        for row, side in zip(pair, rows, strict=True):
            plain = row if "completions" in row else {"max_new_tokens": 2, "temperature": 1, **row}
            side.append({"id": f"row {i}", **plain})
    command = ["run", "in.jsonl", "-o", "out.parquet", "--model", model, *F32]
    write_lines(tmp_path / "in.jsonl", rows[0])
    run(command, tmp_path)
    write_lines(tmp_path / "in.jsonl", rows[1])
    report = run([*command, "--resume-anyway", "--report", "-"], tmp_path).report
    assert (report["rows_error"], report["rows_resumed"]) == (0, len(SAME))
    run([*command, "-o", "fresh.parquet"], tmp_path)
    assert_same(read(tmp_path / "out.parquet"), read(tmp_path / "fresh.parquet"))
