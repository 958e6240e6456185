"""Architectures of GGUF files with experts; see `family`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from batchgen.gguf.family import LATENT, QKV, RMS, Assembly, Family

_MIXTRAL: Final = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}


def _shared(module: str) -> dict[str, str]:
    """Names of the experts that all tokens share."""
    return {f"ffn_{part}_shexp": f"{module}.{part}_proj" for part in ("gate", "up", "down")}


_SHARED_EXPERTS: Final = {**_shared("mlp.shared_experts"), "exp_probs_b": "=mlp.gate.e_score_correction_bias"}
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

_GPT_OSS: Final = {
    "mlp.experts.gate_up_proj": Assembly(
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"), axis=1, alternating=True, transposed=(True, True)
    ),
    "mlp.experts.gate_up_proj_bias": Assembly(
        ("ffn_gate_exps.bias", "ffn_up_exps.bias"), axis=1, alternating=True, stacked=False
    ),
    "mlp.experts.down_proj": Assembly(("ffn_down_exps.weight",), transposed=(True,)),
}

_LATENT_KEYS: Final = {
    **RMS,
    **_DEEPSEEK_EXPERTS,
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
}
_HEADS: Final = {
    "self_attn.kv_b_proj.weight": Assembly(
        ("attn_k_b.weight", "attn_v_b.weight"), transposed=(True, False), merged=True
    )
}

EXPERT_FAMILIES: Final[Mapping[str, Family]] = {
    "qwen2moe": Family("qwen2_moe", {**RMS, **_EXPERTS}, {"norm_topk_prob": False, "use_sliding_window": False}),
    "qwen3moe": Family("qwen3_moe", {**RMS, **_EXPERTS}, {"norm_topk_prob": True, "use_sliding_window": False}),
    "qwen3vlmoe": Family("qwen3_moe", {**RMS, **_EXPERTS}, {"norm_topk_prob": True, "use_sliding_window": False}),
    "olmoe": Family("olmoe", {**RMS, **_EXPERTS, "attention.clamp_kqv": "clip_qkv"}, {"norm_topk_prob": False}),
    "gpt-oss": Family(
        "gpt_oss",
        {
            **RMS, "attention.sliding_window": "sliding_window", "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "intermediate_size",
        },
        names={
            "post_attention_norm": "post_attention_layernorm", "attn_sinks": "=self_attn.sinks",
            "ffn_gate_inp": "mlp.router", "ffn_down_exps.bias": "=mlp.experts.down_proj_bias",
        },
        assembled=_GPT_OSS, flags={"attention_bias": "attn_q.bias"},
    ),
    "deepseek2": Family(
        "deepseek_v3", _LATENT_KEYS, names={**_SHARED_EXPERTS, **LATENT}, latent=True, assembled=_HEADS,
    ),
    "mistral4": Family(
        "mistral4", _LATENT_KEYS,
        names={
            **_SHARED_EXPERTS, **LATENT, "ffn_gate_up_exps": "=mlp.experts.gate_up_proj",
            "ffn_down_exps": "=mlp.experts.down_proj",
        },
        latent=True, assembled=_HEADS,
    ),
    "glm4moe": Family(
        "glm4_moe", {**RMS, **_DEEPSEEK_EXPERTS},
        names={**_SHARED_EXPERTS, "post_attention_norm": "post_attention_layernorm"},
        flags={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
    ),
    "dots1": Family(
        "dots1", {**RMS, **_DEEPSEEK_EXPERTS}, names=_SHARED_EXPERTS, flags={"attention_bias": "attn_q.bias"}
    ),
    "granitemoe": Family(
        "granitemoe",
        {
            **RMS, "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
            "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
        },
        names={
            "ffn_gate_inp": "block_sparse_moe.router.layer", "ffn_down_shexp": "shared_mlp.output_linear",
            "ffn_down_exps": "=block_sparse_moe.output_linear.weight",
        },
        assembled={
            "block_sparse_moe.input_linear.weight": Assembly(("ffn_gate_exps.weight", "ffn_up_exps.weight")),
            "shared_mlp.input_linear.weight": Assembly(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), stacked=False),
        },
        paired_rotary=True,
    ),
    "minimax-m2": Family(
        "minimax_m2",
        {**RMS, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        names={**_MIXTRAL, "exp_probs_b": "=block_sparse_moe.e_score_correction_bias"},
    ),
    "llama4": Family(
        "llama4_text",
        {
            **RMS, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size", "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        names={
            "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj", "ffn_gate_inp": "feed_forward.router",
            "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
            "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
            "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
        },
        assembled={
            "feed_forward.experts.gate_up_proj": Assembly(
                ("ffn_gate_exps.weight", "ffn_up_exps.weight"), axis=1, transposed=(True, True)
            ),
            "feed_forward.experts.down_proj": Assembly(("ffn_down_exps.weight",), transposed=(True,)),
        },
        flags={"attention_bias": "attn_q.bias"},
    ),
    "hunyuan-moe": Family(
        "hunyuan_v1_moe",
        {**RMS, "expert_count": "num_experts", "expert_used_count": "moe_topk"},
        names={
            **_shared("mlp.shared_mlp"), "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm", "ffn_gate_inp": "mlp.gate.wg",
        },
        flags={"attention_bias": "attn_q.bias"},
    ),
    "ernie4_5-moe": Family(
        "ernie4_5_moe",
        {
            **RMS, "expert_count": "moe_num_experts", "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval", "leading_dense_block_count": "moe_layer_start_index",
        },
        names={**_SHARED_EXPERTS, "exp_probs_b": "=mlp.moe_statics.e_score_correction_bias"},
        flags={"use_bias": "attn_q.bias"},
    ),
    "exaone-moe": Family(
        "exaone_moe",
        {
            **RMS, "attention.sliding_window": "sliding_window", "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok", "expert_shared_count": "num_shared_experts",
            "expert_feed_forward_length": "moe_intermediate_size", "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob", "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group", "leading_dense_block_count": "first_k_dense_replace",
        },
        names=_SHARED_EXPERTS,
    ),
    "phimoe": Family(
        "phimoe",
        {
            **RMS, "attention.sliding_window": "sliding_window", "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        names=_MIXTRAL, flags={"attention_bias": "attn_q.bias"},
    ),
    "afmoe": Family(
        "afmoe",
        {
            **RMS, "attention.sliding_window": "sliding_window", "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok", "expert_shared_count": "num_shared_experts",
            "expert_feed_forward_length": "moe_intermediate_size", "expert_weights_scale": "route_scale",
            "leading_dense_block_count": "num_dense_layers",
        },
        constants={"mup_enabled": True},
        names={
            **_SHARED_EXPERTS, "attn_gate": "self_attn.gate_proj", "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm", "post_ffw_norm": "post_mlp_layernorm",
            "ffn_gate_inp": "mlp.router.gate", "exp_probs_b": "=mlp.expert_bias",
        },
    ),
    "bailingmoe2": Family(
        "glm4_moe", {**RMS, **_DEEPSEEK_EXPERTS}, {"use_qk_norm": True}, names=_SHARED_EXPERTS, splits=QKV,
        flags={"attention_bias": "attn_qkv.bias"},
    ),
}  # fmt: skip
"""`general.architecture` -> what is known of it."""
MIXTRAL: Final = Family(
    "mixtral",
    {**RMS, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    names=_MIXTRAL,
    paired_rotary=True,
)
"""The architecture `llama` with experts."""
