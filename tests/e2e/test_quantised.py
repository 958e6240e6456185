"""Jobs with quantised checkpoints: what is said of the format, and rows equal to those of the plain checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from batchgen.kernels.layouts import int8_refusal
from tests.e2e.model import save_model
from tests.e2e.runner import run
from tests.models.quantised import CASES, W8A8, quantise_folder

TEXTS = ["The quick brown", "Hello there, how", "Sorting numbers: 1, 2"]


@pytest.mark.parametrize("name", ["fp8 blocks", "gptq act-order"])
def test_a_job_names_the_format_and_gives_the_rows_of_the_plain_weights(name: str, tmp_path: Path) -> None:
    plain = save_model(tmp_path / "plain")
    quantised = shutil.copytree(plain, tmp_path / "quantised")
    quantise_folder(CASES[name], quantised, plain)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    common = [str(rows), "--device", "cpu", "--dtype", "float32", "--temperature", "0", "--max-new-tokens", "12"]

    checked = run(["check", *common, "--model", str(quantised)], tmp_path)
    assert f"of float32, dequantized from {CASES[name].config['quant_method']}: {CASES[name].label}\n" in checked.stdout
    assert f"the checkpoint is quantized ({CASES[name].config['quant_method']}: {CASES[name].label})" in checked.stderr

    ids = []
    for folder in (plain, quantised):
        out = tmp_path / f"{folder.name}.parquet"
        done = run(["run", *common, "--model", str(folder), "-o", str(out)], tmp_path)
        assert ("is quantized" in done.stderr) == (folder == quantised)
        ids.append(pq.read_table(out)["output_ids"].to_pylist())
        footer = json.loads(pq.read_schema(out).metadata[b"batchgen.run"])
        assert footer["quantization"] == "none"
    assert ids[0] == ids[1]
    assert footer["checkpoint_format"] == f"{CASES[name].config['quant_method']}: {CASES[name].label}"


REASON = int8_refusal(torch.float32, torch.device("cpu"))


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_job_says_that_it_computes_in_the_integers_of_the_checkpoint(tmp_path: Path) -> None:
    plain = save_model(tmp_path / "plain")
    quantised = shutil.copytree(plain, tmp_path / "quantised")
    quantise_folder(W8A8["per token"], quantised, plain)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    common = [str(rows), "--device", "cpu", "--dtype", "float32", "--deterministic", "--model", str(quantised)]
    notes, sizes, footers = [], [], []
    for way in ("auto", "none", "int8"):
        flags = [*common, "--quantization", way]
        checked = json.loads(run(["check", *flags, "--json"], tmp_path).stdout)
        sizes.append(checked["model"]["weight_bytes"])
        out = tmp_path / f"{way}.parquet"
        notes.append(run(["run", *flags, "--max-new-tokens", "4", "-o", str(out)], tmp_path).stderr)
        footers.append(json.loads(pq.read_schema(out).metadata[b"batchgen.run"]))
        assert checked["model"]["quantization"] == footers[-1]["quantization"]
    assert "8 of its linear layers are computed in its own integers, with inputs rounded to int8" in notes[0]
    assert "its weights are dequantized to float32" in notes[1]
    assert "then weights are quantized to int8, 8 of its linear layers to the checkpoint's own integers" in notes[2]
    assert [footer["quantization"] for footer in footers] == ["stored", "none", "int8"]
    assert "compiled int8 of 8 layers in the checkpoint's own integers" in footers[0]["kernels"]
    assert "compiled int8, 8 layers in the checkpoint's own integers (" in footers[2]["kernels"]
    assert len({footer["fingerprint"] for footer in footers}) == 3
    assert sizes[0] < sizes[1] == sizes[2]
