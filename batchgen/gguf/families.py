"""Architectures of GGUF files that are read: their configuration keys, tensor names and changes to stored weights.

The table has what llama.cpp's converter does to each family. Keys are those of the metadata without the architecture's
name in front; names of tensors are those of the checkpoint on the hub, without the number of the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

TOP_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Tensors outside of the layers."""
IGNORED: Final = ("rope_freqs", "rope_factors_long", "rope_factors_short", "attn_rot_embd")
"""Tensors that the configuration is made from, or that it determines."""
LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""Tensors of a layer; `{}` is the number of an expert, along the first axis of the stored tensor.

A key may end in `.weight` or `.bias`, for one of both. A name that begins with `=` is whole; others get the ending of
the stored tensor.
"""
_SANDWICH: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL: Final = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}
_SHARED_EXPERTS: Final = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b": "=mlp.gate.e_score_correction_bias",
}
_LATENT: Final = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_RMS: Final = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_EXPERTS: Final = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_DEEPSEEK_EXPERTS: Final = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}


@dataclass(frozen=True, slots=True)
class Assembly:
    """A tensor of the checkpoint that is stored in parts: a stack of matrices, of which each part has its share."""

    parts: tuple[str, ...]
    """Stored tensors of a layer, in order."""
    axis: int = 0
    """Axis of the matrices along which the parts follow each other."""
    alternating: bool = False
    """Whether the parts alternate along the axis, instead of one following the other."""
    transposed: tuple[bool, ...] = (False, False)
    """Whether the axes of a part's matrices are exchanged."""
    stacked: bool = True
    """Whether the first axis of the parts counts the matrices; else each part is one matrix."""
    merged: bool = False
    """Whether the matrices lie one below the other in one matrix, as those of heads; those of experts have an axis."""


_GPT_OSS: Final = {
    "mlp.experts.gate_up_proj": Assembly(
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"), axis=1, alternating=True, transposed=(True, True)
    ),
    "mlp.experts.gate_up_proj_bias": Assembly(
        ("ffn_gate_exps.bias", "ffn_up_exps.bias"), axis=1, alternating=True, stacked=False
    ),
    "mlp.experts.down_proj": Assembly(("ffn_down_exps.weight",), transposed=(True,)),
}


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture."""

    model_type: str
    """`model_type` of the configuration in transformers."""
    keys: Mapping[str, str] = field(default_factory=lambda: _RMS)
    """Metadata key -> configuration key, beyond those of every architecture."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the family that its files do not state."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer that are not as in `LAYER_NAMES`."""
    top_names: Mapping[str, str] = field(default_factory=dict)
    """Tensors outside of the layers that are not as in `TOP_NAMES`."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Configuration key -> tensor of the first layer whose presence it states."""
    assembled: Mapping[str, Assembly] = field(default_factory=dict)
    """Tensors of a layer in the checkpoint that are stored in parts."""
    latent: bool = False
    """Whether it has multi-head latent attention."""
    paired_rotary: bool = False
    """Whether rows of q and k are stored for rotary embeddings of adjacent pairs instead of halves."""
    norms_plus_one: bool = False
    """Whether norms are stored with one added."""


_LLAMA_FLAGS: Final = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_gate.bias"}
_GEMMA: Final = {**_RMS, "attention.sliding_window": "sliding_window"}
_CAPS: Final = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_LAYER_NORM: Final = {"attention.layer_norm_epsilon": "layer_norm_eps"}

FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family("llama", flags=_LLAMA_FLAGS, paired_rotary=True),
    "qwen2": Family("qwen2", constants={"use_sliding_window": False}),
    "qwen2vl": Family("qwen2", constants={"use_sliding_window": False}),
    "qwen3": Family("qwen3", constants={"use_sliding_window": False}, flags={"attention_bias": "attn_q.bias"}),
    "qwen3vl": Family("qwen3", constants={"use_sliding_window": False}, flags={"attention_bias": "attn_q.bias"}),
    "qwen2moe": Family("qwen2_moe", {**_RMS, **_EXPERTS}, {"norm_topk_prob": False, "use_sliding_window": False}),
    "qwen3moe": Family("qwen3_moe", {**_RMS, **_EXPERTS}, {"norm_topk_prob": True, "use_sliding_window": False}),
    "qwen3vlmoe": Family("qwen3_moe", {**_RMS, **_EXPERTS}, {"norm_topk_prob": True, "use_sliding_window": False}),
    "gemma": Family("gemma", norms_plus_one=True),
    "gemma2": Family("gemma2", {**_GEMMA, **_CAPS}, names=_SANDWICH, norms_plus_one=True),
    "gemma3": Family("gemma3_text", {**_GEMMA, **_CAPS}, names=_SANDWICH, norms_plus_one=True),
    "phi2": Family(
        "phi", _LAYER_NORM,
        names={"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        top_names={"output_norm": "model.final_layernorm"},
    ),
    "phi3": Family(
        "phi3", {**_RMS, "attention.sliding_window": "sliding_window"},
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "starcoder2": Family(
        "starcoder2", {"attention.layer_norm_epsilon": "norm_epsilon", "attention.sliding_window": "sliding_window"},
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, flags={"use_bias": "attn_output.bias"},
    ),
    "stablelm": Family(
        "stablelm", {**_LAYER_NORM, "use_parallel_residual": "use_parallel_residual"},
        flags={"use_qkv_bias": "attn_q.bias"},
    ),
    "olmo2": Family(
        "olmo2", flags={"attention_bias": "attn_q.bias"},
        names={"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    ),
    "olmoe": Family("olmoe", {**_RMS, **_EXPERTS, "attention.clamp_kqv": "clip_qkv"}, {"norm_topk_prob": False}),
    "command-r": Family(
        "cohere", {**_LAYER_NORM, "logit_scale": "logit_scale"},
        flags={"use_qk_norm": "attn_q_norm.weight", "attention_bias": "attn_q.bias"},
    ),
    "cohere2": Family(
        "cohere2", {**_LAYER_NORM, "logit_scale": "logit_scale", "attention.sliding_window": "sliding_window"},
        flags={"attention_bias": "attn_q.bias"},
    ),
    "granite": Family(
        "granite",
        {
            **_RMS, "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
        },
        flags=_LLAMA_FLAGS, paired_rotary=True,
    ),
    "smollm3": Family("smollm3", flags=_LLAMA_FLAGS, paired_rotary=True, constants={"use_sliding_window": False}),
    "arcee": Family("arcee", flags={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}, paired_rotary=True),
    "seed_oss": Family(
        "seed_oss", names={"post_attention_norm": "post_attention_layernorm"},
        flags={
            "attention_bias": "attn_q.bias", "attention_out_bias": "attn_output.bias", "mlp_bias": "ffn_gate.bias",
        },
    ),
    "ernie4_5": Family("ernie4_5", flags={"use_bias": "attn_q.bias"}),
    "nemotron": Family(
        "nemotron", {"attention.layer_norm_epsilon": "norm_eps"},
        flags={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}, norms_plus_one=True,
    ),
    "glm4": Family(
        "glm4", flags={"attention_bias": "attn_q.bias"},
        names={
            "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "gpt-oss": Family(
        "gpt_oss",
        {
            **_RMS, "attention.sliding_window": "sliding_window", "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "intermediate_size",
        },
        names={
            "post_attention_norm": "post_attention_layernorm", "attn_sinks": "=self_attn.sinks",
            "ffn_gate_inp": "mlp.router", "ffn_down_exps.bias": "=mlp.experts.down_proj_bias",
        },
        assembled=_GPT_OSS, flags={"attention_bias": "attn_q.bias"},
    ),
    "deepseek2": Family(
        "deepseek_v3",
        {
            **_RMS, **_DEEPSEEK_EXPERTS, "attention.q_lora_rank": "q_lora_rank",
            "attention.kv_lora_rank": "kv_lora_rank", "rope.dimension_count": "qk_rope_head_dim",
        },
        names={**_SHARED_EXPERTS, **_LATENT}, latent=True,
        assembled={
            "self_attn.kv_b_proj.weight": Assembly(
                ("attn_k_b.weight", "attn_v_b.weight"), transposed=(True, False), merged=True
            )
        },
    ),
    "glm4moe": Family(
        "glm4_moe", {**_RMS, **_DEEPSEEK_EXPERTS},
        names={**_SHARED_EXPERTS, "post_attention_norm": "post_attention_layernorm"},
        flags={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
    ),
    "dots1": Family(
        "dots1", {**_RMS, **_DEEPSEEK_EXPERTS}, names=_SHARED_EXPERTS, flags={"attention_bias": "attn_q.bias"}
    ),
    "exaone4": Family(
        "exaone4", {**_RMS, "attention.sliding_window": "sliding_window"},
        names={"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    ),
    "hunyuan-dense": Family(
        "hunyuan_v1_dense", flags={"attention_bias": "attn_q.bias"},
        names={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "granitemoe": Family(
        "granitemoe",
        {
            **_RMS, "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
            "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
        },
        names={
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_down_exps": "=block_sparse_moe.output_linear.weight",
        },
        assembled={
            "block_sparse_moe.input_linear.weight": Assembly(("ffn_gate_exps.weight", "ffn_up_exps.weight"))
        },
        paired_rotary=True,
    ),
    "minimax-m2": Family(
        "minimax_m2",
        {**_RMS, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        names={**_MIXTRAL, "exp_probs_b": "=block_sparse_moe.e_score_correction_bias"},
    ),
}  # fmt: skip
"""`general.architecture` -> what is known of it."""
MIXTRAL: Final = Family(
    "mixtral",
    {**_RMS, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    names=_MIXTRAL,
    paired_rotary=True,
)
"""The architecture `llama` with experts."""
