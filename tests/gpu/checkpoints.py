"""Checkpoints for whole jobs: random weights of a native family, with a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.engine.sampling.grammar_model import VOCAB, save_grammar_tokenizer
from tests.models.tiny import save_tiny

__all__ = ["VOCAB", "save_adapter", "save_checkpoint"]

_PROJECTIONS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
_RANK = 4


def save_checkpoint(folder: Path, family: str, *, hidden: int, layers: int, dtype: torch.dtype, context: int) -> Path:
    """Write a model of `family` with heads of 64 (16 where `hidden` is below 128) and half as many for keys.

    Args:
        folder: the checkpoint's folder.
        family: a `model_type` of the native decoder.
        hidden: hidden size.
        layers: number of layers.
        dtype: dtype of the stored weights.
        context: context length.
    """
    dim = 16 if hidden < 128 else 64
    save_tiny(
        family,
        folder,
        dtype=dtype,
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // dim,
        num_key_value_heads=max(1, hidden // dim // 2),
        head_dim=dim,
        max_position_embeddings=context,
        initializer_range=1.6 * hidden**-0.5,
        use_sliding_window=False,
        sliding_window=None,
    )
    save_grammar_tokenizer(folder)
    return folder


def save_adapter(base: Path, folder: Path, seed: int) -> Path:
    """Write a LoRA adapter of the model in `base`, in peft's format, both matrices random."""
    config: dict[str, Any] = json.loads((base / "config.json").read_text(encoding="utf-8"))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    sizes = {"q_proj": (q, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    sizes |= {"gate_proj": (inner, hidden), "down_proj": (hidden, inner)}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name in _PROJECTIONS:
            outputs, inputs = sizes[name.rpartition(".")[2]]
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            down = torch.randn(_RANK, inputs, generator=generator) * inputs**-0.5
            tensors[f"{prefix}.lora_A.weight"] = down
            tensors[f"{prefix}.lora_B.weight"] = 0.3 * torch.randn(outputs, _RANK, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [name.rpartition(".")[2] for name in _PROJECTIONS]
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": _RANK, "lora_alpha": 2 * _RANK}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": targets, "bias": "none"}))
    return folder
