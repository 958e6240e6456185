"""Configuration of a GGUF file's model, as in the config.json of its checkpoint, from the file's metadata."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, Final

from batchgen.gguf.family import gguf_family
from batchgen.gguf.header import GgufHeader
from batchgen.gguf.metadata import Adjust, Metadata, decimal
from batchgen.gguf.recurrent import RECURRENT

_COMMON: Final = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}
_OPTIONAL: Final = {"feed_forward_length": "intermediate_size", "attention.head_count_kv": "num_key_value_heads"}
_FLOATS: Final = {"F32": "float32", "F64": "float32", "F16": "float16", "BF16": "bfloat16"}
_GEMMA3_PERIOD: Final = 6
_GEMMA3N_PERIOD: Final = 5
_PERIOD: Final = 4
"""Layers from one with full attention to the next, in Cohere 2, EXAONE 4 and Olmo 3."""
_SIGMOID: Final = 2
"""`expert_gating_func` of experts that are scored by sigmoid."""
_LARGEST_GEMMA: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the model of 27 billion parameters, which scales its queries by another size than its siblings."""
_MAVERICK_EXPERTS: Final = 128
"""Experts of the Llama 4 that does not normalise queries and keys."""
_UNROTATED: Final = 1e10
"""Factors from here on stop a rotary frequency."""


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """Contents of the config.json that the file's model would have.

    Raises:
        ModelError: the architecture is not supported, or a key is missing or has a value that it cannot have.
    """
    family = gguf_family(header)
    architecture = str(header.metadata["general.architecture"])
    read = Metadata(header, architecture)
    config: dict[str, Any] = {"model_type": family.model_type}
    config |= {name: read.integer(key) for key, name in _COMMON.items() if key not in family.varying}
    optional = {key: name for key, name in _OPTIONAL.items() if key not in family.varying}
    config |= {name: read.integer(key) for key, name in optional.items() if read.value(key) is not None}
    config |= {name: read.value(key) for key, name in family.keys.items() if read.value(key) is not None}
    if dense := family.keys.get("leading_dense_block_count"):
        config.setdefault(dense, 0)
    if config.get("sliding_window") == 0:
        config["sliding_window"] = None  # stated by models without a window
    config |= family.constants
    ends = {name.partition("blk.")[2].partition(".")[2] for name in header.tensors}
    config |= {name: tensor in ends for name, tensor in family.flags.items()}
    config["num_hidden_layers"] -= _draft_layers(read, config["num_hidden_layers"])
    if "num_attention_heads" in config:
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        config["head_dim"] = read.integer("rope.dimension_count") if family.latent else _head_dim(read, config)
        config["rope_parameters"] = _rope(read, config)
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["vocab_size"] = read.rows("token_embd.weight")
    config["dtype"] = _dtype(header)
    config |= _token_ids(header, config["vocab_size"])
    if architecture in _ADJUST:
        config |= _ADJUST[architecture](read, config)
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


def _dtype(header: GgufHeader) -> str:
    """The number format of most stored bytes; that of quantised ones is bfloat16, which they were made from."""
    sizes: Counter[str] = Counter()
    for entry in header.tensors.values():
        sizes[_FLOATS.get(entry.kind, "bfloat16")] += entry.nbytes
    return sizes.most_common(1)[0][0]


