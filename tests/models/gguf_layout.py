"""What llama.cpp's converter makes of a checkpoint: metadata and tensors by their names in GGUF, for tests.

Names come from the package's own table of names, so that the reader's tables are compared with those of another hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedModel

ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3",
    "cohere": "command-r", "phi": "phi2", "gpt_oss": "gpt-oss", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe", "hunyuan_v1_dense": "hunyuan-dense", "minimax_m2": "minimax-m2", "llama4_text": "llama4",
    "ministral3": "mistral3", "gemma3n_text": "gemma3n", "gemma4_text": "gemma4", "hunyuan_v1_moe": "hunyuan-moe",
    "ernie4_5_moe": "ernie4_5-moe", "olmo3": "olmo2", "exaone_moe": "exaone-moe", "glm": "chatglm",
    "gpt_neox": "gptneox", "gpt_bigcode": "starcoder", "granitemoeshared": "granitemoe", "solar_open": "glm4moe",
    "glm4_moe_lite": "deepseek2", "youtu": "deepseek2",
}  # fmt: skip
"""`model_type` -> architecture, where they differ."""
_PAIRED = frozenset(
    (
        "llama", "granite", "smollm3", "arcee", "granitemoe", "mistral3", "internlm2", "xverse", "minicpm", "olmo",
    )
)  # fmt: skip
"""Architectures whose q and k rows the converter reorders."""
_PLUS_ONE = frozenset(("gemma", "gemma2", "gemma3_text", "nemotron"))
"""Types to whose norms the converter adds one."""
_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "n_inner": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "moe_num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "top_k_experts": "expert_used_count",
    "moe_k": "expert_used_count",
    "moe_topk": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "num_shared_experts": "expert_shared_count",
    "moe_num_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "route_scale": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "num_dense_layers": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "moe_layer_interval": "interleave_moe_layer_step",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "altup_active_idx": "altup.active_idx",
    "altup_num_inputs": "altup.num_inputs",
    "clip_qkv": "attention.clamp_kqv",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale",
    "logits_scaling": "logit_scale",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "use_parallel_residual": "use_parallel_residual",
}
_NO_WINDOW = frozenset(
    (
        "llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "starcoder2", "smollm3",
        "ministral3", "dots1",
    )
)  # fmt: skip
"""Types whose window the converter does not write."""
_PATTERNS = frozenset(("gemma3", "gemma3n", "gemma4", "cohere2", "exaone4", "exaone-moe", "olmo2"))
"""Architectures for which the converter lists the layers with a window."""


def gguf_metadata(config: Any, architecture: str) -> dict[str, Any]:
    """Metadata of a model by the keys in GGUF."""
    if config.model_type == "gemma4_text":
        config = deepcopy(config)
        config.allow_global_per_layer_attribute_access = True
    found = {key: getattr(config, name) for name, key in _KEYS.items() if getattr(config, name, None) is not None}
    if config.model_type in _NO_WINDOW:
        found.pop("attention.sliding_window", None)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found |= {"attention.key_length": dim, "attention.value_length": dim}
    found |= _latent(config) if architecture in ("deepseek2", "mistral4") else {}
    if getattr(config, "n_routed_experts", None):
        found["expert_weights_norm"] = config.norm_topk_prob
    rope = getattr(config, "rope_parameters", None) or {}
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    found["rope.freq_base"] = float(rope.get("rope_theta", 10000.0))
    rotated = int(dim * rope.get("partial_rotary_factor", 1.0))
    found["rope.dimension_count"] = getattr(config, "qk_rope_head_dim", rotated)
    if rope.get("rope_type") == "yarn":
        found |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if local:
        found["rope.freq_base_swa"] = float(local["rope_theta"])
    if getattr(config, "layer_types", None) and architecture in _PATTERNS and config.model_type != "olmo2":
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    if config.model_type in _SPECIAL:
        found |= _SPECIAL[config.model_type](config)
    return {f"{architecture}.{key}": value for key, value in found.items() if value is not None}


def _latent(config: Any) -> dict[str, Any]:
    """Sizes of multi-head latent attention: of the one head that is stored, and of those that it is expanded to."""
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "expert_gating_func": 1 if config.model_type == "deepseek_v2" else 2,
    }


def _llama4(config: Any) -> dict[str, Any]:
    dense = config.intermediate_size_mlp
    return {"feed_forward_length": dense, "expert_feed_forward_length": config.intermediate_size}


def _ministral3(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def _gemma3n(config: Any) -> dict[str, Any]:
    """The shares of activations that are cut off as quantiles; all layers are as wide."""
    scales = [NormalDist().inv_cdf(share) if share else -np.inf for share in config.activation_sparsity_pattern]
    return {"activation_sparsity_scale": [float(scale) for scale in scales]}


def _gemma4(config: Any) -> dict[str, Any]:
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    full = config.per_layer_config[windowed.index(False)]
    wide, shared = config.use_double_wide_mlp, config.num_hidden_layers - config.num_kv_shared_layers
    heads = [config.num_key_value_heads if slides else full.num_key_value_heads for slides in windowed]
    width = config.intermediate_size
    return {
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.head_count_kv": heads,
        "feed_forward_length": [width * (1 + (wide and i >= shared)) for i in range(len(windowed))] if wide else width,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": config.head_dim,
        "expert_count": config.num_experts if config.enable_moe_block else None,
    }


_SPECIAL: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "llama4_text": _llama4, "ministral3": _ministral3, "gemma3n_text": _gemma3n, "gemma4_text": _gemma4,
    "mistral4": lambda config: {
        "rope.scaling.yarn_log_multiplier": 0.1 * config.rope_parameters["mscale_all_dim"],
    },
    "gpt_oss": lambda config: {"expert_feed_forward_length": config.intermediate_size},
    "youtu": lambda config: {
        "leading_dense_block_count": config.num_hidden_layers, "expert_gating_func": None, "expert_shared_count": 0,
    },
    "glm4_moe_lite": lambda config: {"leading_dense_block_count": config.mlp_layer_types.count("dense")},
    "minicpm3": lambda config: {
        "logit_scale": None,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim, "attention.value_length": None,
    },
}  # fmt: skip
"""`model_type` -> keys that the converter writes otherwise."""


def gguf_tensors(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """Tensors of a model by their names in GGUF, in float32."""
    config = model.config
    usual = ARCHITECTURES.get(config.model_type, config.model_type)
    number = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == usual)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    for name, tensor in _hub_tensors(model).items():
        target = name if name.startswith("blk.") else names.get_name(name, (".weight", ".bias"))
        assert target is not None, f"the package gguf has no name for {name}"
        values = tensor
        if architecture in _PAIRED and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if config.model_type in _PLUS_ONE and name.endswith("norm.weight"):
            values = values + 1
        found[target] = np.ascontiguousarray(values)
    if config.model_type == "gemma4_text":
        rope = config.rope_parameters["full_attention"]
        half = config.per_layer_config[config.layer_types.index("full_attention")].head_dim // 2
        rotated = int(half * rope["partial_rotary_factor"])
        found["rope_freqs.weight"] = np.array([1.0] * rotated + [1e30] * (half - rotated), np.float32)
    return found


def fused(tensors: Mapping[str, np.ndarray], among: str = "attn_") -> dict[str, np.ndarray]:
    """q, k and v of each layer (or, among `_exps`, gate and up of its experts) as one tensor."""
    joined: dict[str, list[np.ndarray]] = {}
    for old in sorted(tensors, key=lambda name: (".attn_v." in name, ".attn_k." in name, "ffn_up_exps" in name)):
        new = re.sub(r"attn_[qkv]\.", "attn_qkv.", re.sub("ffn_(gate|up)_exps", "ffn_gate_up_exps", old))
        new = new if among in old else old
        joined.setdefault(new, []).append(tensors[old])
    return {name: np.concatenate(parts, axis=int("_exps" in name)) for name, parts in joined.items()}


def _hub_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Tensors by the names that the converter sees: one for all experts of a layer."""
    found: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            found |= _converted(name, tensor.float().numpy(), model.config)
    found = {name: values for name, values in found.items() if ".act_fn." not in name}
    for stem in ("model.altup_projections", "model.altup_unembed_projections"):
        if stacked := [found.pop(name) for name in sorted(found) if name.startswith(f"{stem}.")]:
            found[f"{stem}.weight"] = np.stack(stacked)
    return found


