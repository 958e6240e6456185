"""What a run does with the output and the work that exist: each cell of the table in docs/resume.md."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet as pq
import pytest

import batchgen
from tests.data.remote.bucket import use
from tests.e2e.model import save_model
from tests.e2e.runner import ProcessResult
from tests.faults.disk import Recorder, Tree, tree_of, write_tree
from tests.faults.jobs import ROWS, FaultJob, run_with

PAGE = Path(batchgen.__file__).parent / "docs" / "resume.md"
HEADING = "## What to do with work and output that exist\n"

LINES = [row if isinstance(row, bytes) else {**row, "stream": False} for row in ROWS]
GOOD = [row for row in LINES if isinstance(row, dict) and row["id"] != "no prompt"]
JOB = FaultJob("this job", LINES, ("-o", "out.parquet", "--report", "-"))
STRANGER: dict[str, Any] = {"id": "stranger", "text": "Strange", "max_new_tokens": 2}
OTHERS = {
    "another input's": replace(JOB, rows=[*GOOD[:4], STRANGER]),
    "other options'": replace(JOB, words=(*JOB.words, "--carry", "none")),
}
OUTPUTS = {
    "this job's": replace(JOB, rows=GOOD),
    "this job's, with failed rows": JOB,
    **OTHERS,
}
"""State of the output -> the job that made it."""
WORKS = {
    **dict.fromkeys(("this job's", "of `--overwrite`", "of `--retry-errors`", "of `--resume-anyway`"), JOB),
    "another input's": replace(JOB, rows=[STRANGER, *GOOD[2:]]),
    "other options'": OTHERS["other options'"],
}
"""State of the work -> the job that began it."""
FILES = ("out.parquet", "out.hidden.parquet")
PARTS = r"out\.parquet\.work/parts/.*\.parquet"


def table() -> list[tuple[str, str, dict[str, str]]]:
    """(output, work, option -> what happens) for each line of the page's table."""
    lines = PAGE.read_text(encoding="utf-8").split(HEADING)[1].split("\n## ")[0].splitlines()
    header, _, *rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    options = [option_of(name) for name in header[2:]]
    return [(output, work, dict(zip(options, cells, strict=True))) for output, work, *cells in rows]


def option_of(text: str) -> str:
    return next(iter(re.findall("`(--.*)`", text)), "")


