"""Conversion of a Llama or Qwen 3 from safetensors to GGUF, without a tokenizer.

It runs under llama.cpp's interpreter, which has numpy and the package `gguf` but not torch.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_FAMILIES = {"llama": "llama", "qwen3": "qwen3"}
"""`model_type` -> architecture in the GGUF file."""
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP_LEVEL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(model: Path, path: Path, dtype: str) -> None:
    """Write `path` with matrices in `dtype` (float32, bfloat16 or float16) and vectors in float32.

    Raises:
        ValueError: the architecture or a tensor is not supported.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    family = _FAMILIES.get(config["model_type"])
    if family is None:
        raise ValueError(f"cannot convert model type {config['model_type']}; supported: {', '.join(_FAMILIES)}")
    writer = gguf.GGUFWriter(str(path), family)
    _write_shape(writer, config)
    kind = {
        "float32": gguf.GGMLQuantizationType.F32,
        "float16": gguf.GGMLQuantizationType.F16,
        "bfloat16": gguf.GGMLQuantizationType.BF16,
    }[dtype]
    for name, values in _tensors(model):
        target = gguf_name(name)
        if family == "llama" and ".attn_q." in target:
            values = interleaved(values, config["num_attention_heads"])
        elif family == "llama" and ".attn_k." in target:
            values = interleaved(values, config["num_key_value_heads"])
        if values.ndim == 1 or kind is gguf.GGMLQuantizationType.F32:
            writer.add_tensor(target, values)
        else:
            writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: Any, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    if (config.get("rope_scaling") or rope.get("rope_type", "default")) not in (None, "default"):
        raise ValueError("cannot convert a model with scaled rotary embeddings")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def gguf_name(name: str) -> str:
    """GGUF name of a Hugging Face tensor.

    Raises:
        ValueError: the tensor is not supported.
    """
    stem, _, suffix = name.rpartition(".")
    if suffix == "weight" and stem in _TOP_LEVEL_NAMES:
        return f"{_TOP_LEVEL_NAMES[stem]}.weight"
    _, _, rest = stem.partition("model.layers.")
    layer, _, part = rest.partition(".")
    if suffix != "weight" or part not in _LAYER_NAMES:
        raise ValueError(f"cannot convert the tensor {name}")
    return f"blk.{layer}.{_LAYER_NAMES[part]}.weight"


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection [N * D, H], reordered from rotary embeddings of half heads to those of adjacent pairs."""
    rows, width = values.shape
    return values.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def _tensors(model: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(name, float32 values) of every tensor in the folder's safetensors files."""
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            begin = 8 + int.from_bytes(data[:8], "little")
            header = json.loads(data[8:begin])
            for name, info in header.items():
                if name != "__metadata__":
                    low, high = info["data_offsets"]
                    yield name, _float32(data[begin + low : begin + high], info["dtype"]).reshape(info["shape"])


def _float32(data: bytes, kind: str) -> np.ndarray:
    if kind == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[kind]).astype(np.float32)
