"""What whole jobs need: checkpoints of random weights with a tokenizer, adapters, and engines on the device."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from batchgen.engine.engine import Engine
from batchgen.request.completion import Completion
from tests.engine.sampling.grammar_model import VOCAB, save_grammar_tokenizer
from tests.gpu.device import Gpu
from tests.models.tiny import save_tiny

__all__ = ["VOCAB", "checkpoint", "engine_on", "finished"]

_PROJECTIONS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
_RANK = 4


@contextmanager
def checkpoint(
    family: str,
    *,
    hidden: int,
    layers: int,
    dtype: torch.dtype,
    context: int = 1024,
    adapters: Sequence[str] = (),
    **fields: Any,
) -> Iterator[tuple[str, dict[str, str]]]:
    """Folder of a random model, and of each named adapter, until the block ends.

    Args:
        family: a `model_type`.
        hidden: hidden size.
        layers: number of layers.
        dtype: dtype of the stored weights.
        context: context length.
        adapters: names of LoRA adapters, for a model of the native decoder.
        fields: further values of the configuration.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        _save_checkpoint(folder, family, hidden, layers, dtype, context, fields)
        yield str(folder), {x: _save_adapter(folder, Path(name) / x, seed) for seed, x in enumerate(adapters)}


def engine_on(gpu: Gpu, folder: str, **options: Any) -> Engine:
    """An engine on the device with Triton's attention; in a toy run in float32 on the CPU with PyTorch's."""
    cpu = {"device": "cpu", "attention": "torch", "dtype": "float32"}
    return Engine(folder, **{**options, **cpu} if gpu.toy else {"device": "cuda", "attention": "triton", **options})


def finished(engine: Engine, rows: Sequence[Mapping[str, Any]]) -> list[Completion]:
    """The job's completions, in order."""
    return sorted(engine.generate(rows), key=lambda done: done.key)


def _save_checkpoint(
    folder: Path, family: str, hidden: int, layers: int, dtype: torch.dtype, context: int, fields: Mapping[str, Any]
) -> None:
    """Heads of 64 (16 where `hidden` is below 128), and half as many for keys."""
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
        **fields,
    )
    save_grammar_tokenizer(folder)


def _save_adapter(base: Path, folder: Path, seed: int) -> str:
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
    return str(folder)
