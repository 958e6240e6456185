"""`batchgen export --format kd` of a run: what the loader gives against the columns of the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import batchgen
from batchgen.data.results_file import open_parquet
from batchgen.errors import InputError
from tests.e2e.rows import rows_of, write_lines
from tests.e2e.runner import run

ROWS: list[dict[str, Any]] = [
    {"id": "output", "text": "The quick", "max_new_tokens": 5, "return_logprob": True, "top_logprobs_num": 3},
    {"id": "plain", "text": "The quick", "max_new_tokens": 5},
    {"id": "two", "text": "Hello", "n": 2, "max_new_tokens": 7, "return_logprob": True, "top_logprobs_num": 1},
    {"id": "wrong", "text": "Hello", "top_p": 3},
    {"id": "whole", "text": "Hello there", "max_new_tokens": 4, "return_logprob": True, "top_logprobs_num": 4,
     "logprob_start_len": 0},
    {"id": "from", "text": "Sorting numbers: 1, 2", "max_new_tokens": 4, "return_logprob": True, "top_logprobs_num": 2,
     "logprob_start_len": 3},
    {"id": "given", "text": "Stop here, please.", "max_new_tokens": 0, "return_logprob": True, "top_logprobs_num": 300,
     "logprob_start_len": 0},
    {"id": "scored", "text": "The quick", "completions": [" brown", " fox"]},
]  # fmt: skip


@pytest.fixture(scope="module")
def done(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kd")
    write_lines(folder / "in.jsonl", ROWS)
    run(
        ["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--dtype", "float32", "--include-prompt-ids"], folder
    )
    run(["run", "in.jsonl", "-o", "bare.parquet", "--model", model, "--dtype", "float32"], folder)
    exported = run(["export", "out.parquet", "--format", "kd"], folder)
    assert exported.stderr == "out.kd.parquet: 6 samples, 1 failed, 2 without top logprobs left out\n"
    return folder


def test_samples_equal_the_columns_of_the_results(done: Path) -> None:
    samples = list(batchgen.load_kd(done / "out.kd.parquet"))
    rows = [row for row in rows_of(done / "out.parquet") if row["output_top_ids"] or row["input_top_ids"]]
    assert [sample["id"] for sample in samples] == ["output", "two", "two", "whole", "from", "given"]
    for sample, row in zip(samples, rows, strict=True):
        assert all(sample[name] == row[name] for name in ("id", "row_index", "prompt_index", "sample_index"))
        assert sample["input_ids"].tolist() == [*row["prompt_ids"], *row["output_ids"]]
        known = row["output_ids"] if row["input_logprobs"] is None else [*row["input_logprobs"], *row["output_ids"]]
        first = len(sample["input_ids"]) - len([value for value in known if value is not None])
        assert sample["first"] == first
        ids, logprobs = (
            [value for side in ("input", "output") for value in row[f"{side}_top_{what}"] or () if value is not None]
            for what in ("ids", "logprobs")
        )
        assert sample["top_ids"].shape == sample["top_logprobs"].shape
        assert (sample["top_ids"].dtype, sample["top_logprobs"].dtype) == (np.int64, np.float32)
        assert len(sample["top_ids"]) == len(sample["input_ids"]) - first
        assert sample["top_ids"].ravel().tolist() == ids
        np.testing.assert_allclose(sample["top_logprobs"].ravel(), logprobs, atol=32 / 2**22)


def test_the_values_at_a_token_are_for_its_place(done: Path) -> None:
    sample = next(sample for sample in batchgen.load_kd(done / "out.kd.parquet") if sample["id"] == "given")
    row = next(row for row in rows_of(done / "out.parquet") if row["id"] == "given")
    tokens = sample["input_ids"][sample["first"] :]
    kept = sample["top_ids"] == tokens[:, None]
    assert kept.any(axis=1).sum() > len(tokens) / 2, "300 tokens are most of the vocabulary"
    own = np.array(row["input_logprobs"][sample["first"] :])[kept.any(axis=1)]
    np.testing.assert_allclose(sample["top_logprobs"][kept], own, atol=32 / 2**22)


def test_a_kept_pair_has_at_most_four_bytes(model: Path, tmp_path: Path) -> None:
    row = {"max_new_tokens": 0, "return_logprob": True, "top_logprobs_num": 64, "logprob_start_len": 0}
    rng = np.random.default_rng(0)
    write_lines(tmp_path / "in.jsonl", [{"input_ids": rng.integers(4, 300, 200).tolist(), **row} for _ in range(20)])
    run(["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--include-prompt-ids"], tmp_path)
    run(["export", "out.parquet", "--format", "kd", "-o", "small.parquet"], tmp_path)
    pairs = sum(sample["top_ids"].size for sample in batchgen.load_kd(tmp_path / "small.parquet"))
    assert pairs == 20 * 199 * 64
    assert (tmp_path / "small.parquet").stat().st_size <= 4 * pairs, "with the ids of tokens and the footer"


def test_what_cannot_be_exported_is_one_error(done: Path, model: Path, tmp_path: Path) -> None:
    refused = run(["export", "bare.parquet", "--format", "kd"], done, 4)
    assert refused.stderr == (
        "error: row 0 has no `prompt_ids`, which a student reads. Run the job with --include-prompt-ids\n"
    )
    assert not (done / "bare.kd.parquet").exists()
    assert "Name a file with -o" in run(["export", "out.parquet", "--format", "kd", "-o", "-"], done, 2).stderr
    write_lines(tmp_path / "in.jsonl", [{"text": "Hello"}])
    run(["run", "in.jsonl", "-o", "out.parquet", "--model", model], tmp_path)
    none = run(["export", "out.parquet", "--format", "kd"], tmp_path, 4).stderr
    assert none == (
        "error: no sample has top logprobs. Run the job with --return-logprob --top-logprobs-num K "
        "--include-prompt-ids\n"
    )
    for name in ("out.parquet", "absent.parquet", "in.jsonl"):
        with pytest.raises(InputError, match=name):
            next(batchgen.load_kd(tmp_path / name))


def test_a_damaged_file_is_refused(done: Path, tmp_path: Path) -> None:
    content = bytearray((done / "out.kd.parquet").read_bytes())
    content[len(content) // 3] ^= 1
    (tmp_path / "bad.parquet").write_bytes(content)
    with pytest.raises(InputError, match="damaged"):
        list(batchgen.load_kd(tmp_path / "bad.parquet"))


def test_the_columns_are_plain_parquet(done: Path) -> None:
    with open_parquet(done / "out.kd.parquet") as stored:
        assert stored.has_checksums
    table = pq.read_table(done / "out.kd.parquet")
    assert table.column_names == ["id", "row_index", "prompt_index", "sample_index", "input_ids", "first", "pairs"]
    first = table.to_pylist()[0]
    assert len(first["pairs"]) == 3 * (len(first["input_ids"]) - first["first"])
