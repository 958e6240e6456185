"""Random LoRA adapters created by peft, and the logits that peft computes with them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

KINDS: dict[str, dict[str, Any]] = {
    "two": {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]},
    "all": {
        "r": 3,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": "all-linear",
        "rank_pattern": {"v_proj": 6, r"layers\.1\.mlp\.down_proj": 2},
        "alpha_pattern": {"o_proj": 9, r"layers\.0\.self_attn\.k_proj": 1},
    },
    "some": {"r": 2, "target_modules": ["gate_proj", "o_proj"], "layers_to_transform": [0, 2]},
    "regex": {"r": 5, "target_modules": r".*\.1\..*(up|k)_proj", "lora_alpha": 3},
}
"""Adapter configurations for models with Llama's projection names."""


def base_model(folder: Path) -> PreTrainedModel:
    """Load a model in transformers with eager attention in float32."""
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    finally:
        if bar:
            logging.enable_progress_bar()
    return model.eval()


def save_adapter(base: Path, folder: Path, seed: int = 0, **config: Any) -> Path:
    """Save an adapter of the model in `base` with random matrices, by peft; returns its folder."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft warns that it finds no model card on the hub, and when it corrects `fan_in_fan_out`.
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = get_peft_model(base_model(base), LoraConfig(task_type="CAUSAL_LM", **config))
        for name, weight in model.named_parameters():
            if "magnitude" in name or "modules_to_save" in name or "trainable_tokens" in name:
                weight.data += 0.15 * torch.randn_like(weight)
            elif "lora_" in name:
                torch.nn.init.normal_(weight, std=0.15)
        model.save_pretrained(folder)
    return folder


def _load(base: Path, adapter: Path) -> PeftModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(base_model(base), adapter).eval()


@torch.no_grad()
def adapted_logits(base: Path, adapter: Path | None, sequences: list[Tensor]) -> list[Tensor]:
    """Eager logits [n, V] of each sequence with an adapter, or without one if it is None."""
    model = base_model(base) if adapter is None else _load(base, adapter)
    return [model(ids[None]).logits[0] for ids in sequences]


def merge_adapter(base: Path, adapter: Path, folder: Path) -> Path:
    """Save the model with the adapter merged into its weights, by peft; returns its folder."""
    model = _load(base, adapter).merge_and_unload()
    model.save_pretrained(folder)
    for file in base.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of adapter_config.json."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(folder: Path, change: Any) -> None:
    """Rewrite adapter_model.safetensors by `change`, which takes and returns {name: tensor}."""
    file = folder / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
