"""Folders that cannot be loaded: each is rejected before weights are read, and the message names reason and remedy."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import load_file, save_file

from batchgen.errors import ModelError
from batchgen.models.check import check_model
from batchgen.models.checkpoint.safetensors_header import read_header
from tests.models.adapters import KINDS, save_adapter
from tests.models.loading import inspect_model, load_model
from tests.models.tiny import save_tiny

Change = Callable[[Path], object]


@pytest.fixture(scope="session")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny("llama", tmp_path_factory.mktemp("sharded"), max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def copy(source: Path, target: Path) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def configure(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        for key, value in changes.items():
            if value is ...:
                config.pop(key, None)
            else:
                config[key] = value
        (folder / "config.json").write_text(json.dumps(config))

    return change


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return rewrite


def cut(keep: float) -> Change:
    def truncate(folder: Path) -> None:
        file = folder / "model.safetensors"
        data = file.read_bytes()
        file.write_bytes(data[: int(len(data) * keep)])

    return truncate


def raw(data: bytes) -> Change:
    return lambda folder: (folder / "model.safetensors").write_bytes(data)


def header(entry: dict[str, Any], data: bytes = b"") -> Change:
    text = json.dumps(entry).encode()
    return raw(struct.pack("<Q", len(text)) + text + data)


def pair(*entries: dict[str, list[int]]) -> Change:
    """Two tensors of four bytes at these ranges."""
    parts = [
        f'"{name}": {{"dtype": "U8", "shape": [4], "data_offsets": {range_}}}'
        for entry in entries
        for name, range_ in entry.items()
    ]
    text = f"{{{', '.join(parts)}}}".encode()
    end = max(range_[1] for entry in entries for range_ in entry.values())
    return raw(struct.pack("<Q", len(text)) + text + b"\0" * end)


def only(name: str) -> Change:
    def replace(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / name)

    return replace


def append(data: bytes) -> Change:
    def grow(folder: Path) -> None:
        with (folder / "model.safetensors").open("ab") as file:
            file.write(data)

    return grow


BROKEN: dict[str, tuple[Change, str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config cut": (lambda f: (f / "config.json").write_text('{"model_ty'), "is not JSON"),
    "config not text": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "is not JSON"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), "must hold an object, and holds a list"),
    "no model_type": (configure(model_type=...), "names no model_type"),
    "unknown type": (configure(model_type="quokka"), "architecture quokka is not supported"),
    "needs code": (
        configure(model_type="quokka", auto_map={"AutoModel": "m.Q"}),
        "quokka needs code from its folder",
    ),
    "not a language model": (
        configure(architectures=["LlamaForTokenClassification"]),
        "not a causal language model",
    ),
    "encoder-decoder": (configure(model_type="t5", is_encoder_decoder=True), "t5 is an encoder-decoder"),
    "unknown decoder": (
        configure(model_type="new_vl", text_config={"model_type": "new_text"}),
        "new_text is not supported",
    ),
    "aqlm": (configure(quantization_config={"quant_method": "aqlm"}), "quantised .*aqlm"),
    "rope": (configure(rope_parameters={"rope_type": "linear", "rope_theta": 1.0}), "rope type 'linear' has a missing"),
    "no heads": (configure(num_attention_heads=None), "num_attention_heads must be a positive integer"),
    "odd heads": (configure(num_key_value_heads=3), "cannot share 3 kv heads"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    "pickles": (only("pytorch_model.bin"), "Convert it once"),
    "gguf": (only("model.gguf"), "GGUF"),
    "adapter": (only("adapter_config.json"), "is an adapter"),
    "empty file": (raw(b""), "holds 0 bytes"),
    "cut in the header": (cut(0.001), "ends inside its header"),
    "cut in the data": (cut(0.9), "of [0-9]+ bytes; a copy or download was probably interrupted"),
    "one byte short": (cut(0.999999), "of [0-9]+ bytes"),
    "bytes too many": (append(b"\0" * 8), "where its header describes"),
    "not safetensors": (raw(b"PK\x03\x04" + b"\xff" * 100), "does not begin with a safetensors header"),
    "git-lfs pointer": (raw(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"), "does not begin"),
    "header not JSON": (raw(struct.pack("<Q", 4) + b"@@@@"), "its header is not JSON"),
    "header a list": (raw(struct.pack("<Q", 2) + b"[]"), "its header must hold an object, and holds a list"),
    "entry wrong": (header({"a": {"dtype": "F32"}}), "header entry of a"),
    "offsets wrong": (
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"\0" * 4),
        "a has 4 bytes",
    ),
    "a name twice": (pair({"a": [0, 4]}, {"a": [4, 8]}), "its header is not JSON: the key 'a' occurs twice"),
    "bytes of two tensors": (pair({"a": [0, 4]}, {"b": [2, 6]}), "other tensors have bytes of b, by its header"),
    "the same bytes": (pair({"a": [0, 4]}, {"b": [0, 4]}), "other tensors have bytes of [ab], by its header"),
    "bytes between tensors": (pair({"a": [0, 4]}, {"b": [5, 9]}), "bytes of no tensor precede b, by its header"),
    "bytes before tensors": (pair({"a": [1, 5]}, {"b": [5, 9]}), "bytes of no tensor precede a, by its header"),
    "tensor missing": (weights(lambda t: t.pop("model.layers.1.mlp.up_proj.weight")), "lacks 1 of the 30"),
    "tensor misshapen": (
        weights(lambda t: t.update({"model.norm.weight": torch.ones(7)})),
        r"model.norm.weight has shape \[7\] where config.json calls for \[64\]",
    ),
    "tensor of integers": (
        weights(lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})),
        "stored as I8",
    ),
    "tensor unknown": (
        weights(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)})),
        "holds 1 tensors that a llama model .*q_proj.bias first",
    ),
    "config of another": (configure(num_hidden_layers=4), "lacks 9 of the 39"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folder_is_rejected(name: str, intact: Path, tmp_path: Path) -> None:
    change, words = BROKEN[name]
    change(copy(intact, tmp_path / "model"))
    with pytest.raises(ModelError, match=words) as caught:
        load_model(tmp_path / "model")
    assert caught.value.exit_code == 6
    assert "\n" not in str(caught.value)
    for other in (check_model, inspect_model):
        with pytest.raises(ModelError, match=words):
            other(tmp_path / "model")


@pytest.mark.parametrize("first", [(0, 4), (1, 5), (4, 8)])
@pytest.mark.parametrize("second", [(0, 4), (2, 6), (4, 8), (5, 9)])
def test_ranges_are_refused_where_the_formats_own_reader_refuses_them(
    first: tuple[int, int], second: tuple[int, int], tmp_path: Path
) -> None:
    pair({"a": [*first]}, {"b": [*second]})(tmp_path)
    file = tmp_path / "model.safetensors"
    accepted = []
    for read in (lambda: deserialize(file.read_bytes()), lambda: read_header(file)):
        try:
            read()
            accepted.append(True)
        except (SafetensorError, ModelError):
            accepted.append(False)
    assert accepted == [sorted([first, second]) == [(0, 4), (4, 8)]] * 2


def test_intact_folder_loads(intact: Path, sharded: Path) -> None:
    """The folders that the cases above damage can be loaded."""
    assert load_model(intact).spec.implementation == "native"
    assert load_model(sharded).spec.implementation == "native"


def remove_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def swap_shards(folder: Path) -> None:
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


def same_shards(folder: Path) -> None:
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    first.write_bytes(second.read_bytes())


SHARDS: dict[str, tuple[Change, str]] = {
    "shard missing": (remove_shard, "lacks .* first, which its index places in model-00002"),
    "shards swapped": (swap_shards, "lacks 10 of the 30 tensors .*, which its index places in model-0000"),
    "shard twice": (same_shards, "lacks .*, which its index places in model-00001"),
    "index not JSON": (lambda f: (f / "model.safetensors.index.json").write_text("{"), "is not an index"),
    "index empty": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "is not an index"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_broken_shards_are_rejected(name: str, sharded: Path, tmp_path: Path) -> None:
    change, words = SHARDS[name]
    change(copy(sharded, tmp_path / "model"))
    with pytest.raises(ModelError, match=words):
        load_model(tmp_path / "model")


def test_paths_without_a_folder_are_rejected(intact: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="is not a folder"):
        load_model(intact / "config.json")


def test_hub_ids_offline(intact: Path, tmp_path: Path) -> None:
    """Of the local cache, or unknown. In a separate process, because the library reads its settings when imported."""
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    copy(intact, snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    code = (
        "from batchgen.models.check import check_model\n"
        "from batchgen.errors import ModelError\n"
        "print(check_model('some/model').folder.path)\n"
        "try: check_model('unknown/nothing-at-all')\n"
        "except ModelError as error: print(error)\n"
    )
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=True)
    path, error = done.stdout.splitlines()
    assert path == str(snapshot)
    assert "There is no folder unknown/nothing-at-all" in error
    assert "HF_HUB_OFFLINE" in error


def test_check_imports_neither_torch_nor_transformers(intact: Path, tmp_path: Path) -> None:
    """Neither for a model with an adapter nor for a rejected one: errors come quickly from a cold start."""
    adapter = save_adapter(intact, tmp_path / "adapter", **KINDS["all"])
    change, _ = BROKEN["unknown type"]
    change(copy(intact, tmp_path / "model"))
    code = (
        "import sys\n"
        "from batchgen.models.check import check_model\n"
        "from batchgen.errors import ModelError\n"
        f"assert len(check_model({str(intact)!r}, lora=[('a', {str(adapter)!r})]).adapters[0].layers) == 21\n"
        f"try: check_model({str(tmp_path / 'model')!r})\n"
        "except ModelError: pass\n"
        "else: raise SystemExit('not refused')\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy'\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
