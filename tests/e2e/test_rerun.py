"""Running a command again: resuming, refusing another job's work, --retry-errors, --overwrite, --resume-anyway."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from batchgen.errors import UsageError
from tests.e2e.model import save_model
from tests.e2e.rows import assert_same, mixed_lines, prompts, read, rows_of, write_lines
from tests.e2e.runner import interrupt, parts_of, run

GREEDY = {"temperature": 0, "max_new_tokens": 6}
LONG = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
MANY = list(enumerate(prompts(99, 6), 1))


@pytest.fixture
def base(model: Path, tmp_path: Path) -> list[Any]:
    write_lines(tmp_path / "in.jsonl", mixed_lines(80, seed=4))
    return ["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--dtype", "float32"]


def interrupted(arguments: list[Any], folder: Path, parts: int = 4) -> int:
    """Stop a run when at least `parts` parts are committed; return their number."""
    return interrupt(arguments, folder, parts=parts)


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Content of the finished output of `base`."""
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
        ["--stop-on-repeat", "4"],
        ["--lenient-schemas"],
        ["--deterministic"],
        ["--logprobs-mode", "processed"],
        ["--repetition-penalty-scope", "prompt+output"],
    ],
    ids=lambda changed: changed[0],
)
def test_the_finished_output_of_another_job_is_refused(
    base: list[Any], tmp_path: Path, finished: bytes, changed: list[str]
) -> None:
    (tmp_path / "out.parquet").write_bytes(finished)
    done = run([*base, *changed], tmp_path, expect=2)
    assert "exists and is not this job's output. Replace it with --overwrite" in done.stderr
    assert (tmp_path / "out.parquet").read_bytes() == finished
    assert not (tmp_path / "out.parquet.work").exists()


