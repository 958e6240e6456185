"""Folders as people have them: weights under other names run, and anything else is named for what it is."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchgen.errors import ModelError
from batchgen.models.base import ModelInput
from batchgen.models.check import check_model
from batchgen.models.library.probe import ProbeAttention
from tests.models.adapters import KINDS, save_adapter
from tests.models.loading import load_model
from tests.models.tiny import save_tiny

INDEX = "model.safetensors.index.json"


def rename(target: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors").rename(folder / target)


def without_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def variant_of_shards(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    for name in set(index["weight_map"].values()):
        (folder / name).rename(folder / name.replace("model-", "model.fp16-"))
    index["weight_map"] = {k: v.replace("model-", "model.fp16-") for k, v in index["weight_map"].items()}
    (folder / INDEX).unlink()
    (folder / "model.safetensors.index.fp16.json").write_text(json.dumps(index))


def next_to_an_adapter(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.bf16.safetensors")
    shutil.copy(folder / "model.bf16.safetensors", folder / "consolidated.safetensors")


RUN: dict[str, tuple[str, Callable[[Path], object]]] = {
    "variant": ("5GB", rename("model.fp16.safetensors")),
    "another name": ("5GB", rename("weights.safetensors")),
    "one shard of one": ("5GB", rename("model-00001-of-00001.safetensors")),
    "one shard of one from zero": ("5GB", rename("model-00000-of-00001.safetensors")),
    "next to the format of its maker": ("5GB", next_to_an_adapter),
    "shards without an index": ("100KB", without_index),
    "variant in shards": ("100KB", variant_of_shards),
}


def logits(folder: Path) -> torch.Tensor:
    model = load_model(folder, dtype="float32", device="cpu")
    at = torch.arange(5)
    return model.logits(model.hidden(ModelInput(at + 3, at, ProbeAttention())))


def index_of(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return found


def write_index(folder: Path, places: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def overlay(folder: Path) -> None:
    """Two tensors move to another file, and old copies of them stay."""
    names = [name for name in index_of(folder) if "norm" in name][:2]
    moved = {}
    for shard in {index_of(folder)[name] for name in names}:
        tensors = load_file(folder / shard)
        moved |= {name: tensors[name].clone() for name in names if name in tensors}
        save_file({name: value * 2 if name in names else value for name, value in tensors.items()}, folder / shard)
    save_file(moved, folder / "overlay.safetensors")
    write_index(folder, index_of(folder) | dict.fromkeys(names, "overlay.safetensors"))


def drafts_without_weights(folder: Path) -> None:
    """Layers that are not read are left out of a shard, and the whole file of others."""
    first = next(iter(index_of(folder).values()))
    drafts = {"model.mtp.layers.0.proj.weight": first, "model.mtp.norm.weight": "model-mtp.safetensors"}
    write_index(folder, index_of(folder) | drafts)


def stray(folder: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(3)}, folder / "model.safetensors")


def left_over_index(folder: Path) -> None:
    write_index(folder, {"model.norm.weight": "model-00001-of-00002.safetensors"})


def index_of_one_file(folder: Path) -> None:
    write_index(folder, dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors"))


RUN |= {
    "overlay": ("100KB", overlay),
    "drafts without weights": ("100KB", drafts_without_weights),
    "a stray file next to an index": ("100KB", stray),
    "an index whose files are gone": ("5GB", left_over_index),
    "an index of one file": ("5GB", index_of_one_file),
}


@pytest.mark.parametrize(("name", "model_type"), [*zip(RUN, cycle(("llama", "gemma2")), strict=False)])
def test_weights_under_other_names_run(name: str, model_type: str, tmp_path: Path) -> None:
    size, change = RUN[name]
    folder = save_tiny(model_type, tmp_path / "model", max_shard_size=size)
    expected = logits(folder)
    change(folder)
    assert torch.equal(logits(folder), expected)


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("a stray file next to an index", "/model.safetensors is not read: .*index.json names other files"),
        ("an index whose files are gone", "index.json is not read: no file that it names exists"),
        ("an index of one file", None),
        ("overlay", None),
    ],
)
def test_what_is_not_read_next_to_an_index_is_named(name: str, note: str | None, tmp_path: Path) -> None:
    size, change = RUN[name]
    change(folder := save_tiny("llama", tmp_path / "model", max_shard_size=size))
    found = check_model(folder).folder.note
    assert found is None if note is None else re.search(note, str(found))


def without_part(folder: Path) -> None:
    """A bias that the index names next to its stored weight."""
    places = index_of(folder)
    write_index(folder, places | {"model.layers.0.mlp.up_proj.bias": places["model.layers.0.mlp.up_proj.weight"]})


def placed_in(shard: str) -> Callable[[Path], object]:
    return lambda folder: write_index(folder, index_of(folder) | {"model.norm.weight": shard})


INDEXES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a part of a layer": (without_part, "lacks model.layers.0.mlp.up_proj.bias, a part .* its index places in model-0"),
    "a tensor that is read": (placed_in("other.safetensors"), "lacks 1 of the 30 .*, which its index places in other"),
    **{
        f"a path: {shard!r}": (placed_in(shard), "is not an index of weights .must name a file in the folder, without")
        for shard in ("../model.safetensors", "/etc/model.safetensors", "a/b.safetensors", "a\\b", "..", ".", "", "C:b")
    },
}


@pytest.mark.parametrize("name", INDEXES)
def test_indexes_that_cannot_be_followed_are_refused(name: str, tmp_path: Path) -> None:
    change, words = INDEXES[name]
    change(folder := save_tiny("llama", tmp_path / "model", max_shard_size="100KB"))
    with pytest.raises(ModelError, match=words) as caught:
        check_model(folder)
    assert caught.value.exit_code == 6


def test_kimi_k2_is_computed_as_deepseek_v3(tmp_path: Path) -> None:
    folder = save_tiny("deepseek_v3", tmp_path)
    expected = logits(folder)
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModel": "modeling_deepseek.DeepseekV3Model"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2", "auto_map": code}))
    assert torch.equal(logits(folder), expected)


def only(*names: str, content: bytes = b"{}") -> Callable[[Path], object]:
    """A folder that holds nothing but these files."""

    def change(folder: Path) -> None:
        for file in folder.iterdir():
            file.unlink()
        for name in names:
            (folder / name).write_bytes(content)

    return change


def weights_as(*names: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").unlink()
        for name in names:
            (folder / name).write_bytes(data)

    return change


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "many ggufs": (only(*(f"{i}.gguf" for i in range(9))), r"holds 9 GGUF models: 0.gguf, .*4.gguf, ...* Name one"),
    "adapter alone": (
        only("adapter_config.json", "adapter_model.safetensors", content=b'{"base_model_name_or_path": "some/base"}'),
        r"is an adapter, not a model: .* --model some/base --lora model=",
    ),
    "adapter of an unknown base": (only("adapter_config.json"), "is an adapter, not a model: .* --model BASE --lora"),
    "adapter that is damaged": (only("adapter_config.json", content=b"{"), "is an adapter, not a model"),
    "format of its maker": (only("consolidated.safetensors", "params.json"), "format of their maker .*Hugging Face"),
    "format of its maker with a configuration": (weights_as("consolidated.safetensors"), "format of their maker"),
    "pickles alone": (only("pytorch_model.bin"), "PyTorch pickles"),
    "nothing": (only("README.md"), "has no config.json"),
    "one shard of several": (
        weights_as("model-00002-of-00003.safetensors"),
        r"holds 1 of the 3 weight files .* lacks model-00001-of-00003.safetensors, model-00003-of-00003.safetensors",
    ),
    "two variants": (weights_as("model.fp16.safetensors", "model.fp32.safetensors"), "in several forms .*fp16.*fp32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_folders_are_named_for_what_they_are(name: str, tmp_path: Path) -> None:
    change, words = REFUSED[name]
    change(folder := save_tiny("llama", tmp_path / "model"))
    with pytest.raises(ModelError, match=words) as caught:
        check_model(folder)
    assert "\n" not in str(caught.value)


def test_an_adapter_that_peft_wrote(tmp_path: Path) -> None:
    adapter = save_adapter(save_tiny("llama", tmp_path / "base"), tmp_path / "fr", **KINDS["two"])
    with pytest.raises(ModelError, match=r"is an adapter, not a model"):
        check_model(adapter)
