"""Configuration of a GGUF file's model, as in the config.json of its checkpoint, from the file's metadata."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from batchgen.errors import ModelError
from batchgen.gguf.adjust import ADJUST
from batchgen.gguf.expert_families import MIXTRAL
from batchgen.gguf.families import FAMILIES
from batchgen.gguf.family import Family
from batchgen.gguf.header import GgufHeader
from batchgen.gguf.metadata import Metadata
from batchgen.gguf.refused import MISSING

_COMMON: Final = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}
_OPTIONAL: Final = {"feed_forward_length": "intermediate_size", "attention.head_count_kv": "num_key_value_heads"}
_FLOATS: Final = {"F32": "float32", "F64": "float32", "F16": "float16", "BF16": "bfloat16"}


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
        reason = MISSING.get(name, "batchgen does not know how its configuration and tensors are stored")
        remedy = "Use another model." if name in MISSING else "Use the checkpoint in safetensors form."
        raise ModelError(f"{header.path}: the GGUF architecture {name[:80]!r} is not supported: {reason}. {remedy}")
    if name == "llama" and header.metadata.get("llama.expert_count"):
        return MIXTRAL
    if name == "llama" and header.metadata.get("llama.attention.sliding_window"):
        keys = {**FAMILIES[name].keys, "attention.sliding_window": "sliding_window"}
        return replace(FAMILIES[name], model_type="mistral", keys=keys, flags={})
    if name == "glm4" and header.metadata.get("glm4.rope.dimension_sections"):
        return replace(FAMILIES[name], halved_rotary=True)  # the text part of GLM-4V
    return FAMILIES[name]


def gguf_config(header: GgufHeader, family: Family) -> dict[str, Any]:
    """Contents of the config.json that the file's model would have.

    Raises:
        ModelError: a key is missing or has a value that it cannot have.
    """
    architecture = str(header.metadata["general.architecture"])
    read = Metadata(header, architecture)
    config: dict[str, Any] = {"model_type": family.model_type}
    config |= {name: read.integer(key) for key, name in _COMMON.items()}
    optional = {key: name for key, name in _OPTIONAL.items() if key not in family.varying}
    config |= {name: read.integer(key) for key, name in optional.items() if read.value(key) is not None}
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config |= {name: read.value(key) for key, name in family.keys.items() if read.value(key) is not None}
    if dense := family.keys.get("leading_dense_block_count"):
        config.setdefault(dense, 0)
    if config.get("sliding_window") == 0:
        config["sliding_window"] = None  # stated by models without a window
    config |= family.constants
    config |= {name: f"blk.0.{tensor}" in header.tensors for name, tensor in family.flags.items()}
    config["num_hidden_layers"] -= _draft_layers(read, config["num_hidden_layers"])
    config["head_dim"] = read.integer("rope.dimension_count") if family.latent else _head_dim(read, config)
    config["rope_parameters"] = _rope(read, config)
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["vocab_size"] = _vocab_size(header)
    config["dtype"] = _dtype(header)
    config |= _token_ids(header, config["vocab_size"])
    if architecture in ADJUST:
        config |= ADJUST[architecture](read, config)
    read.check_all_read()
    return config


def _draft_layers(read: Metadata, layers: int) -> int:
    """Number of layers behind those of the model, which draft further tokens."""
    drafts = read.value("nextn_predict_layers")
    if drafts is None:
        return 0
    if type(drafts) is not int or not 0 <= drafts < layers:
        raise read.wrong("nextn_predict_layers", f"from 0 to {layers - 1}")
    return drafts


def _head_dim(read: Metadata, config: Mapping[str, Any]) -> int:
    if read.value("attention.key_length") is None:
        if config["hidden_size"] % config["num_attention_heads"]:
            raise read.wrong("attention.key_length", "a positive integer")
        return int(config["hidden_size"] // config["num_attention_heads"])
    head_dim = read.integer("attention.key_length")
    if read.value("attention.value_length") not in (None, head_dim):
        raise read.wrong("attention.value_length", f"as attention.key_length ({head_dim})")
    return head_dim


def _rope(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Rope settings; factors of frequencies are stored as tensors."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": read.number("rope.freq_base", 10_000.0)}
    rotated = read.integer("rope.dimension_count") if read.value("rope.dimension_count") is not None else None
    if rotated is not None:  # for all of a head, too: families have other defaults
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
        betas = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}
        rope |= {name: read.value(f"rope.scaling.{key}") for name, key in betas.items()}
        return {name: value for name, value in rope.items() if value is not None}
    if (factors := read.factors("rope_freqs")) is not None:
        # Llama 3's scaling, of which the file holds the results: one factor for each frequency, for all lengths.
        same = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        return {**rope, "rope_type": "longrope", **same, "original_max_position_embeddings": context}
    short, long = (read.factors(f"rope_factors_{name}") for name in ("short", "long"))
    if short is None or long is None:
        return rope
    attention = read.value("rope.scaling.attn_factor")
    rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    rope |= {} if attention is None else {"attention_factor": attention}
    return {**rope, "original_max_position_embeddings": original or context}


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