def test_the_finished_output_of_another_model_is_refused(
    base: list[Any], tmp_path: Path, model: Path, finished: bytes
) -> None:
    """Other weights of the same size, and other end-of-sequence ids."""
    (tmp_path / "out.parquet").write_bytes(finished)
    trained = shutil.copytree(model, tmp_path / "trained")
    weights = load_file(trained / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    save_file(weights | {name: weights[name] * 1.01}, trained / "model.safetensors", {"format": "pt"})
    assert (trained / "model.safetensors").stat().st_size == (model / "model.safetensors").stat().st_size
    for other in (trained, with_eos_ids(model, tmp_path / "other_eos", [1])):
        command = [other if word == model else word for word in base]
        assert "is not this job's output" in run(command, tmp_path, expect=2).stderr


def with_eos_ids(model: Path, folder: Path, eos_ids: list[int]) -> Path:
    """Copy the model to `folder` with other end-of-sequence ids in generation_config.json."""
    path = shutil.copytree(model, folder) / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": eos_ids}))
    return folder


def test_the_refusal_of_unfinished_work_names_the_differences(
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
        assert ("--resume-anyway" in done.stderr) == (named != "model implementation"), "whose results would differ"
    base[base.index(model)] = with_eos_ids(model, tmp_path / "other_eos", [1])
    assert "(different: model eos_ids)" in run(base, tmp_path, expect=2).stderr
    base[base.index(tmp_path / "other_eos")] = model
    with (tmp_path / "in.jsonl").open("ab") as stream:
        stream.write(b'{"text": "one more", "temperature": 0}\n')
    done = run(base, tmp_path, expect=2)
    assert "(different: input files)" in done.stderr
    assert len(parts_of(tmp_path / "out.parquet")) == parts
    write_lines(tmp_path / "in.jsonl", mixed_lines(80, seed=4))
    run(base, tmp_path)
    (tmp_path / "expected.parquet").write_bytes(finished)
    assert_same(read(tmp_path / "out.parquet"), read(tmp_path / "expected.parquet"))


def test_options_that_do_not_affect_results_may_change(
    base: list[Any], tmp_path: Path, model: Path, finished: bytes
) -> None:
    """Batch sizes, memory, threads, commits and progress; the paths of the model and the input."""
    interrupted(base, tmp_path)
    (tmp_path / "in.jsonl").rename(tmp_path / "moved.jsonl")
    (tmp_path / "linked-model").symlink_to(model)
    moved = ["run", "moved.jsonl", "-o", "out.parquet", "--dtype", "float32", "--model", "linked-model"]
    others = ["--max-num-seqs", "50", "--page-size", "8", "--kv-memory", "8MiB", "--cpu-threads", "1"]
    report = run([*moved, *others, "--commit-seconds", "3", "--progress", "json", "--report", "-"], tmp_path).report
    assert report["rows_resumed"] > 0
    (tmp_path / "expected.parquet").write_bytes(finished)
    # Messages contain the file's path at the time they were written.
    assert_same(read(tmp_path / "out.parquet"), read(tmp_path / "expected.parquet"), ignore=["error"])


def test_a_usage_error_keeps_committed_parts(base: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before generation and, if one were to come then, after it."""
    interrupted(base, tmp_path)
    parts = tmp_path / "out.parquet.work" / "parts"
    before = {part.name: part.read_bytes() for part in parts.glob("part-*.parquet")}
    assert "--max-output-bytes" in run([*base, "--max-output-bytes", "1000"], tmp_path, expect=2).stderr
    assert {part.name: part.read_bytes() for part in parts.iterdir()} == before
    with monkeypatch.context() as broken:
        broken.setattr("batchgen.job.output.finish", _fail)
        assert "made up" in run(base, tmp_path, expect=2).stderr
    assert len({row["row_index"] for part in parts.glob("*.parquet") for row in rows_of(part)}) == 80


def _fail(*_: object, **__: object) -> None:
    raise UsageError("made up")


@pytest.mark.parametrize(
    ("first", "second"),
    [([], ["--limit", "40"]), ([], ["--n", "3"]), (["--on-bad-row", "skip", "--limit", "90"], [])],
    ids=["fewer rows", "other samples", "more rows"],
)
def test_resume_anyway_gives_the_output_of_the_second_command(
    model: Path, tmp_path: Path, first: list[str], second: list[str]
) -> None:
    """Committed rows that it asks for are kept, others are dropped or computed."""
    rows = [{"id": "0", "txt": "no prompt"}, *({"id": str(i), "text": text, **LONG} for i, text in MANY)]
    write_lines(tmp_path / "in.jsonl", rows)
    base = ["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--dtype", "float32"]
    interrupted([*base, *first], tmp_path)
    report = run([*base, *second, "--resume-anyway", "--report", "-"], tmp_path).report
    assert (report["rows_resumed"] > 1) == ("--n" not in second)
    run([*base, *second, "-o", "fresh.parquet"], tmp_path)
    assert_same(read(tmp_path / "out.parquet"), read(tmp_path / "fresh.parquet"))


def test_resume_anyway_reuses_no_row_of_another_model(base: list[Any], tmp_path: Path, finished: bytes) -> None:
    """Not even one: refused before anything is touched."""
    interrupted(base, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for options in (["--resume-anyway"], ["--resume-anyway", "--retry-errors"]):
        message = run([*base, "--dtype", "bfloat16", *options], tmp_path, expect=2).stderr
        assert "no row of out.parquet.work can be reused" in message
        assert "model dtype was float32, is bfloat16" in message
    assert {path: path.read_bytes() for path in before} == before
    (tmp_path / "old.parquet").write_bytes(finished)
    other = [*base, "-o", "other.parquet", "--reuse", "old.parquet", "--logprobs-mode", "processed"]
    assert "--logprobs-mode was raw, is processed" in run(other, tmp_path, expect=2).stderr
    assert not list(tmp_path.glob("other*"))


def test_retry_errors_runs_only_failed_rows(model: Path, tmp_path: Path) -> None:
    """Rows that are too long for one run are computed with a higher limit; the other rows are kept."""
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


def test_rows_too_large_for_the_pool_fail_and_are_retried_with_more_memory(tmp_path: Path) -> None:
    """Memory is not part of the fingerprint: a retry copies the finished rows and computes only the failed ones."""
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
