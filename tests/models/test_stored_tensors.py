"""Weights that a model would not read, or not read as they are meant, are refused by name on both paths."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchgen.errors import ModelError
from batchgen.models.architectures import Requested
from batchgen.models.check import check_model
from batchgen.models.checkpoint.stored_tensors import UNREAD
from tests.models.loading import inspect_model, load_model
from tests.models.tiny import save_tiny

Tensors = dict[str, torch.Tensor]
PATHS: list[tuple[str, Requested]] = [("llama", "native"), ("qwen3", "native"), ("llama", "transformers")]
LIBRARY = ("gemma2", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt2", "phi3", "gpt_oss")
IDS = [*PATHS, *((name, "transformers") for name in LIBRARY)]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny model of a type, made once."""
    root, found = tmp_path_factory.mktemp("tiny"), {}

    def make(name: str) -> Path:
        if name not in found:
            found[name] = save_tiny(name, root / name)
        return found[name]

    return make


def changed(source: Path, target: Path, change: Callable[[Tensors], object], **config: Any) -> Path:
    """A copy with other tensors and other values in config.json."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(values | config))
    return target


def inspect(folder: Path, path: Requested = "auto") -> None:
    inspect_model(folder, implementation=path, dtype="float32", device="cpu")


def fewer_layers(name: str) -> dict[str, Any]:
    return {"n_layer": 2} if name == "gpt2" else {"num_hidden_layers": 2}


@pytest.mark.parametrize(("name", "path"), IDS)
def test_config_of_fewer_layers(name: str, path: Requested, made: Callable[[str], Path], tmp_path: Path) -> None:
    inspect(made(name), path)
    listed = json.loads((made(name) / "config.json").read_text()).get("layer_types")
    types = {} if listed is None else {"layer_types": listed[:2]}
    folder = changed(made(name), tmp_path / "short", lambda _: None, **fewer_layers(name), **types)
    with pytest.raises(ModelError, match=r"weights of 3 layers, and its config.json has 2 .*\.2\..* would not be read"):
        inspect(folder, path)


@pytest.mark.parametrize(("name", "path"), IDS)
def test_tensor_of_no_module(name: str, path: Requested, made: Callable[[str], Path], tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary.gate": torch.ones(4)}
    folder = changed(made(name), tmp_path / "extra", lambda tensors: tensors.update(extra))
    with pytest.raises(ModelError, match=r"holds 1 tensors that a .* model of this config.json .*rotary.gate first"):
        inspect(folder, path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("name", "path"), [*PATHS, ("gemma2", "transformers")])
def test_dtype_that_nothing_explains(
    dtype: torch.dtype, name: str, path: Requested, made: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = changed(made(name), tmp_path / "odd", lambda tensors: tensors.update({UP: tensors[UP].to(dtype)}))
    with pytest.raises(ModelError, match=rf"{UP}.* stored as (I8|U8|I32|F8_E4M3|F8_E5M2)"):
        inspect(folder, path)


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv", "input_scale"])
def test_formats_that_config_does_not_name(scale: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    def quantise(tensors: Tensors) -> None:
        tensors[UP] = tensors[UP].to(torch.float8_e4m3fn)
        tensors[UP.replace("weight", scale)] = torch.ones(())

    folder = changed(made("llama"), tmp_path / "fp8", quantise)
    if scale == "input_scale":
        with pytest.raises(ModelError, match=r"up_proj.weight .* no scale for it"):
            check_model(folder)
        return
    assert "fp8, by its tensor" in str(check_model(folder).folder.quantisation)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert str(check_model(folder).folder.quantisation) == "modelopt FP8, by hf_quant_config.json"


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_scales_without_quantised_weights(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    extra = {UP.replace("weight", "weight_scale"): torch.ones(())}
    folder = changed(made(name), tmp_path / "scaled", lambda tensors: tensors.update(extra))
    with pytest.raises(ModelError, match=r"up_proj.weight_scale first"):
        inspect(folder)


HARMLESS: dict[str, dict[str, torch.Tensor]] = {
    "rotary embeddings": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
    "masks": {"model.layers.0.self_attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool)},
    "values of masks": {"model.layers.0.self_attn.masked_bias": torch.tensor(-1e4)},
    "positions": {"model.position_ids": torch.arange(8)[None]},
    "cache": {"model.layers.0.self_attn.k_scale": torch.ones(()), "model.layers.0.self_attn.v_scale": torch.ones(())},
    "drafts": {"mtp.layers.0.q_proj.weight": torch.ones(2, 2), "model.mtp_layers.0.norm.weight": torch.ones(2)},
    "a last layer that drafts": {
        "model.layers.3.eh_proj.weight": torch.ones(2, 4),
        "model.layers.3.self_attn.q_proj.weight": torch.ones(2, 2),
    },
    "training": {"v_head.summary.weight": torch.ones(1, 4)},
    "towers": {"vision_tower.a.weight": torch.ones(2), "multi_modal_projector.linear.weight": torch.ones(2, 2)},
}


@pytest.mark.parametrize(("name", "path"), [*PATHS[1:], ("gemma2", "transformers")])
def test_what_text_does_not_read(name: str, path: Requested, made: Callable[[str], Path], tmp_path: Path) -> None:
    assert len(HARMLESS) >= len(UNREAD)
    extra = {key: value for tensors in HARMLESS.values() for key, value in tensors.items()}
    folder = changed(made(name), tmp_path / "more", lambda tensors: tensors.update(extra))
    load_model(folder, implementation=path, dtype="float32", device="cpu")
    for key in ("model.layers.3.eh_proj.weight", "model.layers.0.self_attn.bias"):
        real = {key: torch.ones(4)} if "bias" in key else {key.replace("eh_proj", "mlp.up_proj"): torch.ones(4)}
        worse = {**extra, **real}
        worse.pop("model.layers.3.eh_proj.weight")
        odd = changed(made(name), tmp_path / key, lambda tensors, worse=worse: tensors.update(worse))
        with pytest.raises(ModelError, match=r"layers\.(3|0)\."):
            inspect(odd, path)
