"""The output file: its footer and its columns; and rows with NaN logits, which do not affect other rows."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from batchgen import __version__
from batchgen.kernels.cpu.library import loaded
from tests.e2e.model import DEFAULTS
from tests.e2e.rows import mixed_lines, prompts, read, rows_of, write_lines
from tests.e2e.runner import run


@pytest.fixture(scope="module")
def done(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with in.jsonl and its out.parquet."""
    folder = tmp_path_factory.mktemp("output")
    write_lines(folder / "in.jsonl", mixed_lines(60, seed=9))
    run(["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--dtype", "float32", "--seed", "7"], folder)
    return folder


def test_footer(done: Path, model: Path) -> None:
    metadata = pq.read_schema(done / "out.parquet").metadata
    assert set(metadata) >= {b"batchgen.schema_version", b"batchgen.run"}
    footer = json.loads(metadata[b"batchgen.run"])
    data = (done / "in.jsonl").read_bytes()
    assert footer["inputs"] == [{"path": "in.jsonl", "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}]
    assert footer["version"] == __version__
    assert footer["model"] == str(model)
    assert footer["dtype"] == "float32"
    assert footer["kernels"].startswith("compiled " if loaded() else "torch (no compiled: ")
    assert "; products: " in footer["kernels"]
    assert footer["deterministic"] is False
    assert footer["sampling_defaults"] == DEFAULTS
    assert footer["logprobs_mode"] == "raw"
    assert footer["layer_ids"] is None
    for name in ("model_digest", "config_digest", "tokenizer_digest", "template_digest", "fingerprint"):
        assert len(footer[name]) == 64, name
    assert footer["rows"] == len(read(done / "out.parquet"))
    assert footer["shard"] is None
    assert footer["configuration"]["options"]["seed"] == {"value": 7, "origin": "flag"}


def test_the_columns_of_a_row_are_consistent(done: Path) -> None:
    for row in rows_of(done / "out.parquet"):
        if row["status"] == "error":
            assert row["error"]["code"]
            assert row["output_ids"] is None
            continue
        assert row["status"] == "ok"
        assert row["error"] is None
        assert row["finish_reason"] in ("stop", "length")
        assert (row["stop_kind"] is not None) == (row["finish_reason"] == "stop")
        scored = row["scores"] is not None
        assert (row["output_ids"] is None) == (row["text"] is None) == (row["seed"] is None) == scored
        assert len(row["output_ids"] or ()) == row["completion_tokens"] <= row["effective_max_new_tokens"]
        if not row["completion_tokens"]:
            assert not row["output_logprobs"]
            continue
        if row["output_logprobs"] is not None:
            assert len(row["output_logprobs"]) == row["completion_tokens"]
            assert row["cumulative_logprob"] == pytest.approx(sum(row["output_logprobs"]), abs=1e-4)
            assert row["mean_logprob"] == pytest.approx(row["cumulative_logprob"] / row["completion_tokens"])
        if row["output_top_ids"] is not None:
            k = len(row["output_top_ids"]) // row["completion_tokens"]
            best = row["output_top_logprobs"][::k]
            assert all(own <= top + 1e-5 for own, top in zip(row["output_logprobs"], best, strict=True))


BROKEN = 300
"""Id of the token whose embedding is NaN."""


def test_nan_logits_of_a_row_do_not_affect_other_rows(model: Path, tmp_path: Path) -> None:
    """Pages that held NaN are reused by other rows, whose masked positions must not read them."""
    folder = shutil.copytree(model, tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BROKEN] = torch.nan
    if "lm_head.weight" not in weights:
        pytest.fail("the tiny model's head must not be tied to its embedding")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    rows = []
    for i, text in enumerate(prompts(60, 12)):
        drawn = {"temperature": 0 if i % 2 else 1.2, "max_new_tokens": 5 + i % 40, "n": 1 + i % 3 // 2, "seed": i}
        prompt = {"input_ids": [7] * (i % 9) + [BROKEN] + [9] * (i % 20)} if i % 6 == 5 else {"text": text}
        rows.append({"id": str(i), **prompt, **drawn})
    source = write_lines(tmp_path / "in.jsonl", rows)
    command = ["run", source, "--dtype", "float32", "--kv-memory", "1MiB", "--page-size", "8"]
    run([*command, "--model", model, "-o", "sound.parquet"], tmp_path)
    report = run([*command, "--model", folder, "-o", "broken.parquet", "--report", "-"], tmp_path).report
    expected = {(row["id"], row["sample_index"]): row for row in rows_of(tmp_path / "sound.parquet")}
    affected = {name for (name, _), row in expected.items() if int(name) % 6 == 5 or BROKEN in row["output_ids"][:-1]}
    failed = 0
    for row in rows_of(tmp_path / "broken.parquet"):
        if row["id"] not in affected:
            assert row["output_ids"] == expected[row["id"], row["sample_index"]]["output_ids"]
            continue
        # One sample that contains the token fails its prompt, which gives one error row.
        failed += 1
        assert row["error"]["code"] == "nan_logits"
        assert "--dtype float32" in row["error"]["message"]
        assert row["sample_index"] == 0
    assert 10 <= failed == len(affected) < 30
    assert report["errors"] == {"nan_logits": failed}
