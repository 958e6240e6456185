"""Small random checkpoints of many architectures, for all tests.

`tiny_config("gemma2")` is a configuration of hidden size 64 with two to four layers, windows of 5 tokens if the
architecture has windows, and weights large enough for distinct logits. `save_tiny("gemma2", folder)` writes it as a
Hugging Face folder. Everything is seeded: the same call gives the same weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

VOCAB = 256
WINDOW = 5

NATIVE_TYPES = ("llama", "mistral", "qwen2", "qwen3")

TYPES = (
    *NATIVE_TYPES,
    "gemma", "gemma2", "gemma3_text", "gpt_oss", "phi", "phi3", "olmo", "olmo2", "olmo3", "mixtral", "qwen2_moe",
    "qwen3_moe", "cohere", "cohere2", "granite", "starcoder2", "stablelm", "gpt_neox", "gpt2", "nemotron", "smollm3",
    "deepseek_v2", "deepseek_v3", "ernie4_5", "glm4", "helium",
)  # fmt: skip
"""Architectures tested on the transformers path."""

RECENT_TYPES = ("codegen", "gptj") if Version(transformers.__version__) >= Version("5.24") else ()
"""Types that use the attention interface only in recent versions of transformers."""
MORE_TYPES = (
    "afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "axk1", "beam", "biogpt", "bitnet", "cohere2_moe",
    "cwm", "dots1", "ernie4_5_moe", "exaone", "exaone4", "exaone_moe", "flex_olmo", "flint", "gemma4_text",
    "gemma4_unified_text", "glm", "glm4_moe", "glm4_moe_lite", "gpt_bigcode", "granite_swa", "granitemoe",
    "granitemoe_swa", "granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3",
    "iquestcoder", "jais2", "jetmoe", "kolibri1", "laguna", "llama4_text", "longcat_flash", "mellum", "mimo_v2_flash",
    "minicpm3", "minimax_m2", "ministral", "ministral3", "nanochat", "olmoe", "opt", "persimmon", "phimoe",
    "modernbert-decoder", "ctrl", "diffllama", "hrm_text", "dory", "gemma3n_text", "moshi", "dbrx",
    "cohere_compass_text", "sarvam_mla", "sarvam_moe", "seed_oss", "solar_open", "vaultgemma", "youtu", *RECENT_TYPES,
)  # fmt: skip
"""Further supported types, tested by the slow tests."""

HYBRID_TYPES = (
    "bailing_hybrid", "bamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "minimax", "nemotron_h",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
)  # fmt: skip
"""Types whose configuration says which layers are recurrent; here all layers are attention."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "n_inner": 96,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 48,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_start_index": 1,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
    "global_head_dim": 32,
    "attention_dropout": 0.0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "hidden_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
"""Values for every configuration class that has the field."""

_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 12,
    "head_dim": 8,
}
_INDEX: dict[str, Any] = {**_MLA, "index_topk": 64, "index_head_dim": 16, "index_n_heads": 2}
_SHARED_INDEX = {**_INDEX, "indexer_types": ["full", "shared", "full"]}
SPARSE_TYPES = ("deepseek_v32", "glm_moe_dsa", "hy_v4", "axk2", "dots3_note_text", "minimax_m3_vl_text")
"""Types whose attention selects the best 64 keys by a learned index."""
LINEAR: dict[str, Any] = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
"""Fields of types with a gated delta rule, and with attention in the layer between."""
_FULL = ["full_attention"] * 3
_BY_TYPE: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "cohere": {"logit_scale": 2.0},
    "cohere2": {"logit_scale": 2.0, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "granite": {"logits_scaling": 0.5, "residual_multiplier": 0.7, "embedding_multiplier": 2.0},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1},
    "phimoe": {"sliding_window": None},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "bamba": {"attn_layer_indices": [0, 1, 2]},
    "jamba": {"attn_layer_period": 1, "attn_layer_offset": 0},
    "nemotron_h": {"layers_block_type": _FULL},
    "lfm2_moe": {"layer_types": _FULL, "num_dense_layers": 1},
    **{name: {"layer_types": _FULL} for name in ("granitemoehybrid", "lfm2", "minimax", "qwen3_next")},
    **{name: {"layer_types": _FULL} for name in ("qwen3_5_moe_text", "qwen3_5_text")},
    **{name: {**_MLA, "layer_types": _FULL} for name in ("bailing_hybrid", "kimi_linear")},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "axk1", "glm4_moe_lite", "youtu", "minicpm3", "sarvam_mla"), _MLA),
    "hrm_text": {"H_cycles": 2, "L_cycles": 1, "prefix_lm": False},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 3},
    "moshi": {"sliding_window": 512},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 2.0},
        "ffn_config": {"ffn_hidden_size": 96},
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    **dict.fromkeys(("deepseek_v32", "axk2"), _INDEX),
    **dict.fromkeys(("glm_moe_dsa", "hy_v4"), _SHARED_INDEX),
    "dots3_note_text": {**_INDEX, "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "index_block_size": 8,
        "index_topk_blocks": 8,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 48,
        "rotary_dim": 8,
    },
    "longcat_flash": {**_MLA, "num_layers": 2, "num_hidden_layers": 4},
}


def common_fields(model_type: str) -> dict[str, Any]:
    """Small values of fields, for every class that has the field, and those of `model_type`."""
    return {**_COMMON, **by_type(model_type)}


def by_type(model_type: str) -> dict[str, Any]:
    """Small values of fields of `model_type` alone."""
    return _BY_TYPE.get(model_type, {})


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """Small configuration of `model_type`, with `overrides` of its fields."""
    cls = CONFIG_MAPPING[model_type]
    fields = set(getattr(cls, "__dataclass_fields__", {}))
    given = {key: value for key, value in _COMMON.items() if key in fields}
    given |= {key: value for key, value in _BY_TYPE.get(model_type, {}).items() if key in fields}
    return cls(**{**given, **overrides})


def tiny_model(model_type: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Float32 model of transformers with eager attention and random weights, including biases, norms and sinks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config(model_type, **overrides)
        causal = type(config) in AutoModelForCausalLM._model_mapping
        auto = AutoModelForCausalLM if causal else AutoModelForImageTextToText
        model = auto.from_config(config, attn_implementation="eager")
        for name, parameter in model.named_parameters():
            # Initialisers make these constant, which would hide a parameter that is not read.
            if parameter.dim() == 1:
                one = 0.0 if name.endswith(("bias", "sinks")) else parameter.detach().clone()
                parameter.data = one + 0.2 * torch.randn_like(parameter)
    return model.eval()


def save_tiny(
    model_type: str,
    folder: Path | str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write `tiny_model(...)` as a Hugging Face folder (config.json, safetensors; no tokenizer) and return its path."""
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = tiny_model(model_type, seed=seed, **overrides).to(dtype)
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    finally:
        if bar:
            logging.enable_progress_bar()
    return Path(folder)
