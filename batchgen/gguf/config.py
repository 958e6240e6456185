"""Configuration of a GGUF file's model, as in the config.json of its checkpoint, from the file's metadata."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from batchgen.errors import ModelError
from batchgen.gguf.families import FAMILIES, MIXTRAL, Family
from batchgen.gguf.header import GgufHeader
from batchgen.gguf.tensors import dequantised

_COMMON: Final = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}
_OPTIONAL: Final = {"feed_forward_length": "intermediate_size", "attention.head_count_kv": "num_key_value_heads"}
_FLOATS: Final = {"F32": "float32", "F64": "float32", "F16": "float16", "BF16": "bfloat16"}
_MOST_FACTORS: Final = 4096
"""Most factors of rotary frequencies, a half of the largest head size."""
_GEMMA3_PERIOD: Final = 6
_COHERE2_PERIOD: Final = 4
_EXAONE4_PERIOD: Final = 4
_SIGMOID: Final = 2
"""`expert_gating_func` of experts that are scored by sigmoid."""
_LARGEST_GEMMA: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the model of 27 billion parameters, which scales its queries by another size than its siblings."""


class _Metadata:
    """Typed access to the keys of one architecture."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.header = header
        self._architecture = architecture

    def value(self, key: str) -> Any:
        """The value of a key; None if it is absent. A list with equal entries, one for each layer, is its entry."""
        value = self.header.metadata.get(f"{self._architecture}.{key}")
        if isinstance(value, list) and value and key in (*_COMMON, *_OPTIONAL):
            if len(set(map(str, value))) > 1:
                raise ModelError(
                    f"{self.header.path}: the layers differ in {self._architecture}.{key}, which is not supported. "
                    "Use another model."
                )
            value = value[0]
        return decimal(value) if type(value) is float else value

    def integer(self, key: str) -> int:
        """A positive integer."""
        value = self.value(key)
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise self.wrong(key, "a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number."""
        value = self.value(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.wrong(key, "a number")
        return float(value)

    def wrong(self, key: str, wanted: str) -> ModelError:
        """The error for a value that is not what it must be."""
        found = f"{self.value(key)!r}"[:80] if self.value(key) is not None else "nothing"
        return ModelError(
            f"{self.header.path}: {self._architecture}.{key} must be {wanted}, got {found}. Copy the file again."
        )


def gguf_family(header: GgufHeader) -> Family:
    """What is known of the file's architecture.

    Raises:
        ModelError: it is not supported, or the file holds no language model.
    """
    name = header.metadata.get("general.architecture")
    kind = header.metadata.get("general.type", "model")
    if not isinstance(name, str) or kind not in ("model", None):
        what = f"a file of type {kind}" if isinstance(kind, str) and kind != "model" else "names no architecture"
        raise ModelError(f"{header.path} holds no language model: {what}. Name the file with the text model.")
    if name not in FAMILIES:
        raise ModelError(
            f"{header.path}: the GGUF architecture {name[:80]!r} is not supported: batchgen does not know how its "
            "configuration and tensors are stored. Use the checkpoint in safetensors form."
        )
    if name == "llama" and header.metadata.get("llama.expert_count"):
        return MIXTRAL
    if name == "llama" and header.metadata.get("llama.attention.sliding_window"):
        keys = {**FAMILIES[name].keys, "attention.sliding_window": "sliding_window"}
        return replace(FAMILIES[name], model_type="mistral", keys=keys, flags={})
    return FAMILIES[name]


def gguf_config(header: GgufHeader, family: Family) -> dict[str, Any]:
    """Contents of the config.json that the file's model would have.

    Raises:
        ModelError: a key is missing or has a value that it cannot have.
    """
    architecture = str(header.metadata["general.architecture"])
    read = _Metadata(header, architecture)
    config: dict[str, Any] = {"model_type": family.model_type}
    config |= {name: read.integer(key) for key, name in _COMMON.items()}
    config |= {name: read.integer(key) for key, name in _OPTIONAL.items() if read.value(key) is not None}
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config |= {name: read.value(key) for key, name in family.keys.items() if read.value(key) is not None}
    config |= family.constants
    config |= {name: f"blk.0.{tensor}" in header.tensors for name, tensor in family.flags.items()}
    config["num_hidden_layers"] -= _draft_layers(read, config["num_hidden_layers"])
    config["head_dim"] = read.integer("rope.dimension_count") if family.latent else _head_dim(read, config)
    config["rope_parameters"] = _rope(read, config)
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["vocab_size"] = _vocab_size(header)
    config["dtype"] = _dtype(header)
    config |= _token_ids(header, config["vocab_size"])
    if family.model_type in _ADJUST:
        config |= _ADJUST[family.model_type](read, config)
    return config


def _draft_layers(read: _Metadata, layers: int) -> int:
    """Number of layers behind those of the model, which draft further tokens."""
    drafts = read.value("nextn_predict_layers")
    if drafts is None:
        return 0
    if type(drafts) is not int or not 0 <= drafts < layers:
        raise read.wrong("nextn_predict_layers", f"from 0 to {layers - 1}")
    return drafts


def _head_dim(read: _Metadata, config: Mapping[str, Any]) -> int:
    if read.value("attention.key_length") is None:
        if config["hidden_size"] % config["num_attention_heads"]:
            raise read.wrong("attention.key_length", "a positive integer")
        return int(config["hidden_size"] // config["num_attention_heads"])
    head_dim = read.integer("attention.key_length")
    if read.value("attention.value_length") not in (None, head_dim):
        raise read.wrong("attention.value_length", f"as attention.key_length ({head_dim})")
    return head_dim


def _rope(read: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Rope settings; factors of frequencies are stored as tensors."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": read.number("rope.freq_base", 10_000.0)}
    rotated = read.integer("rope.dimension_count") if read.value("rope.dimension_count") is not None else None
    if rotated not in (None, config["head_dim"]):
        rope["partial_rotary_factor"] = rotated / config["head_dim"]
    kind = read.value("rope.scaling.type")
    context = config["max_position_embeddings"]
    original = read.value("rope.scaling.original_context_length")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": read.number("rope.scaling.factor", 1.0)}
    elif kind not in (None, "none", "longrope"):
        raise read.wrong("rope.scaling.type", "none, linear, yarn or longrope")
    if kind == "yarn":
        rope["original_max_position_embeddings"] = original or context
        betas = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        rope |= {name: read.value(f"rope.scaling.{key}") for name, key in betas.items()}
        return {name: value for name, value in rope.items() if value is not None}
    if (factors := _factors(read.header, "rope_freqs")) is not None:
        # Llama 3's scaling, of which the file holds the results: one factor for each frequency, for all lengths.
        same = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        return {**rope, "rope_type": "longrope", **same, "original_max_position_embeddings": context}
    short, long = (_factors(read.header, f"rope_factors_{name}") for name in ("short", "long"))
    if short is None or long is None:
        return rope
    attention = read.value("rope.scaling.attn_factor")
    rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    rope |= {} if attention is None else {"attention_factor": attention}
    return {**rope, "original_max_position_embeddings": original or context}


def _factors(header: GgufHeader, name: str) -> list[float] | None:
    """The values of a small float32 tensor; None if there is none."""
    entry = header.tensors.get(f"{name}.weight") or header.tensors.get(f"blk.0.{name}.weight")
    if entry is None:
        return None
    if entry.kind != "F32" or len(entry.shape) != 1 or entry.shape[0] > _MOST_FACTORS:
        raise ModelError(f"{header.path}: {name} must be at most {_MOST_FACTORS} float32 values. Copy the file again.")
    try:
        with entry.file.open("rb") as stream:
            stream.seek(entry.start)
            data = stream.read(entry.nbytes)
    except OSError as error:
        raise ModelError(f"Cannot read {entry.file}: {error.strerror or error}.") from None
    values = dequantised(data, entry.kind)
    if len(values) != entry.shape[0] or not np.isfinite(values).all() or (values == 0).any():
        raise ModelError(f"{header.path}: {name} must hold finite factors other than 0. Copy the file again.")
    return [decimal(float(value)) for value in values]


def decimal(value: float) -> float:
    """The shortest decimal fraction that is `value` in float32, as it was in the checkpoint's config.json."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value))) if math.isfinite(value) else value


def _vocab_size(header: GgufHeader) -> int:
    entry = header.tensors.get("token_embd.weight")
    if entry is None or len(entry.shape) != 2:
        raise ModelError(f"{header.path} holds no token_embd.weight with two axes. Copy the file again.")
    return entry.shape[0]


def _dtype(header: GgufHeader) -> str:
    """The number format of most stored bytes; that of quantised ones is bfloat16, which they were made from."""
    sizes: Counter[str] = Counter()
    for entry in header.tensors.values():
        sizes[_FLOATS.get(entry.kind, "bfloat16")] += entry.nbytes
    return sizes.most_common(1)[0][0]


def _token_ids(header: GgufHeader, vocab: int) -> dict[str, Any]:
    """Special ids of the configuration: only those that the vocabulary has."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: header.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: value if type(value) is int and 0 <= value < vocab else None for name, value in found.items()}


def _gemma2(read: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"query_pre_attn_scalar": _query_scale("gemma2", config)}


def _query_scale(architecture: str, config: Mapping[str, Any]) -> int:
    if config["num_hidden_layers"] == _LARGEST_GEMMA[architecture]:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _gemma3(read: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    theta = read.number("rope.freq_base_swa", 10_000.0)
    full = {**config["rope_parameters"], "rope_theta": read.number("rope.freq_base", 1_000_000.0)}
    return {
        "query_pre_attn_scalar": _query_scale("gemma3", config),
        "layer_types": _layer_types(read, config, _GEMMA3_PERIOD),
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
    }


def _cohere2(read: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"layer_types": _layer_types(read, config, _COHERE2_PERIOD)}


def _layer_types(read: _Metadata, config: Mapping[str, Any], period: int) -> list[str]:
    """Types of the layers: as listed, or full attention every `period` layers."""
    layers = config["num_hidden_layers"]
    pattern = read.value("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != layers or not all(type(slides) is bool for slides in pattern):
            raise read.wrong("attention.sliding_window_pattern", f"{layers} values true or false")
        return ["sliding_attention" if slides else "full_attention" for slides in pattern]
    every = read.integer("attention.sliding_window_pattern") if pattern is not None else period
    return ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]


def _phi3(read: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    original = config["rope_parameters"].get("original_max_position_embeddings")
    return {"original_max_position_embeddings": original or config["max_position_embeddings"]}


def _gpt_oss(read: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    if rope["rope_type"] != "yarn":
        return {}
    return {"rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, **rope}}


def _deepseek(read: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of the heads, and which of two generations it is: one scores experts by softmax, the other by sigmoid."""
    form = "_mla" if read.value("attention.key_length_mla") is not None else ""
    rotated, rope = config["qk_rope_head_dim"], dict(config["rope_parameters"])
    found = {
        "q_lora_rank": config.get("q_lora_rank"),
        "num_key_value_heads": config["num_attention_heads"],
        "qk_nope_head_dim": read.integer(f"attention.key_length{form}") - rotated,
        "v_head_dim": read.integer(f"attention.value_length{form}"),
    }
    if found["qk_nope_head_dim"] < 1:
        raise read.wrong(f"attention.key_length{form}", f"more than rope.dimension_count ({rotated})")
    if (multiplier := read.value("rope.scaling.yarn_log_multiplier")) is not None and rope["rope_type"] == "yarn":
        scale = decimal(10.0 * read.number("rope.scaling.yarn_log_multiplier", multiplier))
        found["rope_parameters"] = {**rope, "mscale": scale, "mscale_all_dim": scale}
    if read.value("expert_gating_func") != _SIGMOID:
        method = "group_limited_greedy" if config.get("n_group", 1) > 1 else "greedy"
        found |= {"model_type": "deepseek_v2", "topk_method": method}
    return found


def _exaone4(read: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("sliding_window") is None:
        return {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    return {"layer_types": _layer_types(read, config, _EXAONE4_PERIOD)}


_ADJUST: Final = {
    "gemma2": _gemma2, "gemma3_text": _gemma3, "cohere2": _cohere2, "phi3": _phi3, "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek, "exaone4": _exaone4,
}  # fmt: skip
"""`model_type` -> configuration that follows from several keys."""