class Scenes:
    """Folders with output and work in given states, and runs in them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.model = save_model(folder / "model")
        (self.model / "chat_template.jinja").unlink()  # no row needs it, and each run would look into it
        self._numbers = count()
        self.finished = cache(self._finished)

    def folder(self, files: Tree, job: FaultJob) -> Path:
        """A new folder with files, and the input of a job."""
        folder = self._folder / str(next(self._numbers))
        write_tree(folder, files)
        job.write_input(folder)
        return folder

    def run(self, folder: Path, job: FaultJob, option: str = "") -> tuple[ProcessResult, Recorder]:
        """Run a job with one more option."""
        recorder = Recorder(folder)
        job = replace(job, words=(*job.words, *filter(None, [option])))
        return run_with(recorder, job, folder, self.model, expect=None), recorder

    def _finished(self, output: str) -> Tree:
        """The output of a job, by its state."""
        folder = self.folder({}, OUTPUTS[output])
        done, _ = self.run(folder, OUTPUTS[output])
        assert done.code == 0, done.stderr
        return {name: (folder / name).read_bytes() for name in FILES}

    def files(self, output: str, work: str) -> Tree:
        """Output and work in two states: the work is what a run leaves that is killed when it has a finished row."""
        files = {"out.parquet": b"holiday photographs"} if output == "another program's" else {}
        if output in OUTPUTS:
            files = self.finished(output)
        if work == "none":
            return files
        job = OUTPUTS[output] if output == "this job's" and work not in OTHERS else WORKS[work]
        folder = self.folder(files, job)
        _, recorder = self.run(folder, job, option_of(work) or ("--overwrite" if files else ""))
        for at, disk in recorder.disks():
            if at and re.match("rename .*/parts/part-", recorder.operations[at - 1]):
                left = disk.after_kill()
                if good(statuses(left, PARTS)):
                    return left
        raise AssertionError("no row was committed")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    return Scenes(tmp_path_factory.mktemp("scenes"))


def statuses(files: Tree, names: str) -> dict[str, str]:
    """Status of each row of results files, by its id."""
    found: dict[str, str] = {}
    for path, content in files.items():
        if re.fullmatch(names, path) and content is not None and content.startswith(b"PAR1"):
            rows = pq.read_table(io.BytesIO(content), columns=["id", "status"]).to_pylist()
            found |= {row["id"]: row["status"] for row in rows}
    return found


def good(rows: dict[str, str]) -> set[str]:
    return {row for row, status in rows.items() if status == "ok"}


def done_rows(happens: str, files: Tree, work: str, job: FaultJob) -> set[str]:
    """Ids of the rows that a run does not compute."""
    if happens == "compute":
        return set()
    committed, output = statuses(files, PARTS), statuses(files, "out.parquet")
    own, others = ({}, committed | output) if work in OTHERS else (committed, output)
    if work == "of `--overwrite`":
        others = {}
    asked = {str(row["id"]) for row in job.rows if isinstance(row, dict)}
    return (set(own) if happens == "continue" else good(own)) | good(others) & asked


def rows_of(files: Tree) -> dict[str, list[dict[str, Any]]]:
    return {name: pq.read_table(io.BytesIO(files[name] or b"")).to_pylist() for name in FILES}


def without_lock(files: Tree) -> Tree:
    return {path: content for path, content in files.items() if not path.endswith("/lock")}


@pytest.mark.parametrize("stops", [1, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("output", "work", "cells"), table(), ids=[f"{output}, {work}" for output, work, _ in table()])
def test_each_option(scenes: Scenes, output: str, work: str, cells: dict[str, str], stops: int) -> None:
    """The output has all rows, those that are done are not computed, and what is refused or finished stays as it is."""
    rng = Random(f"{output} {work}")
    job = OUTPUTS[output] if output == "this job's" else JOB
    before = scenes.files(output, work)
    whole = rows_of(scenes.finished(output if output == "this job's" else "this job's, with failed rows"))
    for option, happens in cells.items():
        folder = scenes.folder(before, job)
        files = tree_of(folder)
        done, recorder = scenes.run(folder, job, option)
        assert done.code == (2 if happens == "refuse" else 0), (option, done.stderr)
        if happens in ("refuse", "nothing"):
            assert without_lock(tree_of(folder)) == without_lock(files), option
            continue
        expected = done_rows(happens, before, work, job)
        assert done.report["rows_resumed"] == len(expected), (option, expected)
        end = tree_of(folder)
        assert rows_of(end) == whole, option
        assert end.keys() == {*FILES, "in.jsonl"}, option
        if happens in ("reuse", "retry"):
            names = [
                at for at, name in enumerate(recorder.operations) if name.startswith(("rename", "unlink", "rmdir"))
            ]
            moments = {at + after for at in names for after in (0, 1)}
            for moment in rng.sample(sorted(moments), min(stops, len(moments))):
                assert_stopped_run_continues(scenes, option, before, recorder, expected, rng, moment)


@pytest.mark.slow
@pytest.mark.parametrize(("output", "work", "cells"), table(), ids=[f"{output}, {work}" for output, work, _ in table()])
def test_each_option_at_a_url(
    scenes: Scenes, output: str, work: str, cells: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `test_each_option`, with the output in a storage service and the work folder here."""
    job = OUTPUTS[output] if output == "this job's" else JOB
    before = scenes.files(output, work)
    whole = rows_of(scenes.finished(output if output == "this job's" else "this job's, with failed rows"))
    for option, happens in cells.items():
        bucket = use(monkeypatch)
        objects = {f"b/{name}": before[name] or b"" for name in FILES if name in before}
        bucket.objects |= objects
        folder = scenes.folder({name: content for name, content in before.items() if name not in FILES}, job)
        files = tree_of(folder)
        at_url = replace(job, words=("-o", "s3://b/out.parquet", *job.words[2:], *filter(None, [option])))
        done = run_with(None, at_url, folder, scenes.model, expect=None)
        assert done.code == (2 if happens == "refuse" else 0), (option, done.stderr)
        if happens in ("refuse", "nothing"):
            assert without_lock(tree_of(folder)) == without_lock(files), option
            assert bucket.objects == objects
            continue
        assert done.report["rows_resumed"] == len(done_rows(happens, before, work, job)), option
        assert rows_of({name: bucket.objects[f"b/{name}"] for name in FILES}) == whole, option
        assert bucket.objects.keys() == {f"b/{name}" for name in FILES}, option
        assert tree_of(folder).keys() == {"in.jsonl"}, option


def assert_stopped_run_continues(
    scenes: Scenes, option: str, before: Tree, recorder: Recorder, done: set[str], rng: Random, moment: int
) -> None:
    """A run that is killed, or whose power fails, replaces nothing; the same command computes no row that is done."""
    left = next(rng.choice([disk.after_kill, disk.after_loss])() for at, disk in recorder.disks() if at == moment)
    what = f"{option}, stopped before operation {moment} of {recorder.operations}"
    folder = scenes.folder(left, JOB)
    again, _ = scenes.run(folder, JOB, option)
    assert again.code == 0, (what, again.stderr)
    files = tree_of(folder)
    assert files.keys() == {*FILES, "in.jsonl"}, what
    assert rows_of(files) == rows_of(scenes.finished("this job's, with failed rows")), what
    if left.get("out.parquet") == before.get("out.parquet"):
        found = statuses(before, f"out\\.parquet|{PARTS}")
        kept = good(statuses(left, PARTS)) | {row for row in done if found[row] == "ok"}
        assert again.report["rows_resumed"] >= len(kept - {STRANGER["id"]}), what
    else:
        assert left["out.parquet"] == tree_of(recorder.root)["out.parquet"], what