def _token_ids(header: GgufHeader, vocab: int) -> dict[str, Any]:
    """Special ids of the configuration: only those that the vocabulary has."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {name: header.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: value if type(value) is int and 0 <= value < vocab else None for name, value in ids.items()}


def _gemma2(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"query_pre_attn_scalar": _query_scale("gemma2", config)}


def _query_scale(architecture: str, config: Mapping[str, Any]) -> int:
    if config["num_hidden_layers"] == _LARGEST_GEMMA[architecture]:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _gemma3(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    theta = read.number("rope.freq_base_swa", 10_000.0)
    full = {**config["rope_parameters"], "rope_theta": read.number("rope.freq_base", 1_000_000.0)}
    return {
        "query_pre_attn_scalar": _query_scale("gemma3", config),
        "layer_types": _layer_types(read, config, _GEMMA3_PERIOD),
        "rope_parameters": _two_ropes(full, theta),
    }


def _windowed(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"layer_types": _layer_types(read, config, _PERIOD)}


def _layer_types(read: Metadata, config: Mapping[str, Any], period: int) -> list[str]:
    """Types of the layers: as listed, or full attention every `period` layers."""
    layers = config["num_hidden_layers"]
    pattern = read.value("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != layers or not all(type(slides) is bool for slides in pattern):
            raise read.wrong("attention.sliding_window_pattern", f"{layers} values true or false")
        return ["sliding_attention" if slides else "full_attention" for slides in pattern]
    every = read.integer("attention.sliding_window_pattern") if pattern is not None else period
    return ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]


def _phi3(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    original = config["rope_parameters"].get("original_max_position_embeddings")
    return {"original_max_position_embeddings": original or config["max_position_embeddings"]}


def _gpt_oss(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    if rope["rope_type"] != "yarn":
        return {}
    return {"rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, **rope}}


def _latent(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of the heads of multi-head latent attention, and rope settings."""
    form = "_mla" if read.value("attention.key_length_mla") is not None else ""
    rotated, rope = config["head_dim"], dict(config["rope_parameters"])
    settings = {
        "q_lora_rank": config.get("q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "num_key_value_heads": config["num_attention_heads"],
        "qk_nope_head_dim": read.integer(f"attention.key_length{form}") - rotated,
        "v_head_dim": read.integer(f"attention.value_length{form}"),
    }
    if settings["qk_nope_head_dim"] < 1:
        raise read.wrong(f"attention.key_length{form}", f"more than rope.dimension_count ({rotated})")
    if (multiplier := read.value("rope.scaling.yarn_log_multiplier")) is not None and rope["rope_type"] == "yarn":
        scale = decimal(10.0 * read.number("rope.scaling.yarn_log_multiplier", multiplier))
        settings["rope_parameters"] = {**rope, "mscale": scale, "mscale_all_dim": scale}
    return settings


def _deepseek(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of one of two generations: one scores experts by softmax, the other by sigmoid."""
    settings = _latent(read, config)
    scoring = read.value("expert_gating_func")
    if scoring is None and any(".exp_probs_b." in name for name in read.header.tensors):
        scoring = _SIGMOID  # GLM-4.7-Flash does not state it; only this generation corrects scores
    if scoring != _SIGMOID:
        groups = read.integer("expert_group_count") if "n_group" in config else 1
        method = "group_limited_greedy" if groups > 1 else "greedy"
        settings |= {"model_type": "deepseek_v2", "topk_method": method}
    return settings


def _mistral4(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Files need not state the scale of queries, which all models have."""
    settings = _latent(read, config)
    size = settings["qk_nope_head_dim"] + settings["qk_rope_head_dim"]
    rope = {
        **config["rope_parameters"], **settings.get("rope_parameters", {}),
        "partial_rotary_factor": settings["qk_rope_head_dim"] / size,
        "llama_4_scaling_beta": read.number("attention.temperature_scale", 0.1),
    }  # fmt: skip
    return {**settings, "head_dim": size, "rope_parameters": rope}


def _exaone4(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("sliding_window") is None:
        return {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    return _windowed(read, config)


def _two_ropes(full: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """Rope settings of layers with full attention, and plain ones of those with a window."""
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}


def _olmo2(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Olmo 3 is stored as Olmo 2 with a window."""
    if config.get("sliding_window") is None:
        return {}
    rope = config["rope_parameters"]
    return {
        "model_type": "olmo3",
        **_windowed(read, config),
        "rope_parameters": _two_ropes(rope, rope["rope_theta"]),
    }


def _llama4(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if read.value("attention.sliding_window") is not None:
        raise read.wrong("attention.sliding_window", "absent: attention in chunks of 8192 tokens is what is computed")
    dense = read.integer("feed_forward_length")
    return {"intermediate_size_mlp": dense, "use_qk_norm": config.get("num_local_experts") != _MAVERICK_EXPERTS}


def _mistral3(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Ministral 3 scales its queries by their positions; its predecessors are Mistral as `llama` has it."""
    rope = dict(config["rope_parameters"])
    if rope["rope_type"] == "yarn":
        scale = read.number("rope.scaling.yarn_log_multiplier", 1.0)
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    beta = read.number("attention.temperature_scale", 0.0)
    if not beta:
        return {"model_type": "mistral", "rope_parameters": rope, "sliding_window": None}
    if rope["rope_type"] != "yarn":
        raise read.wrong("rope.scaling.type", "yarn")
    return {"rope_parameters": {**rope, "llama_4_scaling_beta": beta}, "sliding_window": None}


def _gemma3n(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    scales = read.value("activation_sparsity_scale")
    layers = config["num_hidden_layers"]
    if not isinstance(scales, list) or len(scales) != layers or not all(type(scale) is float for scale in scales):
        raise read.wrong("activation_sparsity_scale", f"{layers} numbers")
    theta = read.number("rope.freq_base_swa", 10_000.0)
    return {
        # The file has the quantiles of the shares of activations that are cut off.
        "activation_sparsity_pattern": [round(NormalDist().cdf(scale), 6) for scale in scales],
        "laurel_rank": read.rows("blk.0.laurel_l.weight"),
        "vocab_size_per_layer_input": read.rows("per_layer_token_embd.weight"),
        "layer_types": _layer_types(read, config, _GEMMA3N_PERIOD),
        "rope_parameters": _two_ropes(config["rope_parameters"], theta),
    }


def _gemma4(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    types = _layer_types(read, config, _GEMMA3_PERIOD)
    heads, widths = read.layers("attention.head_count_kv", layers), read.layers("feed_forward_length", layers)
    windowed = types.index("sliding_attention") if "sliding_attention" in types else 0
    full = types.index("full_attention") if "full_attention" in types else 0
    factors = read.factors("rope_freqs") or [1.0]
    rope = {
        "rope_type": "proportional", "rope_theta": read.number("rope.freq_base", 1_000_000.0),
        "partial_rotary_factor": sum(factor < _UNROTATED for factor in factors) / len(factors),
    }  # fmt: skip
    inputs = read.value("embedding_length_per_layer_input") or 0
    return {
        "layer_types": types,
        "head_dim": read.integer("attention.key_length_swa"),
        "num_key_value_heads": heads[windowed],
        "num_global_key_value_heads": heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in read.header.tensors,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": len(set(widths)) > 1,
        "enable_moe_block": bool(config.get("num_experts")),
        "rope_parameters": _two_ropes(rope, read.number("rope.freq_base_swa", 10_000.0)),
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": read.rows("per_layer_token_embd.weight") if inputs else config["vocab_size"],
    }


def _minicpm(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Granite's computation; older files do not state the scales, which all models had in common then."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    common = {
        "embedding_multiplier": 12.0, "residual_multiplier": 1.4 / layers**0.5, "logits_scaling": hidden / 256,
        "attention_multiplier": config["head_dim"] ** -0.5,
    }  # fmt: skip
    return {name: value for name, value in common.items() if name not in config}


def _minicpm3(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    rotated = config["head_dim"]
    output = read.header.tensors.get("blk.0.attn_output.weight")
    columns = output.shape[1] if output is not None and len(output.shape) == 2 else 0
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": read.integer("attention.key_length") - rotated,
        "v_head_dim": columns // config["num_attention_heads"],
    }


def _chatglm(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    tensors = read.header.tensors
    return {"attention_bias": "blk.0.attn_qkv.bias" in tensors or "blk.0.attn_q.bias" in tensors}


def _gpt(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Names of the first GPT's configuration."""
    names = {
        "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
    }  # fmt: skip
    return {new: config[old] for new, old in names.items()} | {"n_inner": read.integer("feed_forward_length")}


def _starcoder(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_gpt(read, config), "multi_query": config["num_key_value_heads"] == 1}


def _granite(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The key about finetuning says whether there are rotated positions in this family."""
    if read.value("rope.scaling.finetuned") is False:
        raise read.wrong("rope.scaling.finetuned", "true: attention without positions is not computed")
    return {}


def _granitemoe(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    _granite(read, config)
    return {"model_type": "granitemoeshared"} if config.get("shared_intermediate_size") else {}


def _phimoe(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(config["rope_parameters"])
    if rope["rope_type"] == "longrope":
        scale = rope.pop("attention_factor", 1.0)
        rope |= {"short_mscale": scale, "long_mscale": scale}
    return {"lm_head_bias": "output.bias" in read.header.tensors, "rope_parameters": rope, **_phi3(read, config)}


_ADJUST: Final[Mapping[str, Adjust]] = {
    "gemma2": _gemma2, "gemma3": _gemma3, "gemma3n": _gemma3n, "gemma4": _gemma4, "cohere2": _windowed, "phi3": _phi3,
    "gpt-oss": _gpt_oss, "deepseek2": _deepseek, "exaone4": _exaone4, "olmo2": _olmo2, "llama4": _llama4,
    "mistral3": _mistral3, "minicpm": _minicpm, "minicpm3": _minicpm3, "chatglm": _chatglm,
    "gpt2": _gpt, "starcoder": _starcoder, "granite": _granite, "granitemoe": _granitemoe, "phimoe": _phimoe,
    "exaone-moe": _windowed, "afmoe": _windowed, "mistral4": _mistral4, **RECURRENT,
}  # fmt: skip
"""Architecture -> configuration that follows from several keys."""
