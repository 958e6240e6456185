"""The same command again, another command over old work, errors tried again, results replaced."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from batchgen.config import EngineConfig, RunConfig
from batchgen.errors import UsageError
from batchgen.job.run import run_job
from batchgen.job.signals import StopRequest
from tests.e2e.model import save_model
from tests.e2e.rows import assert_same, mixed_lines, prompts, read, rows_of, write_lines
from tests.e2e.runner import run, start

GREEDY = {"temperature": 0, "max_new_tokens": 6}
LONG = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
MANY = list(enumerate(prompts(99, 6), 1))


@pytest.fixture
def base(model: Path, tmp_path: Path) -> list[Any]:
    write_lines(tmp_path / "in.jsonl", mixed_lines(80, seed=4))
    return ["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--dtype", "float32"]


def interrupted(arguments: list[Any], folder: Path) -> int:
    """Kill a run when something is committed; how many parts."""
    return kill_after_parts(arguments, folder, 4)


def kill_after_parts(arguments: list[Any], folder: Path, parts: int) -> int:
    """`kill -9` a run when so many parts stand there; how many do."""
    work = folder / "out.parquet.work" / "parts"
    job = start([*arguments, "--commit-every", "5", "--max-num-seqs", "4"], folder)
    job.wait_for(lambda: len(list(work.glob("part-*.parquet"))) >= parts)
    assert job.kill_after(0)
    return len(list(work.glob("part-*.parquet")))


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The finished output of `base`."""
    folder = tmp_path_factory.mktemp("finished")
    write_lines(folder / "in.jsonl", mixed_lines(80, seed=4))
    run(["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--dtype", "float32"], folder)
    return (folder / "out.parquet").read_bytes()


@pytest.mark.parametrize(
    "changed",
    [
        ["--temperature", "0.3"],
        ["--truncate", "left"],
        ["--limit", "70"],
        ["--sampling-defaults", "openai"],
        ["--max-model-len", "200"],
        ["--dtype", "bfloat16"],
        ["--on-duplicate-id", "allow"],
    ],
    ids=lambda changed: changed[0],
)
def test_a_finished_output_is_not_taken_for_that_of_another_job(
    base: list[Any], tmp_path: Path, finished: bytes, changed: list[str]
) -> None:
    (tmp_path / "out.parquet").write_bytes(finished)
    done = run([*base, *changed], tmp_path, expect=2)
    assert "exists and is not this job's output. Replace it with --overwrite" in done.stderr
    assert (tmp_path / "out.parquet").read_bytes() == finished
    assert not (tmp_path / "out.parquet.work").exists()


