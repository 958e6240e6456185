"""Folders as people have them: weights under other names run, and anything else is named for what it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from batchgen.errors import ModelError
from batchgen.models.base import ModelInput
from batchgen.models.check import check_model
from batchgen.models.load import load_model
from batchgen.models.probe import ProbeAttention
from tests.models.adapters import KINDS, save_adapter
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


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
@pytest.mark.parametrize("name", RUN)
def test_weights_under_other_names_run(name: str, model_type: str, tmp_path: Path) -> None:
    size, change = RUN[name]
    folder = save_tiny(model_type, tmp_path / "model", max_shard_size=size)
    expected = logits(folder)
    change(folder)
    assert torch.equal(logits(folder), expected)


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
