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
    "glm4_moe_lite": "deepseek2", "youtu": "deepseek2", "lfm2_moe": "lfm2moe", "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1", "nemotron_h": "nemotron_h_moe", "falcon_mamba": "mamba",
}  # fmt: skip
"""`model_type` -> architecture, where they differ."""
_PAIRED = frozenset(
    (
        "llama", "granite", "smollm3", "arcee", "granitemoe", "mistral3", "internlm2", "xverse", "minicpm", "olmo",
        "granitehybrid",
    )
)  # fmt: skip
"""Architectures whose q and k rows the converter reorders."""
_PLUS_ONE = frozenset(("gemma", "gemma2", "gemma3_text", "nemotron", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"))
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
    dim = getattr(config, "head_dim", None) or config.hidden_size // getattr(config, "num_attention_heads", 1)
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


def _kv_heads(config: Any) -> dict[str, Any]:
    """Heads of keys of each layer, none of recurrent ones."""
    heads = config.num_key_value_heads
    return {
        "attention.head_count_kv": [
            heads if "attention" in kind and "linear" not in kind else 0 for kind in config.layer_types
        ]
    }


def _ssm(kernel: str, state: str, rank: str, groups: str | None, channels: Callable[[Any], int]) -> Any:
    """Sizes of Mamba layers and of gated delta rules, from these fields."""

    def keys(config: Any) -> dict[str, Any]:
        named = {"conv_kernel": kernel, "state_size": state, "time_step_rank": rank, "group_count": groups}
        sizes = {f"ssm.{key}": getattr(config, name) for key, name in named.items() if name}
        return {**sizes, "ssm.inner_size": channels(config)}

    return keys


_DELTA = _ssm(
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_value_heads", "linear_num_key_heads",
    lambda config: config.linear_value_head_dim * config.linear_num_value_heads,
)  # fmt: skip
_LAYERS = ("mamba_d_conv", "mamba_d_state", "mamba_n_heads", "mamba_n_groups")


def _expanded(config: Any) -> int:
    return int(getattr(config, "mamba_expand", None) or config.expand) * int(config.hidden_size)


def _alone(config: Any) -> dict[str, Any]:
    """What the converter states of models without attention."""
    return {
        "attention.head_count": 0, "feed_forward_length": 0, "context_length": 1 << 20,
        "attention.layer_norm_epsilon": None, "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.key_length": None, "attention.value_length": None, "rope.dimension_count": None,
    }  # fmt: skip


def _lfm2(config: Any) -> dict[str, Any]:
    norms = {"attention.layer_norm_epsilon": None, "attention.layer_norm_rms_epsilon": config.norm_eps}
    return {**_kv_heads(config), **norms, "shortconv.l_cache": config.conv_L_cache}


def _nemotron_h(config: Any) -> dict[str, Any]:
    sizes = _ssm(
        "conv_kernel",
        "ssm_state_size",
        "mamba_num_heads",
        "n_groups",
        lambda config: config.mamba_num_heads * config.mamba_head_dim,
    )
    width = {"moe": config.moe_intermediate_size, "mlp": config.intermediate_size}
    return {
        **_kv_heads(config), **sizes(config),
        "feed_forward_length": [width.get(kind, 0) for kind in config.layers_block_type],
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "moe_latent_size": config.moe_latent_size,
    }  # fmt: skip


_MAMBA = _ssm("conv_kernel", "state_size", "time_step_rank", None, _expanded)
_MAMBA2 = _ssm("conv_kernel", "state_size", "num_heads", "n_groups", _expanded)
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
    "lfm2": _lfm2, "lfm2_moe": lambda config: {**_lfm2(config), "expert_gating_func": 2},
    "qwen3_next": _DELTA,
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), lambda config: {
        **_DELTA(config), "rope.dimension_sections": [*config.rope_parameters.get("mrope_section", [11, 11, 10]), 0],
    }),
    "granitemoehybrid": lambda config: {
        **_kv_heads(config), **_ssm(*_LAYERS, _expanded)(config), "rope.scaling.finetuned": False,
        "context_length": 1 << 20,
    },
    "falcon_h1": lambda config: {
        **_ssm(*_LAYERS, lambda config: config.mamba_d_ssm)(config), "embedding_scale": None,
    },
    "nemotron_h": _nemotron_h,
    "jamba": lambda config: {
        **_kv_heads(config), **_ssm("mamba_d_conv", "mamba_d_state", "mamba_dt_rank", None, _expanded)(config),
    },
    "mamba": lambda config: {**_MAMBA(config), **_alone(config)},
    "falcon_mamba": lambda config: {**_MAMBA(config), **_alone(config), "ssm.dt_b_c_rms": True},
    "mamba2": lambda config: {**_MAMBA2(config), **_alone(config)},
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
        if config.model_type in _PLUS_ONE and name.endswith("norm.weight") and ".linear_attn." not in name:
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
    if kind == "nemotron_h":
        name = name.replace("model.", "backbone.")
    if any(part in name for part in (".linear_attn.", ".mamba.", ".mixer.", ".conv.")) and ".experts." not in name:
        name, values = recurrent_tensor(name, values, config)
    if kind == "falcon_h1":
        values = values * _multipliers(name, config).reshape(-1, *[1] * (values.ndim - 1))
    if name.endswith("in_proj_qkvz.weight"):
        layer, heads = name.split(".")[2], config.linear_num_key_heads
        keys, rows = config.linear_key_head_dim, values.reshape(heads, -1, values.shape[1])
        ends = np.cumsum([keys, keys, (rows.shape[1] - 2 * keys) // 2])
        q, k, v, gate = (part.reshape(-1, values.shape[1]) for part in np.split(rows, ends, axis=1))
        return {f"blk.{layer}.attn_qkv.weight": np.concatenate((q, k, v)), f"blk.{layer}.attn_gate.weight": gate}
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
    if ".shared_mlp." in name and kind.startswith("granite"):
        layer, end = name.split(".")[2], "_shexp" if config.num_local_experts else ""
        if name.endswith("output_linear.weight"):
            return {f"blk.{layer}.ffn_down{end}.weight": values}
        gate, up = np.split(values, 2)
        return {f"blk.{layer}.ffn_gate{end}.weight": gate, f"blk.{layer}.ffn_up{end}.weight": up}
    if ".experts." in name and kind == "mistral4":
        return {f"{name}.weight": values}
    name = re.sub(r"(block_sparse_moe|feed_forward|mixer)\.experts", "mlp.experts", name).replace(
        "backbone.layers", "model.layers" if ".experts." in name else "backbone.layers"
    )
    if name.endswith("experts.gate_up_proj"):
        stem = name.removesuffix("gate_up_proj")
        gate, up = np.split(values, 2, axis=1)
        return {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
    if name.endswith(("experts.down_proj", "experts.up_proj")):
        return {f"{name}.weight": values}
    return {name: values}


def recurrent_tensor(name: str, values: np.ndarray, config: Any) -> tuple[str, np.ndarray]:
    """A tensor of a recurrent layer, and its name."""
    if ".linear_attn." in name and config.model_type != "qwen3_next":
        values = _tiled(name, values, config)
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        values = values.squeeze(1)
    if name.endswith("A_log"):
        values = -np.exp(values)
    groups = getattr(config, "mamba_n_groups", None) or getattr(config, "n_groups", None)
    if groups:  # Mamba-2
        if name.endswith((".A_log", ".D")):
            values = values.reshape(-1, 1)
        if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            values = values.reshape(groups, -1)
    return name.replace(".dt_bias", ".dt_proj.bias"), values


def _tiled(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """Value heads in the order of their places in the groups of key heads."""
    keys, heads, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    wide = ("in_proj_qkv.weight", "in_proj_z.weight", "conv1d.weight", "out_proj.weight")
    if not name.endswith((*wide, "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        return values
    channels = np.arange(heads * (size if name.endswith(wide) else 1))
    moved = channels.reshape(keys, heads // keys, -1).swapaxes(0, 1).reshape(-1)
    if name.endswith("out_proj.weight"):
        return values[:, moved]
    before = np.arange(len(values) - len(channels))
    return values[np.concatenate((before, len(before) + moved))]


def _multipliers(name: str, config: Any) -> np.ndarray:
    """Factors that the computation has, by rows of a weight."""
    whole = {
        "feed_forward.down_proj.weight": config.mlp_multipliers[1],
        "gate_proj.weight": config.mlp_multipliers[0],
        "k_proj.weight": config.key_multiplier * config.attention_in_multiplier,
        "q_proj.weight": config.attention_in_multiplier,
        "v_proj.weight": config.attention_in_multiplier,
        "o_proj.weight": config.attention_out_multiplier,
        "mamba.out_proj.weight": config.ssm_out_multiplier,
        "lm_head.weight": config.lm_head_multiplier,
        "embed_tokens.weight": config.embedding_multiplier,
    }
    if name.endswith("mamba.in_proj.weight"):
        states = config.mamba_n_groups * config.mamba_d_state
        sizes = (config.mamba_d_ssm, config.mamba_d_ssm, states, states, config.mamba_n_heads)
        return np.float32(config.ssm_in_multiplier) * np.repeat(config.ssm_multipliers, sizes).astype(np.float32)
    return np.float32(next((factor for end, factor in whole.items() if name.endswith(end)), 1.0))


_RENAMED = {
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
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