def xielu_lists(model: PreTrainedModel) -> dict[str, list[float]]:
    """Parameters of the activation, which the converter lists in the metadata."""
    state = model.state_dict()
    layers = range(model.config.num_hidden_layers)
    return {
        f"xielu.{key}": [float(state[f"model.layers.{i}.mlp.act_fn.{key}"]) for i in layers]
        for key in ("alpha_n", "alpha_p", "beta", "eps")
    }


def _converted(name: str, values: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """What the converter makes of one tensor of transformers."""
    kind = config.model_type
    if ".experts." in name and kind in ("gpt_oss", "llama4_text"):
        return _turned_experts(name, values, interleaved=kind == "gpt_oss")
    if kind == "gpt2" and values.ndim == 2 and ".h." in name:
        return {name: values.T}
    if kind == "gpt_neox" and "query_key_value" in name:
        heads = values.reshape(config.num_attention_heads, 3, -1, *values.shape[1:])
        return {name: heads.swapaxes(0, 1).reshape(values.shape)}
    if kind == "gemma4_text" and (found := _gemma4_router(name, values)) is not None:
        return found
    if name.endswith("kv_b_proj.weight") and kind != "minicpm3":
        heads = values.reshape(config.num_attention_heads, -1, values.shape[1])
        nope = config.qk_nope_head_dim
        return {
            name.replace("kv_b_proj", "k_b_proj"): heads[:, :nope].swapaxes(1, 2),
            name.replace("kv_b_proj", "v_b_proj"): heads[:, nope:],
        }
    if name.endswith("e_score_correction_bias"):
        return {name.replace("gate.moe_statics", "moe_statics").replace("_bias", ".bias"): values.reshape(-1)}
    for old, new in _RENAMED.items():
        if name.endswith(old):
            return {name.removesuffix(old) + new: values}
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = np.split(values, 2)
        layer = name.split(".")[2]
        return {f"blk.{layer}.ffn_gate_shexp.weight": gate, f"blk.{layer}.ffn_up_shexp.weight": up}
    if ".experts." in name and kind == "mistral4":
        return {f"{name}.weight": values}
    if name.endswith("experts.gate_up_proj"):
        stem = name.removesuffix("gate_up_proj").replace("block_sparse_moe", "mlp")
        gate, up = np.split(values, 2, axis=1)
        return {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
    if name.endswith("experts.down_proj"):
        return {f"{name.replace('block_sparse_moe', 'mlp')}.weight": values}
    return {name: values}


_RENAMED = {
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
    "shared_mlp.output_linear.weight": "shared_mlp.output_linear.weight",
    "sinks": "sinks.weight",
    "correct_output_scale": "correct_output_scale.weight",
    "layer_scalar": "layer_scalar.weight",
    "expert_bias": "expert_bias.bias",
    "mlp.router.weight": "block_sparse_moe.gate.weight",
}
"""Ends of names -> those that the converter looks up."""


def _turned_experts(name: str, values: np.ndarray, *, interleaved: bool) -> dict[str, np.ndarray]:
    """Experts whose matrices the checkpoint stores with their axes exchanged."""
    stem, part = name.split("experts.")
    suffix = ".bias" if part.endswith("_bias") else ".weight"
    values = values if suffix == ".bias" else values.swapaxes(1, 2)
    if not part.startswith("gate_up"):
        return {f"{stem}experts.down_proj{suffix}": values}
    gate, up = (values[:, ::2], values[:, 1::2]) if interleaved else np.split(values, 2, axis=1)
    return {f"{stem}experts.gate_proj{suffix}": gate, f"{stem}experts.up_proj{suffix}": up}


def _gemma4_router(name: str, values: np.ndarray) -> dict[str, np.ndarray] | None:
    """Scales, whose names end otherwise, and experts, which stay in one tensor."""
    layer = name.split(".")[2]
    if name.endswith("router.scale"):
        return {f"blk.{layer}.ffn_gate_inp.scale": values}
    if name.endswith("per_expert_scale"):
        return {f"blk.{layer}.ffn_down_exps.scale": values}
    return {f"{name}.weight": values} if ".experts." in name else None
