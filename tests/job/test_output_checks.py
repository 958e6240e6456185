"""`--events` and `--report` may not name other files of the job; an unwritable report is an error before the run."""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from batchgen.cli.app import run_command
from batchgen.config.run_config import RunConfig
from batchgen.config.units import Shard
from batchgen.data.read.input_files import find_inputs
from batchgen.errors import OutputError, UsageError
from batchgen.job.preflight import check_output_targets, reserved_paths
from batchgen.job.summary import write_report
from tests.models.tiny import save_tiny

REPORT = '{"rows": 0, "rows_ok": 0, "rows_error": 0, "fingerprint": "f"}'
COMMANDS = [["run"], ["check"], ["run", "--dry-run"]]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for name in ("data/a.jsonl", "data/b.jsonl"):
        Path(name).write_text('{"text": "a"}\n')
    Path("link").symlink_to("data")
    os.link("data/b.jsonl", "hard")


CASES = [
    ("data/a.jsonl", "is an input of the job"),
    ("./data/../data/b.jsonl", "is an input of the job"),
    ("link/b.jsonl", "is an input of the job"),
    ("hard", "is an input of the job"),
    ("out.parquet", "is part of the job's output"),
    ("out.hidden.parquet", "is part of the job's output"),
    ("out.parquet.work/x", "is part of the job's output"),
    ("out.parquet.work/parts/part-000000.parquet", "is part of the job's output"),
]


def test_events_and_report_may_not_be_another_file_of_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(save_tiny("llama", tmp_path / "model"))
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    cases = [*product(COMMANDS, ("--events", "--report"), CASES[:1]), *product(COMMANDS[:1], ("--report",), CASES[1:])]
    for command, option, (name, says) in cases:
        line = [*command, "data/*.jsonl", "-o", "out.parquet", "--model", model, option, name]
        assert run_command(line) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith(f"error: `{option}` {name} {says}; give another name")
        assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def check(job: RunConfig) -> None:
    check_output_targets(job, find_inputs(job.inputs, reserved_paths(job)))


def config(**options: Any) -> RunConfig:
    return RunConfig(("data/*.jsonl",), Path("out.parquet"), **options)


@pytest.mark.parametrize(
    ("events", "report"), [("x", "x"), ("x.json", "./x.json"), ("data/x", "link/x")], ids=["same", "dot", "link"]
)
def test_events_and_report_must_be_different_files(events: str, report: str) -> None:
    with pytest.raises(UsageError, match=f"`--report` {report} is the same file as `--events`; give another name"):
        check(config(events=events, report=report))


def test_shard_files_and_the_file_behind_standard_input_are_refused() -> None:
    shard = RunConfig(("data/a.jsonl",), Path("out"), shard=Shard(0, 2), report="out/part-00001-of-00002.parquet")
    with pytest.raises(UsageError, match="is part of the job's output"):
        check(shard)
    stdin = os.dup(0)
    try:
        with Path("data/a.jsonl").open() as stream:
            os.dup2(stream.fileno(), 0)
            with pytest.raises(UsageError, match="is an input of the job"):
                check(RunConfig(("-",), Path("out.parquet"), events="data/a.jsonl"))
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)


def test_pipes_devices_and_other_files_are_allowed() -> None:
    for name in ("-", os.devnull):
        check(config(events=name, report=name))
    os.mkfifo("pipe")
    check(config(events="pipe", report="pipe"))
    check(config(events="data/events.jsonl", report="data/report.json"))
    Path("old.json").write_text(REPORT)
    check(config(events="out.parquet.events", report="old.json"))
    assert Path("old.json").read_text() == REPORT
    assert not Path("data/report.json").exists(), "the check creates no file"


@pytest.mark.parametrize("option", ["events", "report"])
def test_a_file_that_holds_neither_events_nor_a_report_is_kept(option: str) -> None:
    """Also behind a link; with --overwrite it is replaced. Empty files and what an earlier run wrote are replaced."""
    Path("linked").symlink_to("other")
    for content in ("{}", "mine\n", '{"text": "a prompt"}\n', json.dumps([REPORT])):
        Path("other").write_text(content)
        for name in ("other", "linked"):
            with pytest.raises(OutputError, match=f"`--{option}` {name} exists and was not written by batchgen"):
                check(config(**{option: name}))
            check(config(existing="overwrite", **{option: name}))
        if option == "report":
            with pytest.raises(OutputError, match="was not written by batchgen"):
                write_report(REPORT, "other")
    for content in ("", REPORT, '{"event":"token","id":"a"}\n'):
        Path("other").write_text(content)
        check(config(**{option: "other"}))


def test_a_report_is_replaced_at_once_and_a_link_to_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("old.json").write_text(REPORT)
    Path("linked.json").symlink_to("old.json")
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OutputError, match="No space left"):
            write_report('{"rows": 1}', "linked.json")
    assert Path("old.json").read_text() == REPORT
    write_report('{"rows": 1}', "linked.json")
    assert Path("old.json").read_text() == '{"rows": 1}\n'
    assert Path("linked.json").is_symlink()
    assert sorted(path.name for path in Path().iterdir()) == ["data", "hard", "link", "linked.json", "old.json"]


def test_a_report_that_cannot_be_written_is_an_output_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, why in (("no/r.json", "No such file or directory"), ("data", "Is a directory")):
        with pytest.raises(OutputError, match=f"cannot write the report {name}: {why}"):
            check(config(report=name))
    Path("old.json").write_text(REPORT)
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.F_OK)
    for name in ("old.json", "data/r.json"):
        with pytest.raises(OutputError, match=f"cannot write the report {name}: Permission denied"):
            check(config(report=name))


def test_an_unwritable_report_is_an_error_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_tiny("llama", tmp_path / "model"))
    for command in COMMANDS:
        assert run_command([*command, "data/a.jsonl", "--model", model, "--report", "no/r.json"]) == 5
        assert capsys.readouterr().err == "error: cannot write the report no/r.json: No such file or directory\n"
        assert not Path("data/a.out.parquet.work").exists()
