"""Bad models and inputs are refused before torch and transformers are imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.tiny import save_tiny

SCRIPT = """
import sys
from batchgen.cli.app import run_command
status = run_command(sys.argv[1:])
assert not {"torch", "transformers", "xgrammar"} & set(sys.modules), "imported before the refusal"
sys.exit(status)
"""


def folder(tmp_path: Path, kind: str) -> Path:
    model = tmp_path / "model"
    if kind == "missing":
        return model
    model.mkdir()
    config = {"model_type": "mamba" if kind == "mamba" else "llama", "architectures": ["X"]}
    if kind != "no config":
        (model / "config.json").write_text(json.dumps(config))
    if kind == "half copied":
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    if kind == "mamba":
        header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        content = len(header).to_bytes(8, "little") + header + bytes(4)
        (model / "model.safetensors").write_bytes(content)
    if kind == "truncated":
        (model / "model.safetensors").write_bytes(b"\x40\x00\x00\x00\x00\x00\x00\x00{")
    return model


@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.jsonl", "nowhere.jsonl cannot be read (No such file or directory)"),
        ("*.jsonl", "no file matches"),
        ("model", "is a folder"),
        ("rows.parquet", "is not a Parquet file"),
        ("rows.doc", "unknown kind of file"),
    ],
)
def test_bad_inputs_are_refused_before_torch_is_imported(tmp_path: Path, command: str, name: str, says: str) -> None:
    for other in ("rows.parquet", "rows.doc"):
        (tmp_path / other).write_text('{"text": "a"}\n')
    model = str(save_tiny("llama", tmp_path / "model"))
    arguments = [sys.executable, "-c", SCRIPT, command, name, "--model", model, "-o", "out.parquet"]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 4, done.stderr
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "rows.doc", "rows.parquet"]


@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", "no model folder"),
        ("no config", "no config.json"),
        ("half copied", "lacks 2 of its 2 weight files"),
        ("truncated", "model.safetensors"),
        ("mamba", "architecture mamba is not supported"),
    ],
)
def test_bad_models_are_refused_before_torch_is_imported(tmp_path: Path, command: str, kind: str, says: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    model = folder(tmp_path, kind)
    arguments = [command, str(tmp_path / "rows.jsonl"), "--model", str(model)]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True)
    assert done.returncode == 6, done.stderr
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir() if p.name not in ("rows.jsonl", "model")] == []
