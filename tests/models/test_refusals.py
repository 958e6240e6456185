"""Architectures that the transformers path cannot run are rejected, most of them before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from batchgen.errors import ModelError
from batchgen.models import architectures
from batchgen.models.check import check_model
from tests.models.adapters import KINDS, save_adapter
from tests.models.loading import inspect_model, load_model
from tests.models.tiny import save_tiny, tiny_config

torch.set_num_threads(1)


LISTED = sorted(architectures._UNSUPPORTED)


def bare_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", LISTED)
def test_types_that_no_forward_tells_of_are_refused_by_name(name: str, tmp_path: Path) -> None:
    assert name in architectures.causal_lm_types() | set(architectures.packed_types())
    with pytest.raises(ModelError, match=f"The architecture {name} is not supported: "):
        check_model(bare_folder(tmp_path, model_type=name))


def test_types_are_read_from_the_library() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert architectures.causal_lm_types() == frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({"n_head": 4, "n_layer": 2}, "does not go through the attention interface"),
    "qwen3": ({"layer_types": ["linear_attention"] * 3}, "KeyError: 'linear_attention'"),
    "doge": ({}, "passes its own mask to attention"),
    "hrm_text": ({"prefix_lm": True}, "the tokens of a prompt see one another"),
    "bert": ({}, "sees later tokens too, as an encoder does"),
    "inkling_text": ({}, "passes position_bias to attention"),
    "sarvam_mla": ({"num_key_value_heads": 2}, "has 4 query heads of size 24 for 4 key heads of size 24, 2 per"),
    "phimoe": ({"sliding_window": 5}, "does not pass its window of 5 tokens to attention"),
    "camembert": ({"is_decoder": True}, "logits differ"),
}
"""Type -> values of its tiny configuration, and why it is refused."""


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_what_the_code_of_the_library_does(name: str, tmp_path: Path) -> None:
    """It shows in the forward on the meta device, before weights are read, or in the comparison after loading."""
    overrides, words = REFUSED[name]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config(name, **overrides)).save_pretrained(tmp_path)
    reads = [load_model] if "logits" in words else [load_model, inspect_model]
    for read in reads:
        with pytest.raises(ModelError, match=words):
            read(tmp_path, dtype="float32", device="cpu", max_model_len=64)


def test_a_state_of_size_0_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    save_tiny("mamba", tmp_path, num_hidden_layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "state_size": 0}))
    with pytest.raises(ModelError, match="mamba is not supported: a recurrent layer has a state of size 0"):
        inspect_model(tmp_path, dtype="float32", device="cpu")


BROKEN_VALUES: list[dict[str, Any]] = [
    {"num_hidden_layers": -1},
    {"num_hidden_layers": "three"},
    {"num_attention_heads": 0},
    {"num_key_value_heads": 3},
    {"num_key_value_heads": 0},
    {"hidden_size": 63},
    {"head_dim": 15},
    {"vocab_size": None},
    {"hidden_act": "quadratic"},
    {"max_position_embeddings": "long"},
    {"layer_types": ["full_attention"]},
    {"layer_types": [7, None, {}]},
    {"rope_parameters": [1]},
    {"rope_parameters": {"rope_type": "yarn"}},
    {"pad_token_id": 10**6},
    {"tie_word_embeddings": "perhaps"},
    {"sliding_window": "narrow"},
    {"dtype": "float13"},
]


def refusal(read: Callable[..., object], folder: Path) -> str | None:
    try:
        read(folder, implementation="transformers", dtype="float32", device="cpu")
    except ModelError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", ["olmo2", "deepseek_v3"])
@pytest.mark.parametrize("values", BROKEN_VALUES, ids=str)
def test_values_that_the_library_stumbles_over(name: str, values: dict[str, Any], tmp_path: Path) -> None:
    """Whatever its code raises is one line that names the model; no value ends in an internal error."""
    save_tiny(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | values))
    for read in (inspect_model, load_model):
        message = refusal(read, tmp_path)
        assert message is None or (message.endswith(".") and "\n" not in message)


def test_missing_weights_of_a_library_model_are_rejected(tmp_path: Path) -> None:
    save_tiny("gemma2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing_keys: model.layers.1.mlp.up_proj.weight"):
        load_model(tmp_path, dtype="float32", device="cpu")


def test_an_adapter_in_the_folder_of_a_library_model_is_rejected(tmp_path: Path) -> None:
    """The library would apply it to every row, if peft is installed. The native decoder does not read it."""
    save_adapter(save_tiny("llama", tmp_path), tmp_path, **KINDS["two"])
    with pytest.raises(ModelError, match=r"also holds an adapter \(adapter_config.json\)"):
        load_model(tmp_path, implementation="transformers", dtype="float32", device="cpu")
    assert load_model(tmp_path, implementation="native", dtype="float32", device="cpu").spec.adapters == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 100}, r"mismatched_keys: .*down_proj.weight"),
        ({"hidden_size": "wide"}, "cannot read"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "'spiral'"),
    ],
)
def test_wrong_configurations_of_a_library_model_are_rejected(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_tiny("gemma2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path, dtype="float32", device="cpu")
