"""Chat templates that write the time: all rows, resumed runs, shards and replays of a job see one time."""

from __future__ import annotations

import json
import shutil
from datetime import datetime, timedelta
from pathlib import Path

import pytest

import batchgen
from batchgen.data.results_file import read_footer
from tests.e2e.rows import rows_of, write_lines
from tests.e2e.runner import run

DAY = "%d %b %Y"
MOMENT = "%Y-%m-%d %H:%M:%S.%f"
GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


class Passing(datetime):
    """A clock on which a day passes between two looks."""

    at = datetime(2026, 1, 31, 23, 59, 58)

    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
        Passing.at += timedelta(days=1)
        return Passing.at


@pytest.fixture(autouse=True)
def _passing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.text.tokens.tokenizer.datetime", Passing)


def save(model: Path, folder: Path, form: str) -> Path:
    """The tiny checkpoint with a template that writes the time."""
    shutil.copytree(model, folder)
    template = "{{ bos_token }}[{{ strftime_now('" + form + "') }}]{% for m in messages %}{{ m.content }}{% endfor %}"
    path = folder / "chat_template.jinja"
    assert path.is_file()
    path.write_text(template)
    return folder


@pytest.fixture(scope="module")
def clocked(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("clocked") / "model", MOMENT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with rows that are equal but for their ids."""
    message = {"role": "user", "content": "Hello there"}
    write_lines(tmp_path / "in.jsonl", [{"id": f"r{i}", "messages": [message], **GREEDY} for i in range(6)])
    return tmp_path


def prompts(file: Path) -> list[str]:
    return [row["prompt"] for row in rows_of(file)]


def job(folder: Path, model: Path, *options: str, expect: int | None = 0) -> str:
    fixed = ["--model", str(model), "--include-prompt", "--dtype", "float32", "--attention", "torch"]
    return run(["run", "in.jsonl", *fixed, *options], folder, expect=expect).stderr


def test_equal_rows_are_equal_and_a_replay_sees_the_time_of_the_run(folder: Path, clocked: Path) -> None:
    job(folder, clocked, "-o", "out.parquet", "--deterministic")
    assert len(set(prompts(folder / "out.parquet"))) == 1
    footer = read_footer(folder / "out.parquet") or {}
    moment = datetime.fromisoformat(footer["clock"])
    assert footer["clock_text"] == {MOMENT: moment.strftime(MOMENT)}
    assert moment.strftime(MOMENT) in prompts(folder / "out.parquet")[0]
    assert "6 of 6 rows are the same" in run(["verify", "out.parquet"], folder).stdout


@pytest.mark.parametrize("read_again", [False, True])
def test_a_resumed_run_sees_the_time_at_which_the_job_began(folder: Path, clocked: Path, read_again: bool) -> None:
    job(folder, clocked, "-o", "out.parquet", "--max-time", "0", expect=75)
    began = json.loads((folder / "out.parquet.work/run.json").read_text())["clock"]
    if read_again:
        shutil.rmtree(folder / "out.parquet.work/tokenized")
    job(folder, clocked, "-o", "out.parquet")
    assert (read_footer(folder / "out.parquet") or {})["clock"] == began
    assert datetime.fromisoformat(began).strftime(MOMENT) in prompts(folder / "out.parquet")[0]
    job(folder, clocked, "-o", "out.parquet", "--overwrite")
    assert (read_footer(folder / "out.parquet") or {})["clock"] != began, "another job"


@pytest.mark.parametrize("state", ["begun", "finished", "of another shard"])
def test_a_check_shows_the_time_of_the_job(folder: Path, clocked: Path, state: str) -> None:
    out, shard = ("out", ["--shard", "0/2"]) if state == "of another shard" else ("out.parquet", [])
    if state == "begun":
        job(folder, clocked, "-o", out, "--max-time", "0", expect=75)
        record = json.loads((folder / "out.parquet.work/run.json").read_text())
    else:
        job(folder, clocked, "-o", out, *shard)
        record = read_footer(folder / out / "part-00000-of-00002.parquet" if shard else folder / out) or {}
    began = datetime.fromisoformat(record["clock"]).strftime(MOMENT)
    fixed = ["--model", clocked, "--include-prompt", "--dtype", "float32", "--attention", "torch", "-o", out]

    def first_prompt(*more: str) -> str:
        return str(json.loads(run(["check", "in.jsonl", *fixed, "--json", *more], folder).stdout)["first_prompt"])

    assert f"[{began}]" in first_prompt(*(["--shard", "1/2"] if shard else []))
    assert f"[{began}]" not in first_prompt("--clock", "2026-03-04")
    assert f"[{began}]" not in first_prompt("--overwrite")


def test_finished_lines_are_complete_at_another_time(folder: Path, clocked: Path) -> None:
    job(folder, clocked, "-o", "out.jsonl")
    before = (folder / "out.jsonl").read_bytes()
    assert "nothing to do" in job(folder, clocked, "-o", "out.jsonl")
    assert (folder / "out.jsonl").read_bytes() == before


def test_retried_rows_see_the_time_of_the_others(folder: Path, clocked: Path) -> None:
    lines = [json.loads(line) for line in (folder / "in.jsonl").read_text().splitlines()]
    lines[2] |= {"custom_logit_processor": "fails"}
    write_lines(folder / "in.jsonl", lines)
    (folder / "failing.py").write_text(
        "from pathlib import Path\n\n\ndef fails(logits, rows):\n"
        "    if not Path('good').exists():\n        raise ValueError('no')\n    return logits\n"
    )
    options = ["-o", "out.parquet", "--logit-processor", "fails=failing:fails"]
    job(folder, clocked, *options)
    assert [row["status"] for row in rows_of(folder / "out.parquet")].count("error") == 1
    (folder / "good").touch()
    job(folder, clocked, *options, "--retry-errors")
    assert {row["status"] for row in rows_of(folder / "out.parquet")} == {"ok"}
    assert len(set(prompts(folder / "out.parquet"))) == 1


def test_shards_see_the_time_of_the_first(folder: Path, clocked: Path) -> None:
    job(folder, clocked, "-o", "out", "--shard", "1/3", "--max-time", "0", expect=75)
    job(folder, clocked, "-o", "out", "--shard", "0/3")
    job(folder, clocked, "-o", "out", "--shard", "1/3")
    job(folder, clocked, "-o", "out", "--shard", "2/3")
    run(["merge", "out", "-o", "all.parquet"], folder)
    assert len(set(prompts(folder / "all.parquet"))) == 1


def test_shards_on_separate_disks_need_one_clock(folder: Path, clocked: Path) -> None:
    for index in ("0", "1"):
        job(folder, clocked, "-o", f"disk{index}", "--shard", f"{index}/2")
    refused = run(["merge", "disk0", "disk1", "-o", "all.parquet"], folder, expect=2).stderr
    assert "saw different times" in refused
    assert "--clock" in refused
    for index in ("0", "1"):
        job(folder, clocked, "-o", f"same{index}", "--shard", f"{index}/2", "--clock", "2026-03-04")
    run(["merge", "same0", "same1", "-o", "all.parquet"], folder)
    assert set(prompts(folder / "all.parquet")) == {"<s>[2026-03-04 00:00:00.000000]Hello there"}


def test_times_that_are_written_alike_are_the_same(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daily = save(model, folder / "daily", DAY)
    for index, clock in enumerate((datetime(2026, 3, 4, 9), datetime(2026, 3, 4, 17))):
        monkeypatch.setattr(Passing, "now", classmethod(lambda cls, clock=clock: clock))
        job(folder, daily, "-o", f"disk{index}", "--shard", f"{index}/2")
    run(["merge", "disk0", "disk1", "-o", "all.parquet"], folder)
    assert set(prompts(folder / "all.parquet")) == {"<s>[04 Mar 2026]Hello there"}


def test_another_clock_is_another_job(folder: Path, clocked: Path, model: Path) -> None:
    job(folder, clocked, "-o", "out.parquet", "--clock", "2026-03-04")
    assert "clock" in job(folder, clocked, "-o", "out.parquet", "--clock", "2026-03-05", expect=2)
    job(folder, clocked, "-o", "out.parquet", "--clock", "2026-03-05T06:07:08", "--resume-anyway")
    assert set(prompts(folder / "out.parquet")) == {"<s>[2026-03-05 06:07:08.000000]Hello there"}
    assert "--clock has no effect" in job(folder, model, "-o", "other.parquet", "--clock", "2026-03-04")
    assert "must be a date or a time" in job(folder, model, "-o", "third.parquet", "--clock", "noon", expect=2)


def test_a_file_of_another_program_is_refused(folder: Path, clocked: Path) -> None:
    (folder / "out.parquet").write_bytes(b"something else")
    assert "is not this job's output" in job(folder, clocked, "-o", "out.parquet", expect=2)


def test_an_engine_has_one_clock(clocked: Path) -> None:
    row = {"messages": [{"role": "user", "content": "Hello"}], **GREEDY}
    for clock in (None, "2026-03-04 05:06:07", datetime(2026, 3, 4, 5, 6, 7)):
        engine = batchgen.Engine(str(clocked), dtype="float32", attention="torch", clock=clock)
        first, second = engine.generate([row, row])
        assert first.prompt_ids is not None
        assert second.prompt_ids is not None
        assert first.prompt_ids.tolist() == second.prompt_ids.tolist()
        text = engine.tokenizer.decode(first.prompt_ids.tolist())
        assert clock is None or "[2026-03-04 05:06:07.000000]" in text
