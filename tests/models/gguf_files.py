"""Writer of GGUF files for tests: tiny random checkpoints as llama.cpp's converter stores them.

Names come from the package's own table of names, values from its quantiser, so that the reader's tables are compared
with those of another hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from transformers import AutoTokenizer, PreTrainedModel

from tests.models.tiny import tiny_model

ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3",
    "cohere": "command-r", "phi": "phi2", "gpt_oss": "gpt-oss", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe", "hunyuan_v1_dense": "hunyuan-dense", "minimax_m2": "minimax-m2",
}  # fmt: skip
"""`model_type` -> architecture, where they differ."""
PAIRED = {"llama", "mistral", "mixtral", "granite", "smollm3", "arcee", "granitemoe"}
"""Types whose q and k rows the converter reorders."""
PLUS_ONE = {"gemma", "gemma2", "gemma3_text", "nemotron"}
"""Types to whose norms the converter adds one."""
_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale",
    "logits_scaling": "logit_scale",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "use_parallel_residual": "use_parallel_residual",
}
_NO_WINDOW = {"llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "starcoder2"}
"""Types whose window the converter does not write."""

_FLOATS = {Kind.F64: np.float64, Kind.F32: np.float32, Kind.F16: np.float16}
Choose = Callable[[str, Any], Kind]
"""Name and values of a tensor -> the type that it is stored as."""


def as_kind(kind: Kind) -> Choose:
    """Matrices in `kind`, vectors in float32."""
    return lambda _, values: kind if values.ndim > 1 else Kind.F32


AS_FLOAT32 = as_kind(Kind.F32)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    choose: Choose = AS_FLOAT32,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Write a model of transformers as a GGUF file.

    Args:
        path: the file.
        model: a model in float32.
        choose: how each tensor is stored.
        metadata: further keys, and other values of keys.
        extra: further tensors.
        options: of `gguf.GGUFWriter`, as for splitting.
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(str(path), architecture, **options)
    for key, value in {**_metadata(config, architecture), **(metadata or {})}.items():
        if key == "general.architecture":
            writer.kv_data[0][key].value = value
        else:
            _add(writer, key, value)
    for name, values in {**gguf_tensors(model, architecture), **(extra or {})}.items():
        kind = choose(name, values)
        if kind in _FLOATS:
            writer.add_tensor(name, values.astype(_FLOATS[kind]))
        else:
            data = values if values.dtype == np.uint8 else gguf.quants.quantize(values, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tiny(path: Path, model_type: str, *, config: Mapping[str, Any] | None = None, **options: Any) -> Path:
    """Write `tiny_model(model_type, **config)`; see `write_gguf`."""
    return write_gguf(path, tiny_model(model_type, **(config or {})), **options)


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _metadata(config: Any, architecture: str) -> dict[str, Any]:
    found = {key: getattr(config, name) for name, key in _KEYS.items() if getattr(config, name, None) is not None}
    if config.model_type in _NO_WINDOW:
        found.pop("attention.sliding_window", None)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found |= {"attention.key_length": dim, "attention.value_length": dim}
    found |= _latent(config) if architecture == "deepseek2" else {}
    if getattr(config, "n_routed_experts", None):
        found["expert_weights_norm"] = config.norm_topk_prob
    if config.model_type == "gpt_oss":
        found["expert_feed_forward_length"] = config.intermediate_size
    rope = getattr(config, "rope_parameters", None) or {}
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    found["rope.freq_base"] = float(rope.get("rope_theta", 10000.0))
    rotated = getattr(config, "qk_rope_head_dim", dim)
    found["rope.dimension_count"] = int(rotated * rope.get("partial_rotary_factor", 1.0))
    if rope.get("rope_type") == "yarn":
        found |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if local:
        found["rope.freq_base_swa"] = float(local["rope_theta"])
    if getattr(config, "layer_types", None) and architecture in ("gemma3", "cohere2", "exaone4"):
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    return {f"{architecture}.{key}": value for key, value in found.items()}


def _latent(config: Any) -> dict[str, Any]:
    """Sizes of multi-head latent attention: of the one head that is stored, and of those that it is expanded to."""
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "expert_gating_func": 2 if config.model_type == "deepseek_v3" else 1,
    }


def gguf_tensors(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """Tensors of a model by their names in GGUF, in float32."""
    config = model.config
    number = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    for name, tensor in _hub_tensors(model).items():
        target = names.get_name(name, (".weight", ".bias"))
        assert target is not None, f"the package gguf has no name for {name}"
        values = tensor
        if config.model_type in PAIRED and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if config.model_type in PLUS_ONE and name.endswith("norm.weight"):
            values = values + 1
        found[target] = np.ascontiguousarray(values)
    return found


def _hub_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Tensors by the names that the converter sees: one for all experts of a layer."""
    found: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if model.config.model_type == "gpt_oss" and ".experts." in name:
            stem, part = name.split("experts.")
            suffix = ".bias" if part.endswith("_bias") else ".weight"
            values = values if suffix == ".bias" else values.swapaxes(1, 2)
            if part.startswith("gate_up"):
                found[f"{stem}experts.gate_proj{suffix}"] = values[:, ::2]
                found[f"{stem}experts.up_proj{suffix}"] = values[:, 1::2]
            else:
                found[f"{stem}experts.down_proj{suffix}"] = values
        elif name.endswith("kv_b_proj.weight"):
            heads = values.reshape(model.config.num_attention_heads, -1, values.shape[1])
            nope = model.config.qk_nope_head_dim
            found[name.replace("kv_b_proj", "k_b_proj")] = heads[:, :nope].swapaxes(1, 2)
            found[name.replace("kv_b_proj", "v_b_proj")] = heads[:, nope:]
        elif name.endswith("block_sparse_moe.router.weight"):
            found[name.replace("router", "router.layer")] = values
        elif name.endswith("sinks"):
            found[f"{name}.weight"] = values
        elif name.endswith("e_score_correction_bias"):
            found[name.replace("_bias", ".bias")] = values
        elif name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj").replace("block_sparse_moe", "mlp")
            found[f"{stem}gate_proj.weight"], found[f"{stem}up_proj.weight"] = np.split(values, 2, axis=1)
        elif name.endswith("experts.down_proj"):
            found[f"{name.replace('block_sparse_moe', 'mlp')}.weight"] = values
        else:
            found[name] = values
    return found