def test_nor_for_that_of_a_model_trained_further(base: list[Any], tmp_path: Path, model: Path, finished: bytes) -> None:
    (tmp_path / "out.parquet").write_bytes(finished)
    trained = shutil.copytree(model, tmp_path / "trained")
    weights = load_file(trained / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    save_file(weights | {name: weights[name] * 1.01}, trained / "model.safetensors", {"format": "pt"})
    assert (trained / "model.safetensors").stat().st_size == (model / "model.safetensors").stat().st_size
    base[base.index(model)] = trained
    assert "is not this job's output" in run(base, tmp_path, expect=2).stderr


def test_nor_for_that_of_a_model_with_other_ends_of_sequence(
    base: list[Any], tmp_path: Path, model: Path, finished: bytes
) -> None:
    (tmp_path / "out.parquet").write_bytes(finished)
    base[base.index(model)] = with_ends(model, tmp_path / "mended", [1])
    assert "is not this job's output" in run(base, tmp_path, expect=2).stderr


def with_ends(model: Path, folder: Path, ends: list[int]) -> Path:
    """A copy of the model whose generation_config.json names other end-of-sequence ids."""
    path = shutil.copytree(model, folder) / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
    return folder


def test_unfinished_work_of_another_job_is_refused_by_what_differs(
    base: list[Any], tmp_path: Path, model: Path, finished: bytes
) -> None:
    parts = interrupted(base, tmp_path)
    for changed, named in [
        (["--temperature", "0.3"], "sampling default temperature"),
        (["--seed", "1"], "--seed"),
        (["--include-prompt"], "--include-prompt"),
        (["--model-impl", "transformers"], "model implementation"),
        (["--no-dedup", "--carry", "none"], "--carry, --dedup"),
    ]:
        done = run([*base, *changed], tmp_path, expect=2)
        assert f"(different: {named})" in done.stderr
        assert "--overwrite" in done.stderr
        assert "--resume-anyway" in done.stderr
    base[base.index(model)] = with_ends(model, tmp_path / "mended", [1])
    assert "(different: model eos_ids)" in run(base, tmp_path, expect=2).stderr
    base[base.index(tmp_path / "mended")] = model
    with (tmp_path / "in.jsonl").open("ab") as stream:
        stream.write(b'{"text": "one more", "temperature": 0}\n')
    done = run(base, tmp_path, expect=2)
    assert "(different: input files)" in done.stderr
    assert len(list((tmp_path / "out.parquet.work" / "parts").glob("part-*.parquet"))) == parts
    write_lines(tmp_path / "in.jsonl", mixed_lines(80, seed=4))
    run(base, tmp_path)
    (tmp_path / "expected.parquet").write_bytes(finished)
    assert_same(read(tmp_path / "out.parquet"), read(tmp_path / "expected.parquet"))


def test_what_does_not_matter_to_the_result_may_change(
    base: list[Any], tmp_path: Path, model: Path, finished: bytes
) -> None:
    """Batch sizes, memory, threads, commits and progress; where the model stands, and the input."""
    interrupted(base, tmp_path)
    (tmp_path / "in.jsonl").rename(tmp_path / "moved.jsonl")
    (tmp_path / "linked-model").symlink_to(model)
    moved = ["run", "moved.jsonl", "-o", "out.parquet", "--dtype", "float32", "--model", "linked-model"]
    others = ["--max-num-seqs", "50", "--page-size", "8", "--kv-memory", "8MiB", "--cpu-threads", "1"]
    report = run([*moved, *others, "--commit-seconds", "3", "--progress", "json", "--report", "-"], tmp_path).report
    assert report["rows_resumed"] > 0
    (tmp_path / "expected.parquet").write_bytes(finished)
    # Messages name the file as it was called when they were written.
    assert_same(read(tmp_path / "out.parquet"), read(tmp_path / "expected.parquet"), ignore=["error"])


def test_a_refused_run_leaves_what_was_computed(base: list[Any], tmp_path: Path) -> None:
    interrupted(base, tmp_path)
    parts = tmp_path / "out.parquet.work" / "parts"
    before = {part.name: part.read_bytes() for part in parts.glob("part-*.parquet")}
    assert "--max-output-bytes" in run([*base, "--max-output-bytes", "1000"], tmp_path, expect=2).stderr
    assert {part.name: part.read_bytes() for part in parts.iterdir()} == before
    assert run([*base, "--report", "-"], tmp_path).report["rows_resumed"] > 0


def test_an_error_of_any_kind_leaves_what_was_computed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the kind that refuses a job comes once rows are generated. If it did, they would stay all the same."""

    def fail(*_: object, **__: object) -> None:
        raise UsageError("made up")

    monkeypatch.setattr("batchgen.job.run.finish", fail)
    source = write_lines(tmp_path / "in.jsonl", [{"text": text, **GREEDY} for text in prompts(3, 6)])
    engine = EngineConfig(model=str(model), dtype="float32")
    with pytest.raises(UsageError, match="made up"):
        run_job(RunConfig((str(source),), tmp_path / "out.parquet", engine, progress="none"), StopRequest())
    (part,) = (tmp_path / "out.parquet.work" / "parts").iterdir()
    assert len(rows_of(part)) == 3


def test_resume_anyway_goes_on_under_other_options(base: list[Any], tmp_path: Path) -> None:
    interrupted(base, tmp_path)
    report = run([*base, "--seed", "1", "--resume-anyway", "--report", "-"], tmp_path).report
    assert 0 < report["rows_resumed"] < 80
    assert len({row["row_index"] for row in rows_of(tmp_path / "out.parquet")}) == 80


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([], ["--limit", "2"], "is not of this job"),
        ([], ["--n", "3"], "samples and not this job's 3"),
        (["--on-bad-row", "error-row"], ["--on-bad-row", "skip"], "row 0, prompt 0 is not of this job"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and value else None,
)
def test_resume_anyway_refuses_rows_that_never_fit_before_it_adds_to_them(
    model: Path, tmp_path: Path, first: list[str], second: list[str], said: str
) -> None:
    rows = [{"id": "0", "txt": "no prompt"}, *({"id": str(i), "text": text, **LONG} for i, text in MANY)]
    write_lines(tmp_path / "in.jsonl", rows)
    base = ["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--dtype", "float32"]
    interrupted([*base, *first], tmp_path)
    parts = tmp_path / "out.parquet.work" / "parts"
    before = {part.name: part.read_bytes() for part in parts.iterdir()}
    done = run([*base, *second, "--resume-anyway"], tmp_path, expect=2)
    assert said in done.stderr
    assert "options and input that it was begun with, or drop it with --overwrite" in done.stderr
    assert {part.name: part.read_bytes() for part in parts.iterdir() if part.suffix != ".tmp"} == {
        name: content for name, content in before.items() if not name.endswith(".tmp")
    }
    report = run([*base, *first, "--report", "-"], tmp_path).report
    assert report["rows_resumed"] > 0
    assert [row["row_index"] for row in rows_of(tmp_path / "out.parquet")] == list(range(len(rows)))


def test_bad_rows_are_not_added_to_work_that_never_fits(model: Path, tmp_path: Path) -> None:
    rows = [{"id": "0", "txt": "no prompt"}, *({"id": str(i), "text": text, **LONG} for i, text in MANY)]
    write_lines(tmp_path / "in.jsonl", rows)
    base = ["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--dtype", "float32", "--on-bad-row"]
    interrupted([*base, "skip"], tmp_path)
    run([*base, "error-row", "--n", "2", "--resume-anyway"], tmp_path, expect=2)
    run([*base, "skip"], tmp_path)
    assert [row["row_index"] for row in rows_of(tmp_path / "out.parquet")] == list(range(1, len(rows)))


def test_resume_anyway_goes_on_where_the_rows_fit(model: Path, tmp_path: Path) -> None:
    """Bad rows were left out so far, and more rows are asked for: both come to what is committed."""
    rows = [{"id": "0", "txt": "no prompt"}, *({"id": str(i), "text": text, **LONG} for i, text in MANY)]
    write_lines(tmp_path / "in.jsonl", rows)
    base = ["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--dtype", "float32"]
    interrupted([*base, "--on-bad-row", "skip", "--limit", "90"], tmp_path)
    report = run([*base, "--resume-anyway", "--report", "-"], tmp_path).report
    assert (report["rows"], report["errors"]) == (len(rows), {"missing_prompt": 1})
    assert 0 < report["rows_resumed"] < 90
    assert [row["row_index"] for row in rows_of(tmp_path / "out.parquet")] == list(range(len(rows)))


def test_overwrite_starts_anew(base: list[Any], tmp_path: Path, finished: bytes) -> None:
    out = tmp_path / "out.parquet"
    out.write_bytes(b"something else altogether")
    done = run(base, tmp_path, expect=2)
    assert "exists and is not this job's output" in done.stderr
    assert out.read_bytes() == b"something else altogether"
    interrupted([*base, "--overwrite"], tmp_path)
    assert out.read_bytes() == b"something else altogether", "untouched until the end"
    run([*base, "--overwrite"], tmp_path)
    (tmp_path / "expected.parquet").write_bytes(finished)
    assert_same(read(out), read(tmp_path / "expected.parquet"))
    before = out.stat().st_ino
    report = run([*base, "--overwrite", "--report", "-"], tmp_path).report
    assert (report["rows_resumed"], report["already_done"]) == (0, False)
    assert out.stat().st_ino != before
    assert_same(read(out), read(tmp_path / "expected.parquet"))


def test_overwrite_computes_anew_what_a_retry_took_from_the_output(model: Path, tmp_path: Path) -> None:
    rows = [{"id": "0", "txt": "no prompt"}, *({"id": str(i), "text": text, **GREEDY} for i, text in MANY)]
    write_lines(tmp_path / "in.jsonl", rows)
    base = ["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--dtype", "float32"]
    run(base, tmp_path)
    whole, before = read(tmp_path / "out.parquet"), (tmp_path / "out.parquet").stat().st_ino
    kill_after_parts([*base, "--retry-errors"], tmp_path, 1)
    report = run([*base, "--overwrite", "--report", "-"], tmp_path).report
    assert (report["rows_resumed"], report["rows_ok"]) == (0, 99)
    assert (tmp_path / "out.parquet").stat().st_ino != before
    assert_same(read(tmp_path / "out.parquet"), whole)


def test_a_finished_job_run_again_leaves_the_work_that_is_to_replace_its_output(
    base: list[Any], tmp_path: Path, finished: bytes
) -> None:
    (tmp_path / "out.parquet").write_bytes(finished)
    kept = interrupted([*base, "--overwrite"], tmp_path)
    assert run([*base, "--report", "-"], tmp_path).report["already_done"]
    assert len(list((tmp_path / "out.parquet.work" / "parts").glob("part-*.parquet"))) == kept
    assert run([*base, "--overwrite", "--report", "-"], tmp_path).report["rows_resumed"] > 0
    assert not (tmp_path / "out.parquet.work").exists()


def test_overwrite_after_resume_anyway_mixes_nothing(model: Path, tmp_path: Path) -> None:
    """Over an older output one job begins with --overwrite, a second goes on with it; then each starts anew."""
    rows = [{"id": str(i), "text": text, "max_new_tokens": 30, "ignore_eos": True} for i, text in MANY]
    write_lines(tmp_path / "in.jsonl", rows)
    base = ["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--dtype", "float32"]
    second = [*base, "--seed", "1"]
    run(["run", "in.jsonl", "-o", "whole.parquet", "--model", model, "--dtype", "float32", "--seed", "1"], tmp_path)
    (tmp_path / "out.parquet").write_bytes(b"an older output")
    first = interrupted([*base, "--overwrite"], tmp_path)
    run([*base, "--limit", "1", "--resume-anyway"], tmp_path, expect=2)
    assert kill_after_parts([*base, "--overwrite"], tmp_path, first + 2) > first, "its own work, and nothing came to it"
    kept = kill_after_parts([*second, "--resume-anyway"], tmp_path, first + 4)
    refused = run(base, tmp_path, expect=2)
    assert "belongs to a different job. Go on with it with --resume-anyway" in refused.stderr
    assert len(list((tmp_path / "out.parquet.work" / "parts").glob("part-*.parquet"))) == kept
    report = run([*second, "--overwrite", "--report", "-"], tmp_path).report
    assert report["rows_resumed"] == 0
    assert_same(read(tmp_path / "out.parquet"), read(tmp_path / "whole.parquet"))


def test_retry_errors_runs_only_what_failed(model: Path, tmp_path: Path) -> None:
    """Rows that are too long for one run's context: with another limit they are tried again, and the rest stands."""
    rows = [{"id": str(i), "text": text, **GREEDY} for i, text in enumerate(prompts(40, 6))]
    rows[7] = {"id": "7", "input_ids": [9] * 220, **GREEDY}
    rows[8] = {"id": "8", "txt": "no prompt", **GREEDY}
    source = write_lines(tmp_path / "in.jsonl", rows)
    arguments = ["run", source, "-o", "out.parquet", "--model", model, "--dtype", "float32"]
    run([*arguments, "--max-errors", "1", "--max-model-len", "200"], tmp_path, expect=3)
    more = ["--resume-anyway", "--retry-errors", "--report", "-"]
    report = run([*arguments, *more], tmp_path).report
    assert report["errors"] == {"missing_prompt": 1}
    output = rows_of(tmp_path / "out.parquet")
    assert output[7]["status"] == "ok"
    assert output[8]["error"]["code"] == "missing_prompt"
    assert len(output) == 40


def test_rows_that_the_pool_cannot_hold_fail_and_are_retried_with_more(tmp_path: Path) -> None:
    """Memory is no part of the job: the finished output is taken up again, and only the failed rows are computed."""
    model = save_model(tmp_path / "long", context=8192)
    rows = [{"id": str(i), "text": text, **GREEDY} for i, text in enumerate(prompts(30, 6))]
    rows[11] = {"id": "long", "input_ids": [9, 10, 11] * 1000, **GREEDY, "n": 2}
    rows[12] = {"id": "twin", "input_ids": [9, 10, 11] * 1000, **GREEDY, "n": 2}
    write_lines(tmp_path / "in.jsonl", rows)
    arguments = ["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--dtype", "float32", "--report", "-"]
    report = run([*arguments, "--kv-memory", "1MiB"], tmp_path).report
    assert report["errors"] == {"oom": 2}
    before = rows_of(tmp_path / "out.parquet")
    for row in before[11:13]:
        assert row["error"]["code"] == "oom"
        assert "raise --kv-memory or lower max_new_tokens" in row["error"]["message"]
    assert run([*arguments, "--kv-memory", "16MiB"], tmp_path).report["already_done"]
    again = run([*arguments, "--kv-memory", "16MiB", "--retry-errors"], tmp_path).report
    after = rows_of(tmp_path / "out.parquet")
    assert again["rows_resumed"] == 28
    assert again["errors"] == {}
    assert [row["completion_tokens"] for row in after if row["id"] in ("long", "twin")] == [6] * 4
    assert [row["dedup_of"] for row in after if row["id"] == "twin"] == [11, 11]
    assert [row for row in after if row["row_index"] not in (11, 12)] == before[:11] + before[13:]
