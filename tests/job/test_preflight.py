"""Bad models and inputs are refused before torch and transformers are imported."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.runner import ended_before_torch
from tests.models.tiny import save_tiny


def folder(path: Path, kind: str) -> Path:
    model = path / kind
    if kind == "missing":
        return model
    model.mkdir(exist_ok=True)
    config = {"model_type": "rwkv" if kind == "rwkv" else "llama", "architectures": ["X"]}
    if kind != "no config":
        (model / "config.json").write_text(json.dumps(config))
    if kind == "half copied":
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    if kind == "rwkv":
        header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        content = len(header).to_bytes(8, "little") + header + bytes(4)
        (model / "model.safetensors").write_bytes(content)
    if kind == "truncated":
        (model / "model.safetensors").write_bytes(b"\x40\x00\x00\x00\x00\x00\x00\x00{")
    return model


INPUTS = {
    "nowhere.jsonl": "nowhere.jsonl cannot be read (No such file or directory)",
    "*.jsonl": "no file matches",
    "model": "is of an unknown kind. Name the files of the folder",
    "rows.parquet": "is not a Parquet file",
    "rows.doc": "unknown kind of file",
}
MODELS = {
    "missing": "no model folder",
    "no config": "no config.json",
    "half copied": "lacks 2 of its 2 weight files",
    "truncated": "model.safetensors",
    "rwkv": "architecture rwkv is not supported",
}


def test_bad_inputs_are_ended_before_torch_is_imported(tmp_path: Path) -> None:
    for other in ("rows.parquet", "rows.doc"):
        (tmp_path / other).write_text('{"text": "a"}\n')
    model = save_tiny("llama", tmp_path / "model")
    cases = [(command, name) for command in ("run", "check") for name in INPUTS]
    lines = [[command, name, "--model", model, "-o", "out.parquet"] for command, name in cases]
    for (_, name), done in zip(cases, ended_before_torch(lines, tmp_path), strict=True):
        assert done.code == 4, done.stderr
        assert INPUTS[name] in done.stderr
        assert done.stderr.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "rows.doc", "rows.parquet"]


def test_bad_models_are_ended_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "models").mkdir()
    cases = [(command, folder(tmp_path / "models", kind)) for kind in MODELS for command in ("run", "check")]
    lines = [[command, "rows.jsonl", "--model", model] for command, model in cases]
    for (_, model), done in zip(cases, ended_before_torch(lines, tmp_path), strict=True):
        assert done.code == 6, done.stderr
        assert MODELS[model.name] in done.stderr
        assert done.stderr.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["models", "rows.jsonl"]
