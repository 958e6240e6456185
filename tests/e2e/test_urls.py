"""Jobs whose data are in a storage service, whose work folder is elsewhere, or whose results go to stdout.

The service is in memory here; `test_remote` has a real one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchgen.data import files
from tests.data.remote.bucket import Bucket, use
from tests.e2e.rows import assert_same, mixed_lines, read, write_lines
from tests.e2e.runner import interrupt, parts_of, run


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    return use(monkeypatch)


@pytest.fixture
def command(model: Path) -> list[Any]:
    return ["run", "in.jsonl", "--model", model, "--dtype", "float32"]


def test_a_job_from_url_to_url(command: list[Any], bucket: Bucket, tmp_path: Path) -> None:
    bucket.objects["b/in.jsonl"] = write_lines(tmp_path / "in.jsonl", mixed_lines(20)).read_bytes()
    run([*command, "-o", "local.parquet"], tmp_path)
    job = ["run", "s3://b/in.jsonl", *command[2:], "-o", "s3://b/out.parquet", "--report", "-"]
    done = run(job, tmp_path)
    assert "output    s3://b/out.parquet" in done.stderr
    assert "next      batchgen show s3://b/out.parquet" in done.stderr
    (tmp_path / "copy.parquet").write_bytes(bucket.objects["b/out.parquet"])
    assert_same(read(tmp_path / "copy.parquet"), read(tmp_path / "local.parquet"), ignore=("error",))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.parquet", "in.jsonl", "local.parquet"]
    before = dict(bucket.objects)
    assert run(job, tmp_path).report["already_done"]
    assert bucket.objects == before
    run([*job[:-3], "s3://b/lines.jsonl"], tmp_path)
    run([*command, "-o", "lines.jsonl"], tmp_path)
    assert {"b/lines.jsonl", "b/lines.errors.jsonl"} <= bucket.objects.keys()
    lines, local = bucket.objects["b/lines.jsonl"].splitlines(), (tmp_path / "lines.jsonl").read_bytes().splitlines()
    assert [json.loads(line).get("text") for line in lines] == [json.loads(line).get("text") for line in local]


@pytest.mark.parametrize("operation", ["part", "complete"])
def test_a_result_that_cannot_be_written_is_kept(
    command: list[Any], bucket: Bucket, tmp_path: Path, operation: str
) -> None:
    write_lines(tmp_path / "in.jsonl", mixed_lines(10))
    job = [*command, "-o", "s3://b/out.parquet", "--work-dir", "work", "--report", "-"]

    def full(name: str, path: str) -> None:
        if name == operation:
            raise OSError("QuotaExceeded")

    bucket.before = full
    refused = run(job, tmp_path, expect=5).stderr
    assert "s3://b/out.parquet cannot be written (the storage is full, or its quota is used up). Free some" in refused
    assert (bucket.objects, bucket.discarded) == ({}, ["b/out.parquet"])
    assert "ok" in run(["show", "work/out.parquet.work"], tmp_path).stdout
    bucket.before = lambda name, path: None
    report = run(job, tmp_path).report
    assert (report["computed_prompt_tokens"], report["rows"]) == (0, 10)
    assert not any((tmp_path / "work").iterdir())


def test_an_object_of_another_program_is_never_replaced(command: list[Any], bucket: Bucket, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", mixed_lines(3))
    bucket.objects["b/out.parquet"] = b"of another program"
    job = [*command, "-o", "s3://b/out.parquet"]
    for options in ([], ["--resume-anyway"]):
        assert (
            "s3://b/out.parquet exists and is not this job's output" in run([*job, *options], tmp_path, expect=2).stderr
        )
    assert bucket.objects == {"b/out.parquet": b"of another program"}
    run([*job, "--overwrite"], tmp_path)
    assert bucket.objects["b/out.parquet"].startswith(b"PAR1")


def test_a_work_folder_elsewhere(command: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on another disk, from which a file cannot be renamed to its place."""
    write_lines(tmp_path / "in.jsonl", mixed_lines(40))
    (tmp_path / "out").mkdir()
    (tmp_path / "scratch").mkdir()
    job = [*command, "-o", "out/r.parquet", "--work-dir", "scratch", "--report", "-"]
    real = files.FileSystem.rename

    def other_disk(system: files.FileSystem, old: Path, new: Path) -> None:
        if ("scratch" in old.parts) != ("scratch" in new.parts):
            raise OSError(18, "Invalid cross-device link")
        real(system, old, new)

    monkeypatch.setattr(files.FileSystem, "rename", other_disk)
    interrupt(job, tmp_path, "scratch/r.parquet")
    assert not any((tmp_path / "out").iterdir())
    assert run(job, tmp_path).report["rows_resumed"] > 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["r.parquet"]
    assert not any((tmp_path / "scratch").iterdir())
    run([*command, "-o", "r.parquet"], tmp_path)
    assert_same(read(tmp_path / "out" / "r.parquet"), read(tmp_path / "r.parquet"), ignore=("cached_tokens",))


