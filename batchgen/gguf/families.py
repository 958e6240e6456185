"""Architectures of GGUF files that are read, and those whose computation is missing; see `family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from batchgen.errors import ModelError
from batchgen.gguf.family import (
    ALTUP,
    DEEPSEEK_EXPERTS,
    EXPERTS,
    GPT_NAMES,
    GPT_TOP,
    LATENT,
    MIXTRAL_NAMES,
    PER_LAYER,
    PER_LAYER_TOP,
    QKV,
    RMS,
    SANDWICH,
    Assembly,
    Family,
)
from batchgen.gguf.header import GgufHeader


def _shared(module: str) -> dict[str, str]:
    """Names of the experts that all tokens share."""
    return {f"ffn_{part}_shexp": f"{module}.{part}_proj" for part in ("gate", "up", "down")}


_SHARED_EXPERTS: Final = {**_shared("mlp.shared_experts"), "exp_probs_b": "=mlp.gate.e_score_correction_bias"}

_EXPERT_GATE_UP: Final = ("ffn_gate_exps.weight", "ffn_up_exps.weight")

_GPT_OSS: Final = {
    "mlp.experts.gate_up_proj": Assembly(_EXPERT_GATE_UP, axis=1, alternating=True, transposed=(True, True)),
    "mlp.experts.gate_up_proj_bias": Assembly(
        ("ffn_gate_exps.bias", "ffn_up_exps.bias"), axis=1, alternating=True, stacked=False
    ),
    "mlp.experts.down_proj": Assembly(("ffn_down_exps.weight",), transposed=(True,)),
}

_LATENT_KEYS: Final = {
    **RMS,
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
}
_HEADS: Final = {
    "self_attn.kv_b_proj.weight": Assembly(
        ("attn_k_b.weight", "attn_v_b.weight"), transposed=(True, False), merged=True
    )
}
_GRANITE: Final = {
    **RMS,
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_LOCAL_EXPERTS: Final = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_BIASED: Final = {"attention_bias": "attn_q.bias"}
_BIASED_UP: Final = {**_BIASED, "mlp_bias": "ffn_up.bias"}
_NORMS_BEHIND: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAMED_NORMS: Final = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_GPT: Final = {"attention.layer_norm_epsilon": "layer_norm_epsilon"}
_LLAMA_FLAGS: Final = {**_BIASED, "mlp_bias": "ffn_gate.bias"}
_WINDOWED: Final = {**RMS, "attention.sliding_window": "sliding_window"}
_CAPS: Final = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_LAYER_NORM: Final = {"attention.layer_norm_epsilon": "layer_norm_eps"}

FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family("llama", flags=_LLAMA_FLAGS, paired_rotary=True),
    "qwen2": Family("qwen2", constants={"use_sliding_window": False}),
    "qwen2vl": Family("qwen2", constants={"use_sliding_window": False}),
    "qwen3": Family("qwen3", constants={"use_sliding_window": False}, flags=_BIASED),
    "qwen3vl": Family("qwen3", constants={"use_sliding_window": False}, flags=_BIASED),
    "gemma": Family("gemma", norms_plus_one=True),
    "gemma2": Family("gemma2", {**_WINDOWED, **_CAPS}, names=SANDWICH, norms_plus_one=True),
    "gemma3": Family("gemma3_text", {**_WINDOWED, **_CAPS}, names=SANDWICH, norms_plus_one=True),
    "phi2": Family(
        "phi", _LAYER_NORM,
        names={"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        top_names={"output_norm": "model.final_layernorm"},
    ),
    "phi3": Family("phi3", _WINDOWED, names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "starcoder2": Family(
        "starcoder2", {"attention.layer_norm_epsilon": "norm_epsilon", "attention.sliding_window": "sliding_window"},
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, flags={"use_bias": "attn_output.bias"},
    ),
    "stablelm": Family(
        "stablelm", {**_LAYER_NORM, "use_parallel_residual": "use_parallel_residual"},
        flags={"use_qkv_bias": "attn_q.bias"},
    ),
    "olmo": Family("olmo", {"attention.clamp_kqv": "clip_qkv"}, paired_rotary=True),
    "olmo2": Family("olmo2", _WINDOWED, flags=_BIASED, names=_NORMS_BEHIND),
    "command-r": Family(
        "cohere", {**_LAYER_NORM, "logit_scale": "logit_scale"},
        flags={"use_qk_norm": "attn_q_norm.weight", "attention_bias": "attn_q.bias"},
    ),
    "cohere2": Family(
        "cohere2", {**_LAYER_NORM, "logit_scale": "logit_scale", "attention.sliding_window": "sliding_window"},
        flags=_BIASED,
    ),
    "granite": Family(
        "granite", {**_GRANITE, "attention.scale": "attention_multiplier"}, flags=_LLAMA_FLAGS, paired_rotary=True,
    ),
    "smollm3": Family("smollm3", flags=_LLAMA_FLAGS, paired_rotary=True, constants={"use_sliding_window": False}),
    "arcee": Family("arcee", flags=_BIASED_UP, paired_rotary=True),
    "seed_oss": Family(
        "seed_oss", names={"post_attention_norm": "post_attention_layernorm"},
        flags={**_LLAMA_FLAGS, "attention_out_bias": "attn_output.bias"},
    ),
    "ernie4_5": Family("ernie4_5", flags={"use_bias": "attn_q.bias"}),
    "nemotron": Family(
        "nemotron", {"attention.layer_norm_epsilon": "norm_eps"},
        flags=_BIASED_UP, norms_plus_one=True,
    ),
    "glm4": Family(
        "glm4", flags=_BIASED,
        names={
            "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "exaone4": Family("exaone4", _WINDOWED, names=_NORMS_BEHIND),
    "hunyuan-dense": Family("hunyuan_v1_dense", flags=_BIASED, names=_NAMED_NORMS),
    "mistral3": Family("ministral3", paired_rotary=True, constants={"sliding_window": None}),
    "exaone": Family("llama"),
    "internlm2": Family("llama", flags=_LLAMA_FLAGS, paired_rotary=True),
    "xverse": Family("llama", paired_rotary=True),
    "pangu-embedded": Family("llama", flags=_LLAMA_FLAGS),
    "minicpm": Family("granite", _GRANITE, paired_rotary=True),
    "minicpm3": Family(
        "minicpm3", _LATENT_KEYS, names=LATENT, latent=True,
    ),
    "chatglm": Family("glm", names={"ffn_up": "mlp.gate_up_proj"}, splits=QKV),
    "apertus": Family(
        "apertus", names={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        flags=_BIASED,
        listed={
            "xielu.alpha_n": ("mlp.act_fn.alpha_n", (1,)), "xielu.alpha_p": ("mlp.act_fn.alpha_p", (1,)),
            "xielu.beta": ("mlp.act_fn.beta", ()), "xielu.eps": ("mlp.act_fn.eps", ()),
        },
    ),
    "jais2": Family("jais2", _LAYER_NORM, flags=_BIASED_UP),
    "gemma3n": Family(
        "gemma3n_text",
        {
            **_WINDOWED, "final_logit_softcapping": "final_logit_softcapping", "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs", "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        },
        names={**SANDWICH, **PER_LAYER, **ALTUP},
        top_names={
            **PER_LAYER_TOP, "altup_proj": "model.altup_projections.{}",
            "altup_unembd_proj": "model.altup_unembed_projections.{}",
        },
    ),
    "gemma4": Family(
        "gemma4_text",
        {
            **_WINDOWED, "final_logit_softcapping": "final_logit_softcapping",
            "attention.shared_kv_layers": "num_kv_shared_layers", "attention.key_length": "global_head_dim",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "expert_count": "num_experts", "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        names={
            **SANDWICH, **PER_LAYER, "layer_output_scale": "=layer_scalar", "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "=router.scale", "ffn_down_exps.scale": "=router.per_expert_scale",
            "ffn_gate_up_exps": "=experts.gate_up_proj", "ffn_down_exps": "=experts.down_proj",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        top_names=PER_LAYER_TOP,
        assembled={"experts.gate_up_proj": Assembly(_EXPERT_GATE_UP)},
        varying=("feed_forward_length", "attention.head_count_kv"),
    ),
    "gpt2": Family(
        "gpt2", _GPT, names=GPT_NAMES, top_names=GPT_TOP, prefix="transformer.h.",
        assembled={
            f"{name}.weight": Assembly((f"{part}.weight",), transposed=(True,), stacked=False)
            for part, name in GPT_NAMES.items() if "ln_" not in name
        },
    ),
    "starcoder": Family("gpt_bigcode", _GPT, names=GPT_NAMES, top_names=GPT_TOP, prefix="transformer.h."),
    "gptneox": Family(
        "gpt_neox", {**_LAYER_NORM, "use_parallel_residual": "use_parallel_residual"},
        names={
            "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense", "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        top_names={"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm",
                   "output": "lm_head"},
        prefix="gpt_neox.layers.", fused_by_kind=True,
    ),
    "qwen2moe": Family("qwen2_moe", {**RMS, **EXPERTS}, {"norm_topk_prob": False, "use_sliding_window": False}),
    "qwen3moe": Family("qwen3_moe", {**RMS, **EXPERTS}, {"norm_topk_prob": True, "use_sliding_window": False}),
    "qwen3vlmoe": Family("qwen3_moe", {**RMS, **EXPERTS}, {"norm_topk_prob": True, "use_sliding_window": False}),
    "olmoe": Family("olmoe", {**RMS, **EXPERTS, "attention.clamp_kqv": "clip_qkv"}, {"norm_topk_prob": False}),
    "gpt-oss": Family(
        "gpt_oss",
        {**_WINDOWED, **_LOCAL_EXPERTS, "expert_feed_forward_length": "intermediate_size"},
        names={
            "post_attention_norm": "post_attention_layernorm", "attn_sinks": "=self_attn.sinks",
            "ffn_gate_inp": "mlp.router", "ffn_down_exps.bias": "=mlp.experts.down_proj_bias",
        },
        assembled=_GPT_OSS, flags=_BIASED,
    ),
    "deepseek2": Family(
        "deepseek_v3", {**_LATENT_KEYS, **DEEPSEEK_EXPERTS}, names={**_SHARED_EXPERTS, **LATENT}, latent=True,
        assembled=_HEADS,
    ),
    "mistral4": Family(
        "mistral4", {**_LATENT_KEYS, **DEEPSEEK_EXPERTS},
        names={
            **_SHARED_EXPERTS, **LATENT, "ffn_gate_up_exps": "=mlp.experts.gate_up_proj",
            "ffn_down_exps": "=mlp.experts.down_proj",
        },
        latent=True, assembled=_HEADS,
    ),
    "glm4moe": Family(
        "glm4_moe", {**RMS, **DEEPSEEK_EXPERTS},
        names={**_SHARED_EXPERTS, "post_attention_norm": "post_attention_layernorm"},
        flags={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
    ),
    "dots1": Family("dots1", {**RMS, **DEEPSEEK_EXPERTS}, names=_SHARED_EXPERTS, flags=_BIASED),
    "granitemoe": Family(
        "granitemoe",
        {
            **_GRANITE, **_LOCAL_EXPERTS, "attention.scale": "attention_multiplier",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        names={
            "ffn_gate_inp": "block_sparse_moe.router.layer", "ffn_down_shexp": "shared_mlp.output_linear",
            "ffn_down_exps": "=block_sparse_moe.output_linear.weight",
        },
        assembled={
            "block_sparse_moe.input_linear.weight": Assembly(_EXPERT_GATE_UP),
            "shared_mlp.input_linear.weight": Assembly(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), stacked=False),
        },
        paired_rotary=True,
    ),
    "minimax-m2": Family(
        "minimax_m2", {**RMS, **_LOCAL_EXPERTS},
        names={**MIXTRAL_NAMES, "exp_probs_b": "=block_sparse_moe.e_score_correction_bias"},
    ),
    "llama4": Family(
        "llama4_text",
        {
            **RMS, **_LOCAL_EXPERTS, "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        names={
            "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj", "ffn_gate_inp": "feed_forward.router",
            "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
            "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
            "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
        },
        assembled={
            "feed_forward.experts.gate_up_proj": Assembly(_EXPERT_GATE_UP, axis=1, transposed=(True, True)),
            "feed_forward.experts.down_proj": Assembly(("ffn_down_exps.weight",), transposed=(True,)),
        },
        flags=_BIASED,
    ),
    "hunyuan-moe": Family(
        "hunyuan_v1_moe",
        {**RMS, "expert_count": "num_experts", "expert_used_count": "moe_topk"},
        names={**_shared("mlp.shared_mlp"), **_NAMED_NORMS, "ffn_gate_inp": "mlp.gate.wg"}, flags=_BIASED,
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
            **_WINDOWED, **DEEPSEEK_EXPERTS, "expert_count": "num_experts", "expert_shared_count": "num_shared_experts",
        },
        names=_SHARED_EXPERTS,
    ),
    "phimoe": Family("phimoe", {**_WINDOWED, **_LOCAL_EXPERTS}, names=MIXTRAL_NAMES, flags=_BIASED),
    "afmoe": Family(
        "afmoe",
        {
            **_WINDOWED, "expert_count": "num_experts",
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
        "glm4_moe", {**RMS, **DEEPSEEK_EXPERTS}, {"use_qk_norm": True}, names=_SHARED_EXPERTS, splits=QKV,
        flags={"attention_bias": "attn_qkv.bias"},
    ),
}  # fmt: skip
"""`general.architecture` -> what is known of it."""
_MIXTRAL: Final = Family("mixtral", {**RMS, **_LOCAL_EXPERTS}, names=MIXTRAL_NAMES, paired_rotary=True)
"""The architecture `llama` with experts."""

_REASONS: Final[Mapping[str, str]] = {
    "it keeps a recurrent state in addition to keys and values": (
        "qwen3next qwen35 qwen35moe rwkv6 rwkv6qwen2 rwkv7 arwkv7 mamba mamba2 jamba nemotron_h nemotron_h_moe "
        "granitehybrid falcon-h1 lfm2 lfm2moe kimi-linear plamo2"
    ),
    "it is an encoder, or needs one": (
        "bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert gemma-embedding "
        "llama-embed t5 t5encoder"
    ),
    "it denoises blocks of tokens instead of writing them in order": "dream llada llada-moe rnd1",
    "it selects the keys of its attention by a learned index": "glm-dsa",
    "its attention weights keys by their distance (ALiBi), not by rotated positions": "bloom mpt refact jais",
    "its attention or its positions are scaled by the length of the text": "qwen",
    "its head is normalised, or its attention weights keys by their distance": "baichuan",
    "its attention in transformers does not go through the library's attention interface": "falcon",
    "its layers have different numbers of heads, and some have no attention": "deci openelm",
    "it encodes images or sounds, and writes no text": "clip wavtokenizer-dec",
    "its images are read by a separate set of weights in each layer": "cogvlm",
    "the installed transformers has no class with its computation": (
        "grok gptj plamo plamo3 codeshell orion arctic deepseek plm bailingmoe smallthinker grovemoe maincoder bitnet"
    ),
}
MISSING: Final = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""`general.architecture` -> the missing computation."""


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
        return _MIXTRAL
    if name == "llama" and header.metadata.get("llama.attention.sliding_window"):
        keys = {**FAMILIES[name].keys, "attention.sliding_window": "sliding_window"}
        return replace(FAMILIES[name], model_type="mistral", keys=keys, flags={})
    if name == "glm4" and header.metadata.get("glm4.rope.dimension_sections"):
        return replace(FAMILIES[name], halved_rotary=True)  # the text part of GLM-4V
    return FAMILIES[name]
