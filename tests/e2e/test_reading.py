"""A run that goes on takes what the run before made of the input: no row is read twice, and nothing else differs."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import batchgen.job.run as job
from batchgen.cli.app import run_command
from batchgen.errors import OutputError
from batchgen.job import reading
from batchgen.job.reading import kept_reading
from batchgen.text.encode import Encoder
from batchgen.text.grammar_compiler import GrammarCompiler
from tests.e2e.rows import assert_same, mixed_lines, prompts, read, rows_of, write_lines
from tests.e2e.runner import run, start

OPTIONS = ["--dtype", "float32", "--include-prompt", "--include-prompt-ids"]
EXTRA: list[bytes | dict[str, Any]] = [
    b'{"text": "bad", "temperature": -1, "mark": [1, "\xc3\xa9"]}',
    b"not JSON",
    {"id": "schema", "text": "Give: ", "max_new_tokens": 30, "json_schema": {"type": "integer"}, "seed": 5},
    {"id": "biased", "text": "Say: ", "max_new_tokens": 5, "logit_bias": {"7": 2.5, "9": -3}, "bad_words": ["a", [5]]},
    {
        "id": "stops",
        "text": "Stop: ",
        "max_new_tokens": 9,
        "stop": ["q", "é"],
        "stop_regex": "x+",
        "stop_token_ids": [3],
    },
    {
        "id": "states",
        "text": "Inside: ",
        "max_new_tokens": 2,
        "return_hidden_states": {"layers": [0, -1], "pool": "mean"},
    },
    {"id": "score", "text": "Which? ", "completions": [" this", " that"]},
]


@pytest.fixture(scope="module")
def killed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job that was killed half way."""
    folder = tmp_path_factory.mktemp("killed")
    write_lines(folder / "in.jsonl", [*EXTRA, *mixed_lines(80, seed=4)])
    ended = start([*command(folder, model), "--commit-every", "5", "--max-num-seqs", "4"], folder)
    parts = folder / "out.parquet.work" / "parts"
    ended.wait_for(lambda: len(list(parts.glob("part-*.parquet"))) >= 4)
    assert ended.kill_after(0)
    return folder


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The output of the same job, undisturbed."""
    folder = tmp_path_factory.mktemp("whole")
    write_lines(folder / "in.jsonl", [*EXTRA, *mixed_lines(80, seed=4)])
    run(command(folder, model), folder)
    return read(folder / "out.parquet")


def command(folder: Path, model: Path) -> list[Any]:
    return ["run", folder / "in.jsonl", "-o", folder / "out.parquet", "--model", model, *OPTIONS]


@pytest.fixture
def folder(killed: Path, tmp_path: Path) -> Path:
    """A copy of the killed job."""
    return shutil.copytree(killed, tmp_path / "job")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry whenever rows are read."""
    seen: list[int] = []
    ingest = job.ingest

    def watched(*arguments: Any) -> Any:
        rows = ingest(*arguments)
        seen.append(rows.rows)
        return rows

    monkeypatch.setattr(job, "ingest", watched)
    return seen


def resume(folder: Path, model: Path, *options: str) -> int:
    return run_command([*map(str, command(folder, model)), "--progress", "none", *options])


def test_nothing_is_read_again(folder: Path, model: Path, whole: Any, reads: list[int]) -> None:
    assert (folder / "out.parquet.work" / "reading" / "columns.npz").exists()
    assert resume(folder, model) == 0
    assert reads == []
    # Bad rows name the file as it was called when it was read.
    assert_same(read(folder / "out.parquet"), whole, ignore=["error"])
    assert not (folder / "out.parquet.work").exists()


def test_bad_rows_that_were_not_committed_are_reported(
    folder: Path, model: Path, whole: Any, reads: list[int], killed: Path
) -> None:
    """The error rows stand in a part that was lost."""
    parts = sorted((folder / "out.parquet.work" / "parts").glob("part-*.parquet"))
    for part in parts:
        part.unlink()
    assert resume(folder, model) == 0
    assert reads == []
    errors = [row["error"] for row in rows_of(folder / "out.parquet") if row["status"] == "error"]
    assert len(errors) > 2
    assert errors[0]["param"] == "temperature"
    assert errors[0]["message"].startswith(f"{killed / 'in.jsonl'}, line 1: ")
    assert_same(read(folder / "out.parquet"), whole, ignore=["error"])


def kept_key(folder: Path) -> str:
    """The key under which a reading was kept."""
    with np.load(folder / "columns.npz") as kept:
        return str(json.loads(kept["about"].tobytes())["key"])


@pytest.mark.parametrize("name", ["columns.npz", "tokens", "texts", "bad"])
@pytest.mark.parametrize("harm", ["absent", "empty", "cut", "longer", "flipped"])
def test_what_is_not_whole_is_not_taken(folder: Path, name: str, harm: str) -> None:
    kept = folder / "out.parquet.work" / "reading"
    key = kept_key(kept)
    rows = kept_reading(kept, key)
    assert rows is not None
    assert len(rows.table) > 80
    rows.close(keep=True)
    assert kept_reading(kept, key + " ") is None
    data = (kept / name).read_bytes()
    (kept / name).unlink()
    if harm != "absent":
        flipped = bytes([*data[:40], data[40] ^ 1, *data[41:]])
        (kept / name).write_bytes({"empty": b"", "cut": data[:-3], "longer": data + b"1234", "flipped": flipped}[harm])
    again = kept_reading(kept, key)
    # An archive may have something behind it: its own sizes and sums hold what is read.
    assert (again is not None) == ((name, harm) == ("columns.npz", "longer"))
    if again is not None:
        again.close()