def test_another_machine_goes_on_from_copies_of_the_parts(command: list[Any], bucket: Bucket, tmp_path: Path) -> None:
    """Whatever became of the first one: its work folder is gone."""
    rows = [*mixed_lines(40), *({"id": f"s{i}", "text": "Hi", "return_hidden_states": True} for i in range(4))]
    write_lines(tmp_path / "in.jsonl", rows)
    job = [*command, "-o", "out.parquet", "--work-dir", "s3://b/work", "--report", "-"]
    count = interrupt(job, tmp_path, parts=3)
    copies = {name: data for name, data in bucket.objects.items() if name.startswith("b/work/out.parquet.work/parts/")}
    assert len(copies) == count
    shutil.rmtree(tmp_path / "out.parquet.work")
    bucket.objects["b/work/out.parquet.work/parts/part-000001.parquet"] = b"PAR1 cut"
    done = run(job, tmp_path)
    assert f"{count:,} parts of this job were copied from s3://b/work/out.parquet.work" in done.stderr
    assert "part-000001.parquet is damaged" in done.stderr
    assert 0 < done.report["rows_resumed"] < len(rows)
    assert not [name for name in bucket.objects if name.startswith("b/work/")]
    run([*command, "-o", "local.parquet"], tmp_path)
    for name, other in (("out", "local"), ("out.hidden", "local.hidden")):
        found, expected = (read(tmp_path / f"{each}.parquet") for each in (name, other))
        assert_same(found, expected, ignore=("cached_tokens",))


def test_copies_are_those_of_the_parts_here(command: list[Any], bucket: Bucket, tmp_path: Path) -> None:
    """After a run that replaces the output, and one that computes failed rows again."""
    write_lines(tmp_path / "in.jsonl", [*mixed_lines(30), {"id": "bad"}])
    job = [*command, "-o", "out.parquet", "--work-dir", "s3://b/work"]
    interrupt(job, tmp_path)
    for options in (["--overwrite"], ["--retry-errors"]):
        interrupt([*job, *options], tmp_path)
        parts = {path.name: path.read_bytes() for path in parts_of(tmp_path / "out.parquet")}
        below = "b/work/out.parquet.work/parts/"
        assert {name.removeprefix(below): data for name, data in bucket.objects.items() if below in name} == parts


def test_a_copy_that_cannot_be_written_stops_the_job(command: list[Any], bucket: Bucket, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", mixed_lines(10))
    job = [*command, "-o", "out.parquet", "--work-dir", "s3://b/work"]

    def full(name: str, path: str) -> None:
        if name in ("part", "complete"):
            raise OSError("QuotaExceeded")

    bucket.before = full
    assert "the storage is full, or its quota is used up" in run(job, tmp_path, expect=5).stderr
    bucket.before = lambda name, path: None
    assert run([*job, "--report", "-"], tmp_path).report["rows_resumed"] > 0


def test_results_on_stdout(command: list[Any], tmp_path: Path) -> None:
    """The lines of `-o x.jsonl`, failed OpenAI lines last; nothing else, and no file is left."""
    write_lines(tmp_path / "in.jsonl", [*mixed_lines(20), {"custom_id": "bad", "method": "POST", "url": "/v1/odd"}])
    run([*command, "-o", "x.jsonl", "--clock", "2026-01-31"], tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    done = run([*command, "-o", "-", "--clock", "2026-01-31"], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before

    def values(text: str) -> list[Any]:
        lines = [json.loads(line) for line in text.splitlines()]
        for line in lines:
            line.get("response", {}).get("body", {}).pop("created", None)
        return lines

    local = "".join((tmp_path / name).read_text() for name in ("x.jsonl", "x.errors.jsonl"))
    assert values(done.stdout) == values(local)
    assert "output    -" in done.stderr
    assert "batchgen-" not in done.stderr, "the temporary folder is not the user's"


def test_results_on_stdout_are_resumed_from_a_work_folder(command: list[Any], tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", mixed_lines(40))
    job = [*command, "-o", "-", "--work-dir", "work"]
    interrupt(job, tmp_path, "work/stdout.jsonl")
    first = run(job, tmp_path)
    assert "resumed" in first.stderr
    again = run(job, tmp_path)
    assert again.stdout == first.stdout != ""
    assert "nothing to do" in again.stderr
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["stdout.errors.jsonl", "stdout.jsonl"]


@pytest.mark.slow
def test_a_reader_may_end_early(command: list[Any], tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [{"text": "Say", "max_new_tokens": 1, "n": 100, "x": "x" * 500}] * 9)
    words = [sys.executable, "-c", "from batchgen.cli.app import main; main()", *map(str, command), "-o", "-"]
    reader, writer = os.pipe()
    with subprocess.Popen(words, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE) as process:
        os.close(writer)
        assert os.read(reader, 1)
        os.close(reader)
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
        assert process.wait() == 141
