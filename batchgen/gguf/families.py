"""Architectures of GGUF files that are read; see `family`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from batchgen.gguf.expert_families import EXPERT_FAMILIES
from batchgen.gguf.family import LATENT, QKV, RMS, Assembly, Family

_SANDWICH: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PER_LAYER: Final = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_PER_LAYER_TOP: Final = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_ALTUP: Final = {
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "=altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_GPT: Final = {"attention.layer_norm_epsilon": "layer_norm_epsilon"}
_GPT_NAMES: Final = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT_TOP: Final = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
}
_LLAMA_FLAGS: Final = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_gate.bias"}
_GEMMA: Final = {**RMS, "attention.sliding_window": "sliding_window"}
_CAPS: Final = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_LAYER_NORM: Final = {"attention.layer_norm_epsilon": "layer_norm_eps"}

FAMILIES: Final[Mapping[str, Family]] = {
    **EXPERT_FAMILIES,
    "llama": Family("llama", flags=_LLAMA_FLAGS, paired_rotary=True),
    "qwen2": Family("qwen2", constants={"use_sliding_window": False}),
    "qwen2vl": Family("qwen2", constants={"use_sliding_window": False}),
    "qwen3": Family("qwen3", constants={"use_sliding_window": False}, flags={"attention_bias": "attn_q.bias"}),
    "qwen3vl": Family("qwen3", constants={"use_sliding_window": False}, flags={"attention_bias": "attn_q.bias"}),
    "gemma": Family("gemma", norms_plus_one=True),
    "gemma2": Family("gemma2", {**_GEMMA, **_CAPS}, names=_SANDWICH, norms_plus_one=True),
    "gemma3": Family("gemma3_text", {**_GEMMA, **_CAPS}, names=_SANDWICH, norms_plus_one=True),
    "phi2": Family(
        "phi", _LAYER_NORM,
        names={"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        top_names={"output_norm": "model.final_layernorm"},
    ),
    "phi3": Family(
        "phi3", {**RMS, "attention.sliding_window": "sliding_window"},
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
    "olmo": Family("olmo", {"attention.clamp_kqv": "clip_qkv"}, paired_rotary=True),
    "olmo2": Family(
        "olmo2", {**RMS, "attention.sliding_window": "sliding_window"}, flags={"attention_bias": "attn_q.bias"},
        names={"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    ),
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
            **RMS, "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
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
    "exaone4": Family(
        "exaone4", {**RMS, "attention.sliding_window": "sliding_window"},
        names={"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    ),
    "hunyuan-dense": Family(
        "hunyuan_v1_dense", flags={"attention_bias": "attn_q.bias"},
        names={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "mistral3": Family("ministral3", paired_rotary=True, constants={"sliding_window": None}),
    "exaone": Family("llama"),
    "internlm2": Family("llama", flags=_LLAMA_FLAGS, paired_rotary=True),
    "xverse": Family("llama", paired_rotary=True),
    "baichuan": Family("llama", paired_rotary=True),
    "pangu-embedded": Family("llama", flags=_LLAMA_FLAGS),
    "minicpm": Family(
        "granite",
        {**RMS, "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
         "logit_scale": "logits_scaling"},
        paired_rotary=True,
    ),
    "minicpm3": Family(
        "minicpm3",
        {
            **RMS, "attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank",
            "rope.dimension_count": "qk_rope_head_dim",
        },
        names=LATENT, latent=True,
    ),
    "chatglm": Family(
        "glm", names={"ffn_up": "mlp.gate_up_proj"}, splits=QKV,
    ),
    "qwen": Family("qwen2", constants={"use_sliding_window": False}, splits=QKV),
    "apertus": Family(
        "apertus", names={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        flags={"attention_bias": "attn_q.bias"},
        listed={
            "xielu.alpha_n": ("mlp.act_fn.alpha_n", (1,)), "xielu.alpha_p": ("mlp.act_fn.alpha_p", (1,)),
            "xielu.beta": ("mlp.act_fn.beta", ()), "xielu.eps": ("mlp.act_fn.eps", ()),
        },
    ),
    "jais2": Family(
        "jais2", _LAYER_NORM, flags={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
    ),
    "gemma3n": Family(
        "gemma3n_text",
        {
            **_GEMMA, "final_logit_softcapping": "final_logit_softcapping", "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs", "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        },
        names={**_SANDWICH, **_PER_LAYER, **_ALTUP},
        top_names={
            **_PER_LAYER_TOP, "altup_proj": "model.altup_projections.{}",
            "altup_unembd_proj": "model.altup_unembed_projections.{}",
        },
    ),
    "gemma4": Family(
        "gemma4_text",
        {
            **_GEMMA, "final_logit_softcapping": "final_logit_softcapping",
            "attention.shared_kv_layers": "num_kv_shared_layers", "attention.key_length": "global_head_dim",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "expert_count": "num_experts", "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        names={
            **_SANDWICH, **_PER_LAYER, "layer_output_scale": "=layer_scalar", "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "=router.scale", "ffn_down_exps.scale": "=router.per_expert_scale",
            "ffn_gate_up_exps": "=experts.gate_up_proj", "ffn_down_exps": "=experts.down_proj",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        top_names=_PER_LAYER_TOP,
        assembled={"experts.gate_up_proj": Assembly(("ffn_gate_exps.weight", "ffn_up_exps.weight"))},
        varying=("feed_forward_length", "attention.head_count_kv"),
    ),
    "gpt2": Family(
        "gpt2", _GPT, names=_GPT_NAMES, top_names=_GPT_TOP, prefix="transformer.h.",
        assembled={
            f"{name}.weight": Assembly((f"{part}.weight",), transposed=(True,), stacked=False)
            for part, name in _GPT_NAMES.items() if "ln_" not in name
        },
    ),
    "starcoder": Family("gpt_bigcode", _GPT, names=_GPT_NAMES, top_names=_GPT_TOP, prefix="transformer.h."),
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
}  # fmt: skip
"""`general.architecture` -> what is known of it."""
