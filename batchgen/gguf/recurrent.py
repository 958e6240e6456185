"""Configuration of GGUF models with recurrent layers, from several keys of the metadata and from the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from batchgen.errors import ModelError
from batchgen.gguf.metadata import Adjust, Metadata


def _layers(read: Metadata, config: Mapping[str, Any], kinds: Mapping[str, str], other: str) -> list[str]:
    """The type of each layer: that of the first of these tensors that it has, else `other`."""
    tensors = read.header.tensors
    return [
        next((kind for part, kind in kinds.items() if f"blk.{i}.{part}.weight" in tensors), other)
        for i in range(config["num_hidden_layers"])
    ]


def _hybrid(read: Metadata, config: Mapping[str, Any], other: str = "linear_attention") -> dict[str, Any]:
    """Layers with attention and others, which the file says have no keys."""
    return {
        "num_key_value_heads": read.largest("attention.head_count_kv"),
        "layer_types": _layers(read, config, {"attn_q": "full_attention"}, other),
    }


def _lfm2(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return _hybrid(read, config, "conv")


def _delta_rule(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layer_types": _layers(read, config, {"attn_q": "full_attention"}, "linear_attention"),
        "linear_conv_kernel_dim": read.integer("ssm.conv_kernel"),
        "linear_key_head_dim": read.integer("ssm.state_size"),
        "linear_num_key_heads": read.integer("ssm.group_count"),
        "linear_num_value_heads": read.integer("ssm.time_step_rank"),
        "linear_value_head_dim": _head_size(read),
    }


def _head_size(read: Metadata) -> int:
    """Size of the heads of recurrent layers."""
    return read.integer("ssm.inner_size") // read.integer("ssm.time_step_rank")


def _expansion(read: Metadata, config: Mapping[str, Any]) -> int:
    """Channels of Mamba layers as a multiple of the hidden size."""
    channels, hidden = read.integer("ssm.inner_size"), config["hidden_size"]
    if channels % hidden:
        raise read.wrong("ssm.inner_size", f"a multiple of {hidden}")
    return int(channels // hidden)


def _mamba(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    read.value("ssm.dt_b_c_rms")  # which chooses the family
    return {"expand": _expansion(read, config)}


def _mamba2(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"expand": _expansion(read, config), "head_dim": _head_size(read)}


def _granitehybrid(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if read.value("rope.scaling.finetuned") is not False:
        raise read.wrong("rope.scaling.finetuned", "false: files of Bamba are not read")
    sizes = {"mamba_expand": _expansion(read, config), "mamba_d_head": _head_size(read)}
    if not config["num_local_experts"]:
        sizes["shared_intermediate_size"] = read.rows("blk.0.ffn_gate.weight")
    return {**_hybrid(read, config), **sizes, "position_embedding_type": None}


def _falcon_h1(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"mamba_d_head": _head_size(read)}


def _nemotron_h(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_up_exps": "moe"}
    return {
        "layers_block_type": _layers(read, config, kinds, "mlp"),
        "num_key_value_heads": read.largest("attention.head_count_kv"),
        "intermediate_size": read.largest("feed_forward_length"),
        "mamba_head_dim": _head_size(read),
    }


def _jamba(read: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration has a period and an offset of layers with attention, and of those with experts."""
    sizes, count = {"mamba_expand": _expansion(read, config)}, config["num_hidden_layers"]
    for part, name in (("attn_q", "attn"), ("ffn_gate_inp", "expert")):
        places = [i for i, kind in enumerate(_layers(read, config, {part: name}, "")) if kind]
        offset, period = places[0] if places else count, places[1] - places[0] if len(places) > 1 else count + 1
        if places != [i for i in range(count) if i % period == offset]:
            raise ModelError(f"{read.header.path}: {part} is not at one distance in the layers. Copy the file again.")
        sizes |= {f"{name}_layer_period": period, f"{name}_layer_offset": offset}
    return {**sizes, "num_key_value_heads": read.largest("attention.head_count_kv")}


RECURRENT: Final[Mapping[str, Adjust]] = {
    **dict.fromkeys(("lfm2", "lfm2moe"), _lfm2),
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _delta_rule),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _nemotron_h),
    "granitehybrid": _granitehybrid,
    "falcon-h1": _falcon_h1,
    "jamba": _jamba,
    "mamba": _mamba,
    "mamba2": _mamba2,
}
"""Architecture -> configuration that follows from several keys."""