def tokenizer_metadata(folder: Path, *, kind: str = "gpt2", pre: str | None = None, add_bos: bool) -> dict[str, Any]:
    """Metadata of the tokenizer of a Hugging Face folder, as the converter writes it.

    Args:
        folder: a folder with tokenizer.json and tokenizer_config.json.
        kind: `gpt2` for a byte-level vocabulary, `llama` for SentencePiece.
        pre: the name of the rule by which a byte-level vocabulary splits texts.
        add_bos: whether texts begin with BOS.
    """
    hf = AutoTokenizer.from_pretrained(folder)
    model = json.loads(hf.backend_tokenizer.to_str())["model"]
    ids = hf.backend_tokenizer.get_vocab(with_added_tokens=True)
    added = hf.backend_tokenizer.get_added_tokens_decoder()
    tokens, types = [f"[PAD{i}]" for i in range(max(ids.values()) + 1)], [5] * (max(ids.values()) + 1)
    for token, i in ids.items():
        is_byte = kind == "llama" and re.fullmatch(r"<0x[0-9A-F]{2}>", token) is not None
        tokens[i], types[i] = token, 6 if is_byte else 1
    for i, token in added.items():
        types[i] = 3 if token.special else 4
    if kind == "llama":
        types[hf.unk_token_id] = 2
    found = {
        "model": kind, "pre": pre, "tokens": tokens, "token_type": types, "add_bos_token": add_bos,
        "bos_token_id": hf.bos_token_id, "eos_token_id": hf.eos_token_id, "padding_token_id": hf.pad_token_id,
        "unknown_token_id": hf.unk_token_id,
    }  # fmt: skip
    if kind == "llama":
        # A vocabulary of SentencePiece lists its tokens in the order of its merges.
        found["scores"] = [float(-i) for i in range(len(tokens))]
    else:
        found["merges"] = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    metadata = {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}
    return metadata | ({"tokenizer.chat_template": hf.chat_template} if hf.chat_template else {})
