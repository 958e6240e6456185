"""Contexts that options change: `--rope-scaling`, `--hf-overrides`, and frequencies chosen by the longest row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchgen import Engine
from batchgen.demo import model_path
from tests.data.helpers import stored
from tests.e2e.runner import run

SHORT, LONG = [1.0] * 32, [1.0 + 0.2 * i for i in range(32)]
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 40,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}
ROW = {"id": "a", "text": "Once upon a time", "temperature": 0, "max_new_tokens": 8, "return_logprob": True}
LONGER = {**ROW, "id": "b", "max_new_tokens": 60, "ignore_eos": True}


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def scaled(settings: dict[str, Any]) -> list[str]:
    return ["--device", "cpu", "--dtype", "float32", "--attention", "torch", "--rope-scaling", json.dumps(settings)]


def test_a_scaled_context_runs_and_is_part_of_the_job(tmp_path: Path) -> None:
    rows = write(tmp_path, ROW)
    run(["run", rows, "-o", "out.parquet", *scaled(YARN)], tmp_path)
    refused = run(["run", rows, "-o", "out.parquet", *scaled({**YARN, "factor": 3.0})], tmp_path, 2)
    assert "--rope-scaling" in refused.stderr
    refused = run(
        ["run", rows, "-o", "out.parquet", *scaled(YARN), "--hf-overrides", '{"text_config": {"rms_norm_eps": 1}}'],
        tmp_path,
        2,
    )
    assert "--hf-overrides" in refused.stderr
    assert (
        "nothing to do"
        in run(["run", rows, "-o", "out.parquet", *scaled(dict(reversed(YARN.items())))], tmp_path).stderr
    )


def test_the_context_is_longer_with_a_scaling(tmp_path: Path) -> None:
    rows = write(tmp_path, {"input_ids": [7] * 2500, "max_new_tokens": 2})
    plain = json.loads(run(["check", rows, "--json"], tmp_path, 3).stdout)
    assert plain["errors"] == {"context_length_exceeded": 1}
    assert json.loads(run(["check", rows, "--json", *scaled(YARN)], tmp_path).stdout)["errors"] == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hf-overrides", '{"rms_eps": 1}'], "'rms_eps'"),
        (["--max-model-len", "5000"], "--rope-scaling '"),
        (["--rope-scaling", '{"rope_type": "yarn", "factor": "wide"}'], "changed by --rope-scaling"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: list[str], words: str, tmp_path: Path) -> None:
    assert words in run(["check", write(tmp_path, ROW), *options], tmp_path, 6).stderr


def test_short_jobs_get_the_unscaled_frequencies(tmp_path: Path) -> None:
    """As the library gives them to rows within the original context; a job with a longer row says that none do."""
    alone = run(["run", write(tmp_path, ROW), "-o", "short.parquet", *scaled(LONGROPE)], tmp_path)
    assert "unscaled" not in alone.stderr
    both = run(["run", write(tmp_path, ROW, LONGER), "-o", "long.parquet", *scaled(LONGROPE)], tmp_path)
    assert "the longest row" in both.stderr
    assert "--max-model-len 40" in both.stderr
    assert "the longest row" in run(["check", write(tmp_path, ROW, LONGER), *scaled(LONGROPE)], tmp_path).stderr
    short, long = (stored(tmp_path / name)[0]["output_logprobs"] for name in ("short.parquet", "long.parquet"))
    assert short != pytest.approx(long, abs=1e-3)
    unscaled = {**LONGROPE, "long_factor": SHORT}
    engine = Engine(model_path(), device="cpu", dtype="float32", attention="torch", rope_scaling=unscaled)
    (expected,) = engine.generate([ROW])
    assert short == pytest.approx(list(expected.output_logprobs), abs=1e-5)


def test_replays_take_the_frequencies_of_the_job(tmp_path: Path) -> None:
    run(["run", write(tmp_path, ROW, LONGER), "-o", "long.parquet", *scaled(LONGROPE)], tmp_path)
    assert "2 of 2 rows are the same" in run(["verify", "long.parquet", "--rows", "2"], tmp_path).stdout


def test_rows_of_other_frequencies_are_not_reused(tmp_path: Path) -> None:
    run(["run", write(tmp_path, ROW), "-o", "short.parquet", *scaled(LONGROPE)], tmp_path)
    longer = ["run", write(tmp_path, ROW, LONGER), "-o", "long.parquet", "--reuse", "short.parquet", *scaled(LONGROPE)]
    assert "0 of 2 rows are reused" in run(longer, tmp_path).stderr
