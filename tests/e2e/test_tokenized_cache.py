"""The tokenized cache: a resumed run reads the tokenised rows of the run before it, with equal results."""

from __future__ import annotations

import gc
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import batchgen.job.run as job
from batchgen.data.store.sealed_json import unsealed
from batchgen.errors import OutputError
from batchgen.job import output
from batchgen.job.rows import tokenized_cache
from batchgen.job.rows.tokenized_cache import load_tokenized
from batchgen.text.encode import Encoder
from batchgen.text.grammar.compiler import GrammarCompiler
from tests.e2e.rows import assert_same, mixed_lines, prompts, read, rows_of, write_lines
from tests.e2e.runner import ProcessResult, interrupt, parts_of, run

OPTIONS = ["--dtype", "float32", "--include-prompt", "--include-prompt-ids"]
EXTRA: list[bytes | dict[str, Any]] = [
    b'{"text": "bad", "temperature": -1, "mark": [1, "\xc3\xa9"]}',
    b"not JSON",
    {"id": "schema", "text": "Give: ", "max_new_tokens": 30, "json_schema": {"type": "integer"}, "seed": 5},
    {"id": "biased", "text": "Say: ", "max_new_tokens": 5, "logit_bias": {"7": 2.5, "9": -3}, "bad_words": ["a", [5]]},
    {"id": "stops", "text": "Stop: ", "max_new_tokens": 9, "stop": ["q", "é"], "stop_regex": "x+"},
    {"id": "states", "text": "Inside: ", "max_new_tokens": 2, "return_hidden_states": {"layers": [0, -1]}},
    {"id": "score", "text": "Which? ", "completions": [" this", " that"]},
    {"id": "carried", "text": "Odd: ", "max_new_tokens": 2, "temprature": 0},
]


@pytest.fixture(scope="module")
def killed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job that was stopped after some commits."""
    folder = tmp_path_factory.mktemp("killed")
    write_lines(folder / "in.jsonl", [*EXTRA, *mixed_lines(80, seed=4)])
    interrupt(command(folder, model), folder, parts=4)
    return folder


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The output table of the same job, uninterrupted."""
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
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Row counts of the calls that read the input."""
    counts: list[int] = []
    ingest = job.ingest

    def watched(*arguments: Any) -> Any:
        assert not gc.isenabled(), "no automatic garbage collection while rows are read"
        rows = ingest(*arguments)
        counts.append(rows.rows)
        return rows

    monkeypatch.setattr(job, "ingest", watched)
    yield counts
    assert gc.isenabled()


def resume(folder: Path, model: Path, *options: str, expect: int = 0) -> ProcessResult:
    return run([*command(folder, model), "--progress", "none", *options], folder, expect)


@pytest.mark.parametrize("lost", [False, True], ids=["some committed", "none committed"])
def test_a_resumed_run_reads_no_input(
    folder: Path, model: Path, whole: Any, reads: list[int], killed: Path, lost: bool
) -> None:
    """Nor if the parts, one with the error rows, were lost."""
    assert (folder / "out.parquet.work" / "tokenized" / "columns.npz").exists()
    for part in parts_of(folder / "out.parquet"):
        if lost:
            part.unlink()
    done = resume(folder, model, "--report", "-")
    assert reads == []
    assert (done.report["rows_resumed"] == 0) == lost
    assert "`temprature` in 1 row: did you mean `temperature`? carried, not obeyed" in done.stderr
    errors = [row["error"] for row in rows_of(folder / "out.parquet") if row["status"] == "error"]
    assert len(errors) > 2
    assert errors[0]["param"] == "temperature"
    assert errors[0]["message"].startswith(f"{killed / 'in.jsonl'}, line 1: ")
    # Messages of bad rows contain the file's path at the time it was read.
    assert_same(read(folder / "out.parquet"), whole, ignore=["error"])
    assert not (folder / "out.parquet.work").exists()


def cache_key(folder: Path) -> str:
    """The key of the tokenized cache in `folder`."""
    return str(json.loads((folder / "about.json").read_bytes())["key"])


@pytest.mark.parametrize("name", ["about.json", "columns.npz", "tokens", "texts", "bad"])
def test_a_damaged_cache_is_not_loaded(folder: Path, name: str) -> None:
    cache = folder / "out.parquet.work" / "tokenized"
    key = cache_key(cache)
    rows = load_tokenized(cache, key)
    assert rows is not None
    assert len(rows.table) > 80
    rows.close(keep=True)
    assert load_tokenized(cache, key + " ") is None
    data = (cache / name).read_bytes()
    flipped = bytes([*data[:40], data[40] ^ 1, *data[41:]])
    for damage, damaged in {"empty": b"", "cut": data[:-3], "longer": data + b"1234", "flipped": flipped}.items():
        whole = shutil.copytree(cache, folder / damage)
        (whole / name).write_bytes(damaged)
        again = load_tokenized(whole, key)
        assert again is None, damage
    (cache / name).unlink()
    assert load_tokenized(cache, key) is None


@pytest.mark.parametrize("count", [20, pytest.param(2500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["about.json", "columns.npz", "tokens", "texts", "bad"])
def test_a_flipped_bit_or_a_cut_anywhere_in_the_cache_is_found(folder: Path, name: str, count: int) -> None:
    """Whatever that does to the file: another error, another value, or none at all."""
    cache = folder / "out.parquet.work" / "tokenized"
    key, whole = cache_key(cache), (cache / name).read_bytes()
    about = unsealed(whole) if name == "about.json" else None
    rng = random.Random(len(name))
    for number in range(count):
        at = rng.randrange(len(whole)) if number % 2 else rng.randrange(max(0, len(whole) - 2000), len(whole))
        data = whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :] if number % 8 else whole[:at]
        (cache / name).write_bytes(data)
        rows = load_tokenized(cache, key)
        if rows is not None:
            rows.close(keep=True)
            assert about is not None, f"byte {at}"
            assert unsealed(data) == about, "a space in the JSON text"


def test_one_flipped_byte_of_the_columns_reads_the_input_again(
    folder: Path, model: Path, whole: Any, reads: list[int]
) -> None:
    path = folder / "out.parquet.work" / "tokenized" / "columns.npz"
    data = bytearray(path.read_bytes())
    with np.load(path) as columns:
        seeds = columns["table.seed"].tobytes()
    data[bytes(data).index(seeds) + 3] ^= 1
    path.write_bytes(bytes(data))
    resume(folder, model)
    assert len(reads) == 1
    assert_same(read(folder / "out.parquet"), whole, ignore=["error"])


@pytest.mark.parametrize(
    "options",
    [
        ["--resume-anyway", "--seed", "1"],
        *(
            pytest.param(given, marks=pytest.mark.slow)
            for given in (["--events", "events.jsonl"], ["--media-root", "."])
        ),
    ],
    ids=lambda options: options[0],
)
def test_options_that_affect_reading_read_the_input_again(
    folder: Path, model: Path, reads: list[int], options: list[str]
) -> None:
    resume(folder, model, *options)
    assert len(reads) == 1


def test_another_version_or_path_of_the_model_reads_the_input_again(
    folder: Path, model: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows may name the model."""
    (folder / "linked").symlink_to(model)
    again = shutil.copytree(folder, folder.with_name("again"), symlinks=True)
    resume(folder, folder / "linked")
    monkeypatch.setattr(tokenized_cache, "__version__", "0.0.9")
    resume(again, model)
    assert len(reads) == 2


