"""The exit codes of a run, with their messages and the files that are left."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from tests.e2e.processors import PAUSED, PAUSING
from tests.e2e.rows import assert_same, mixed_lines, prompts, read, rows_of, write_lines
from tests.e2e.runner import run, start

GREEDY = {"temperature": 0, "max_new_tokens": 6}
F32 = ["--dtype", "float32"]


def good(folder: Path, count: int = 30) -> Path:
    return write_lines(folder / "in.jsonl", [{"text": text, **GREEDY} for text in prompts(count, 1)])


def one_line(stderr: str) -> str:
    """The error message: the last line, with no traceback before it."""
    assert "Traceback" not in stderr
    line = stderr.strip().splitlines()[-1]
    assert line.startswith("error: "), stderr
    return line


def test_0_and_a_finished_job_does_nothing(model: Path, tmp_path: Path) -> None:
    words = ["run", good(tmp_path), "--model", model, *F32]
    assert run(words, tmp_path).stdout == ""
    out = tmp_path / "in.out.parquet"
    before = (out.stat().st_mtime_ns, out.stat().st_ino, out.read_bytes())
    again = run([*words, "--report", "-"], tmp_path)
    assert (out.stat().st_mtime_ns, out.stat().st_ino, out.read_bytes()) == before
    assert "in.out.parquet is complete: 30 rows, nothing to do" in again.stderr
    assert again.report["already_done"]
    assert (again.report["rows"], again.report["rows_ok"]) == (30, 30)
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix) == ["in.jsonl", "in.out.parquet"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tempurature", "1"], "No such option: --tempurature"),
        (["--top-p", "0"], "`--top-p` must be in (0, 1]"),
        (["--max-num-seqs", "64", "--max-tokens-per-step", "32"], "must be at least `--max-num-seqs` (64)"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_2_usage(model: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    """tests/config has every message."""
    done = run(["run", good(tmp_path), "--model", model, *arguments], tmp_path, expect=2)
    assert message in one_line(done.stderr)
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == ["in.jsonl"]


def test_2_a_job_refused_before_it_computes_leaves_no_work(model: Path, tmp_path: Path) -> None:
    """An invalid row alone leaves no work folder that the corrected command would have to resume."""
    rows = [{"txt": "no prompt"}, *({"text": text} for text in prompts(30, 1))]
    arguments = ["run", write_lines(tmp_path / "in.jsonl", rows), "--model", model, *F32]
    many = ["--max-new-tokens", "200", "--n", "50", "--max-output-bytes", "1MB"]
    assert "--max-output-bytes" in one_line(run([*arguments, *many], tmp_path, expect=2).stderr)
    assert not (tmp_path / "in.out.parquet.work").exists()
    run([*arguments, "--max-new-tokens", "2"], tmp_path)
    assert len(rows_of(tmp_path / "in.out.parquet")) == 31


def test_3_too_many_errors_then_resumed_with_a_higher_limit(model: Path, tmp_path: Path) -> None:
    lines = [{"text": text, **GREEDY} if i % 4 else {"txt": text} for i, text in enumerate(prompts(40, 1))]
    arguments = ["run", write_lines(tmp_path / "in.jsonl", lines), "-o", "out.parquet", "--model", model, *F32]
    done = run([*arguments, "--max-errors", "9"], tmp_path, expect=3)
    assert "10 of 40 rows failed (missing_prompt 10), more than --max-errors allows (9)" in one_line(done.stderr)
    assert not (tmp_path / "out.parquet").exists()
    assert (tmp_path / "out.parquet.work").is_dir()
    shown = run(["show", "out.parquet", "--errors"], tmp_path)
    assert shown.stdout.count("missing_prompt") >= 10
    run([*arguments, "--max-errors", "24%"], tmp_path, expect=3)
    report = run([*arguments, "--max-errors", "25%", "--report", "-"], tmp_path).report
    assert (report["rows_error"], report["rows_resumed"]) == (10, 10)
    assert len(rows_of(tmp_path / "out.parquet")) == 40


@pytest.mark.parametrize("shard", [[], ["--shard", "1/2"]], ids=["whole", "shard"])
def test_3_over_an_old_output_names_the_command_that_shows_the_new_errors(
    model: Path, tmp_path: Path, shard: list[str]
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": "a", **GREEDY}, {"id": "old", "txt": "a"}] * 2)
    arguments = ["run", source, "-o", "my out.parquet", "--model", model, *F32, "--on-duplicate-id", "allow", *shard]
    run([*arguments, "--max-errors", "2"], tmp_path)
    write_lines(tmp_path / "in.jsonl", [{"text": "a", **GREEDY}, {"id": "new", "txt": "b"}] * 2)
    stopped = one_line(run([*arguments, "--overwrite", "--max-errors", "0"], tmp_path, expect=3).stderr)
    command = shlex.split(stopped.split("batchgen ")[1].split(". To continue")[0])
    shown = run(command, tmp_path)
    assert [line.split("\t")[1] for line in shown.stdout.splitlines()] == ["new", "new"]
    assert shown.stderr.endswith("newer, unfinished work is shown; --finished shows the finished file\n")
    before = run([*command, "--finished"], tmp_path)
    assert {line.split("\t")[1] for line in before.stdout.splitlines()} == {"old"}
    assert before.stderr == ""
    assert "is a folder without results" in one_line(run(["show", "."], tmp_path, expect=2).stderr)
    assert run(["export", command[1], "--format", "jsonl", "-o", "-"], tmp_path).stdout.count("missing_prompt") > 0


def test_3_by_default_when_every_row_is_invalid(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"txt": "a"}, b"nothing"])
    done = run(["run", source, "--model", model, *F32], tmp_path, expect=3)
    assert "fewer than all rows" in one_line(done.stderr)
    run(["run", source, "--model", model, *F32, "--max-errors", "2"], tmp_path)
    assert [row["status"] for row in rows_of(tmp_path / "in.out.parquet")] == ["error", "error"]


def test_4_input(model: Path, tmp_path: Path) -> None:
    """tests/job/test_preflight.py has the files that cannot be read."""
    source = write_lines(tmp_path / "in.jsonl", [{"text": "a", **GREEDY}, {"id": "odd", "text": ""}, {"text": 5}])
    done = run(["run", source, "--model", model, *F32, "--on-bad-row", "fail"], tmp_path, expect=4)
    assert "row 2 (id 'row-2') is invalid: invalid_field" in one_line(done.stderr)
    assert f"{source}, line 3" in done.stderr
    odd = {"text": "a", "sampling_params": {"\x1b]0;title\x07\n": 1}}
    source = write_lines(tmp_path / "odd.jsonl", [odd])
    done = run(["run", source, "--model", model, *F32, "--on-bad-row", "fail"], tmp_path, expect=4)
    assert r"`\x1b]0;title\x07\n` is not a field of `sampling_params`" in one_line(done.stderr)
    assert not (tmp_path / "in.out.parquet").exists()
    source = write_lines(tmp_path / "in.jsonl", [{"text": "a", **GREEDY}])  # corrected
    run(["run", source, "--model", model, *F32, "--on-bad-row", "fail"], tmp_path)


def test_5_disk_full(model: Path, tmp_path: Path) -> None:
    """A limit of the file size stops the writing of a part, the result or a spool. Without it the job finishes."""
    source = write_lines(tmp_path / "in.jsonl", mixed_lines(300, seed=1))
    arguments = ["run", source, "-o", "out.parquet", "--model", model, *F32, "--commit-every", "40"]
    for size in (3_000, 24_000, 64_000):
        done = start(arguments, tmp_path, file_size=size).wait()
        assert done.code == 5, done.stderr
        line = one_line(done.stderr)
        assert "cannot be written (File too large)" in line
        assert "Free some space and run the same command again" in line
        assert not (tmp_path / "out.parquet").exists()
    assert list((tmp_path / "out.parquet.work" / "parts").glob("part-*.parquet")), "parts of 64 KB fit"
    run(arguments, tmp_path)
    run(["run", source, "-o", "whole.parquet", "--model", model, *F32], tmp_path)
    assert_same(read(tmp_path / "out.parquet"), read(tmp_path / "whole.parquet"))


def test_5_another_run_holds_the_output(model: Path, tmp_path: Path) -> None:
    rows = [{"text": text, "temperature": 0, "max_new_tokens": 9} for text in prompts(20, 4)]
    source = write_lines(tmp_path / "in.jsonl", [*rows, {"text": "Wait", **PAUSED}])
    arguments = ["run", source, "-o", "out.parquet", "--model", model, *F32, *PAUSING]
    (tmp_path / "pause").touch()
    first = start(arguments, tmp_path)
    first.wait_for((tmp_path / "reached").exists)
    second = run(arguments, tmp_path, expect=5)
    assert f"another run (pid {first.pid} on " in one_line(second.stderr)
    other = run([*arguments[:2], "-o", "other.parquet", *arguments[4:], "--limit", "2"], tmp_path)
    assert other.code == 0
    first.kill_after(0)
    run([*arguments, "--max-time", "0.01"], tmp_path, expect=75)  # the lock went with the process


def test_6_model(model: Path, tmp_path: Path) -> None:
    source = good(tmp_path)
    for name, damage in {
        "no-weights": lambda folder: (folder / "model.safetensors").unlink(),
        "half-copied": lambda folder: os.truncate(folder / "model.safetensors", 10_000),
        "no-tokenizer": lambda folder: [path.unlink() for path in folder.glob("tokenizer*")],
        "no-config": lambda folder: (folder / "config.json").unlink(),
    }.items():
        folder = tmp_path / name
        shutil.copytree(model, folder)
        damage(folder)
        done = run(["run", source, "--model", folder], tmp_path, expect=6)
        assert name in one_line(done.stderr)
        assert not (tmp_path / "in.out.parquet.work").exists(), "refused before a work folder is made"
    done = run(["run", source, "--model", tmp_path / "nowhere"], tmp_path, expect=6)
    assert "nowhere" in one_line(done.stderr)


@pytest.mark.parametrize("words", [["check", "--json"], ["check"], ["run", "--dry-run"]], ids=" ".join)
def test_a_check_with_its_report_on_stdout(model: Path, tmp_path: Path, words: list[str]) -> None:
    """Stdout has one JSON object and nothing else; messages go to stderr."""
    done = run([words[0], good(tmp_path), "--model", model, *words[1:], "--report", "-"], tmp_path)
    assert done.report["rows_ok"] == 30
    assert ("rows            30 (ok 30, errors 0)" in done.stderr) == ("--json" not in words)
    filed = run([words[0], good(tmp_path), "--model", model, *words[1:], "--report", "report.json"], tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["rows_ok"] == 30
    assert filed.stdout.startswith("{" if "--json" in words else "rows            30 (ok 30, errors 0)\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize(
    ("option", "code"), [(["--attention", "flash"], 2), (["--device", "cuda", "--kv-memory", "80%"], 6)]
)
def test_check_of_a_gpu_job_needs_no_gpu(model: Path, tmp_path: Path, option: list[str], code: int) -> None:
    source = good(tmp_path)
    checked = run(["check", source, "--model", model, "--json", *option], tmp_path)
    assert checked.code == 0, checked.stderr
    assert "this machine has no GPU" in checked.stderr
    assert json.loads(checked.stdout)["estimated_seconds"] is None
    ran = run(["run", source, "--model", model, *option], tmp_path, expect=code)
    one_line(ran.stderr)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--attention", "flash"],
        ["check", "--attention", "flash"],
        ["check", "--attention", "torch", "--device", "cuda"],
    ],
    ids=" ".join,
)
def test_backends_that_are_not_deterministic_are_refused(model: Path, tmp_path: Path, words: list[str]) -> None:
    refused = run([*words, good(tmp_path), "--model", model, "--deterministic"], tmp_path, expect=2)
    assert "`--deterministic`" in one_line(refused.stderr)
