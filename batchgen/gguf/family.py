"""What is known of one architecture of GGUF files: its configuration keys, tensor names and changes to stored weights.

The tables have what llama.cpp's converter does to each family. Keys are those of the metadata without the
architecture's name in front; names of tensors are those of the checkpoint on the hub, without the number of the layer.
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
LATENT: Final = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
"""Names of multi-head latent attention."""
QKV: Final = {"attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
SANDWICH: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PER_LAYER: Final = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
PER_LAYER_TOP: Final = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
ALTUP: Final = {
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "=altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
GPT_NAMES: Final = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
GPT_TOP: Final = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
}
MIXTRAL_NAMES: Final = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}
EXPERTS: Final = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
DEEPSEEK_EXPERTS: Final = {
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
RMS: Final = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}


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


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture."""

    model_type: str
    """`model_type` of the configuration in transformers."""
    keys: Mapping[str, str] = field(default_factory=lambda: RMS)
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
    listed: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """List in the metadata, of one number for each layer -> name and shape of that tensor in the checkpoint."""
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Stored tensor of a layer -> tensors of the checkpoint that its rows are, of q, k and v."""
    prefix: str = "model.layers."
    """Name of the layers in the checkpoint."""
    varying: tuple[str, ...] = ()
    """Keys of every architecture in which the layers may differ."""
    latent: bool = False
    """Whether it has multi-head latent attention."""
    paired_rotary: bool = False
    """Whether rows of q and k are stored for rotary embeddings of adjacent pairs instead of halves."""
    halved_rotary: bool = False
    """Whether rotated rows of q and k are stored in halves instead of adjacent pairs."""
    fused_by_kind: bool = False
    """Whether the rows of a fused q, k and v are stored by kind instead of by head."""
    norms_plus_one: bool = False
    """Whether norms are stored with one added."""