def test_one_flipped_byte_of_the_columns(folder: Path, model: Path, whole: Any, reads: list[int]) -> None:
    path = folder / "out.parquet.work" / "reading" / "columns.npz"
    data = bytearray(path.read_bytes())
    with np.load(path) as kept:
        seeds = kept["table.seed"].tobytes()
    data[bytes(data).index(seeds) + 3] ^= 1
    path.write_bytes(bytes(data))
    assert resume(folder, model) == 0
    assert len(reads) == 1
    assert_same(read(folder / "out.parquet"), whole, ignore=["error"])


@pytest.mark.parametrize(
    "options",
    [["--resume-anyway", "--seed", "1"], ["--events", "events.jsonl"], ["--media-root", "."]],
    ids=lambda options: options[0],
)
def test_what_may_read_otherwise_is_read_anew(
    folder: Path, model: Path, reads: list[int], options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert resume(folder, model, *options) == 0
    assert len(reads) == 1


def test_another_version_reads_anew(
    folder: Path, model: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "__version__", "0.0.9")
    assert resume(folder, model) == 0
    assert len(reads) == 1


def test_a_model_under_another_name_reads_anew(folder: Path, model: Path, reads: list[int]) -> None:
    """Rows may name it."""
    (folder / "linked").symlink_to(model)
    assert resume(folder, folder / "linked") == 0
    assert len(reads) == 1


def test_a_constraint_that_does_not_compile_any_more_reads_anew(
    folder: Path, model: Path, whole: Any, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Encoder, "can_compile", lambda *_: False)
    assert resume(folder, model) == 0
    assert len(reads) == 1
    assert_same(read(folder / "out.parquet"), whole, ignore=["error"])


def test_very_many_parameter_sets_are_not_kept(
    folder: Path, model: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MOST_PARAMS", 1)
    shutil.rmtree(folder / "out.parquet.work" / "reading")
    monkeypatch.setattr(job, "finish", _no_space)
    assert resume(folder, model) == 5
    assert len(reads) == 1
    assert not (folder / "out.parquet.work" / "reading" / "columns.npz").exists()


def test_constraints_of_committed_rows_are_not_compiled(
    folder: Path, model: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are committed by the first run; the second makes no grammar, for which it would start a process."""
    with monkeypatch.context() as broken:
        broken.setattr(job, "finish", _no_space)
        assert resume(folder, model) == 5
    compiled: list[Any] = []
    monkeypatch.setattr(GrammarCompiler, "compile", lambda _, new: iter(compiled.extend(new) or ()))  # type: ignore[func-returns-value]
    assert resume(folder, model) == 0
    assert (reads, compiled) == ([], [])


def test_no_collection_starts_while_rows_are_read(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a report says what any job pays before it reads."""
    write_lines(tmp_path / "in.jsonl", [{"text": text, "max_new_tokens": 1} for text in prompts(600, 6)])
    enabled: list[bool] = []
    ticks: list[int] = []
    ingest, tick = job.ingest, job.QuietCollector.tick

    def watched(*arguments: Any) -> Any:
        enabled.append(gc.isenabled())
        before = len(ticks)
        rows = ingest(*arguments)
        assert len(ticks) == before + 600 // 256
        return rows

    monkeypatch.setattr(job, "ingest", watched)
    monkeypatch.setattr(job.QuietCollector, "tick", lambda self: ticks.append(1) or tick(self))  # type: ignore[func-returns-value]
    assert resume(tmp_path, model, "--report", str(tmp_path / "report.json")) == 0
    assert enabled == [False]
    assert gc.isenabled()
    seconds = json.loads((tmp_path / "report.json").read_text())["seconds"]
    assert list(seconds) == ["starting", "reading", "loading", "planning", "generating", "writing"]


def test_a_run_that_is_cut_short_while_it_gathers(
    folder: Path, model: Path, whole: Any, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are committed by then: the next run reads none, computes none, and gathers."""
    with monkeypatch.context() as broken:
        broken.setattr(job, "finish", _no_space)
        assert resume(folder, model) == 5
    parts = sorted((folder / "out.parquet.work" / "parts").iterdir())
    assert resume(folder, model, "--report", str(folder / "report.json")) == 0
    assert reads == []
    assert parts
    assert json.loads((folder / "report.json").read_text())["engine"]["steps"] == 0
    assert_same(read(folder / "out.parquet"), whole, ignore=["error"])


def _no_space(*_: Any, **__: Any) -> None:
    raise OutputError("No space left on device")


def test_errors_are_tried_again_without_reading(folder: Path, model: Path, whole: Any, reads: list[int]) -> None:
    assert resume(folder, model, "--retry-errors") == 0
    assert reads == []
    assert_same(read(folder / "out.parquet"), whole, ignore=["error"])


def test_a_job_with_embeddings_is_read_again(model: Path, tmp_path: Path, reads: list[int]) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    rows: list[Any] = [{"text": text, **greedy} for text in prompts(120, 6)]
    rows.append({"input_embeds": [[0.01] * 64] * 3, **greedy})
    write_lines(tmp_path / "in.jsonl", rows)
    ended = start([*command(tmp_path, model)[:6], "--commit-every", "2", "--max-num-seqs", "2"], tmp_path)
    work = tmp_path / "out.parquet.work"
    ended.wait_for(lambda: len(list((work / "parts").glob("part-*.parquet"))) >= 4)
    assert ended.kill_after(0)
    assert not (work / "reading" / "columns.npz").exists()
    assert run_command([*map(str, command(tmp_path, model)[:6]), "--progress", "none"]) == 0
    assert len(reads) == 1
    assert {row["status"] for row in rows_of(tmp_path / "out.parquet")} == {"ok"}