def test_a_constraint_that_no_longer_compiles_reads_the_input_again(
    folder: Path, model: Path, whole: Any, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Encoder, "can_compile", lambda *_: False)
    resume(folder, model)
    assert len(reads) == 1
    assert_same(read(folder / "out.parquet"), whole, ignore=["error"])


def test_too_many_parameter_sets_are_not_cached(
    folder: Path, model: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenized_cache, "_MAX_PARAMS", 1)
    shutil.rmtree(folder / "out.parquet.work" / "tokenized")
    monkeypatch.setattr(output, "finish", _no_space)
    resume(folder, model, expect=5)
    assert len(reads) == 1
    assert not (folder / "out.parquet.work" / "tokenized" / "about.json").exists()


def test_a_run_that_failed_at_the_merge_resumes_with_the_merge(
    folder: Path, model: Path, whole: Any, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are committed: the next run reads and computes none, and compiles no grammar."""
    with monkeypatch.context() as broken:
        broken.setattr(output, "finish", _no_space)
        resume(folder, model, expect=5)
    compiled: list[Any] = []
    monkeypatch.setattr(GrammarCompiler, "compile", lambda _, new: iter(compiled.extend(new) or ()))  # type: ignore[func-returns-value]
    assert resume(folder, model, "--report", "-").report["engine"]["steps"] == 0
    assert (reads, compiled) == ([], [])
    assert_same(read(folder / "out.parquet"), whole, ignore=["error"])


def _no_space(*_: Any, **__: Any) -> None:
    raise OutputError("No space left on device")


def test_errors_are_retried_without_reading_the_input(folder: Path, model: Path, whole: Any, reads: list[int]) -> None:
    resume(folder, model, "--retry-errors")
    assert reads == []
    assert_same(read(folder / "out.parquet"), whole, ignore=["error"])


def test_a_job_with_embeddings_is_read_again(model: Path, tmp_path: Path, reads: list[int]) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    rows: list[Any] = [{"text": text, **greedy} for text in prompts(120, 6)]
    rows.append({"input_embeds": [[0.01] * 64] * 3, **greedy})
    write_lines(tmp_path / "in.jsonl", rows)
    interrupt(command(tmp_path, model)[:6], tmp_path, parts=4)
    reads.clear()
    assert not (tmp_path / "out.parquet.work" / "tokenized" / "about.json").exists()
    run(command(tmp_path, model)[:6], tmp_path)
    assert len(reads) == 1
    assert {row["status"] for row in rows_of(tmp_path / "out.parquet")} == {"ok"}
