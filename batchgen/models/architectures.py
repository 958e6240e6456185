"""Choice of the implementation for a model, from config.json alone, without importing torch or transformers."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from batchgen.errors import ModelError
from batchgen.models.native_config import NATIVE_TYPES, NativeUnsupported, parse_native_config

Implementation = Literal["native", "transformers"]
Requested = Literal["auto", "native", "transformers"]

_OWN_ATTENTION: Final = "its attention in transformers does not go through the attention interface"
_RECURRENT: Final = "it keeps a recurrent state in addition to keys and values"
_SPARSE: Final = "it selects the keys of its attention by a learned index"
_ENCODER: Final = "it is an encoder, or needs one"
_REASONS: Final[dict[str, str]] = {
    _OWN_ATTENTION: (
        "bloom cpmant ctrl diffllama doge falcon gpt_neo gpt_neox_japanese hrm_text inkling inkling_text "
        "inkling2 inkling2_text mpt openai-gpt xglm xlm xlnet reformer blt"
    ),
    _RECURRENT: "mamba mamba2 falcon_mamba falcon_h1 rwkv xlstm",
    _SPARSE: "deepseek_v32 deepseek_v4 glm_moe_dsa minimax_m3_vl_text dots3_note dots3_note_text hy_v4 axk2",
    _ENCODER: (
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod distilbert modernbert t5 mt5 umt5 "
        "bart mbart marian pegasus bigbird_pegasus blenderbot blenderbot-small plbart prophetnet mvp whisper trocr "
        "musicgen musicgen_melody moshi git"
    ),
}
_UNSUPPORTED: Final[dict[str, str]] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
_HYBRIDS: Final = (
    "jamba", "bamba", "zamba", "zamba2", "recurrent_gemma", "nemotron_h", "lfm2", "lfm2_moe", "lfm3",
    "granitemoehybrid", "kimi_linear", "minimax", "olmo_hybrid", "bailing_hybrid", "qwen3_next", "qwen3_5",
    "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text", "zaya",
)  # fmt: skip
"""Types some of whose layers are recurrent unless their configuration says otherwise."""
_HYBRID_KEYS: Final = (
    "layer_types", "layers_block_type", "attn_layer_indices", "attn_layer_period", "hybrid_override_pattern",
    "block_types", "full_attn_idxs", "full_attention_interval", "layer_group_size", "linear_attn_config",
)  # fmt: skip
"""Keys that say which layers of a hybrid type are recurrent. The library derives the type of each layer from them."""
_LAYER_TYPES: Final = ("full_attention", "sliding_attention", "chunked_attention", "attention")
_NOT_ATTENTION: Final = {
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "recurrent", "hybrid", "hybrid_sliding"), _RECURRENT),
    "conv": _RECURRENT,
    **dict.fromkeys(("mlp", "moe"), "a layer without attention is not supported"),
    "indexed_attention": _SPARSE,
}
"""Type of a layer -> why it is not supported."""


def choose_implementation(config: Mapping[str, Any], requested: Requested) -> Implementation:
    """Choose the implementation for a config.json: native if it supports the model, else transformers.

    Raises:
        ModelError: no implementation, or not the requested one, supports the model; the message names the reason.
    """
    _check_supported(config)
    name = str(config["model_type"])
    if name in NATIVE_TYPES:
        if requested == "transformers":
            return "transformers"
        try:
            parse_native_config(config)
        except NativeUnsupported as error:
            if requested == "native":
                raise ModelError(f"{error} Use --model-impl transformers.") from None
            return "transformers"
        return "native"
    if requested == "native":
        raise ModelError(
            f"The native decoder does not have the architecture {name}; it has {', '.join(NATIVE_TYPES)}. "
            "Use --model-impl auto or transformers."
        )
    if name not in causal_lm_types():
        raise ModelError(
            f"The architecture {name} is not supported: the installed transformers has no causal language model of "
            f"that type. Supported: {', '.join(NATIVE_TYPES)} natively, and most decoders of transformers."
        )
    return "transformers"


def _check_supported(config: Mapping[str, Any]) -> None:
    name = str(config["model_type"])
    text = config.get("text_config")
    if name in _UNSUPPORTED:
        raise ModelError(f"The architecture {name} is not supported: {_UNSUPPORTED[name]}. Use another model.")
    if config.get("is_encoder_decoder"):
        raise ModelError(f"The architecture {name} is an encoder-decoder, which is not supported. Use a decoder.")
    if isinstance(text, dict) or any(key in config for key in ("vision_config", "audio_config")):
        raise ModelError(
            f"The architecture {name} is multimodal, which is not supported yet. Use a text-only checkpoint."
        )
    classes = config.get("architectures") or ()
    if classes and not any(str(c).endswith(("ForCausalLM", "LMHeadModel")) for c in classes):
        raise ModelError(
            f"{classes[0]} ({name}) is not a causal language model. Use a checkpoint with a language head."
        )
    if config.get("auto_map") and name not in causal_lm_types():
        raise ModelError(
            f"The architecture {name} needs code from its folder, which batchgen never runs. Use another model."
        )
    if config.get("index_topk"):
        raise ModelError(f"The architecture {name} is not supported: {_SPARSE}. Use another model.")
    if name in _HYBRIDS and not any(config.get(key) for key in _HYBRID_KEYS):
        raise ModelError(f"The architecture {name} is not supported: {_RECURRENT}. Use another model.")
    check_layer_types(name, config.get("layer_types") or config.get("layers_block_type"))


def check_layer_types(name: str, types: Any) -> None:
    """Check that all layers are attention, whatever the architecture `name` is called.

    Args:
        name: the `model_type`.
        types: the type of each layer, or None if the configuration does not list them.

    Raises:
        ModelError: a layer has another type; the message says what is missing.
    """
    listed = [str(kind) for kind in types] if isinstance(types, list | tuple) else []
    others = sorted(set(listed) - set(_LAYER_TYPES))
    if others:
        count, reason = listed.count(others[0]), _NOT_ATTENTION.get(others[0], "their computation is not known here")
        raise ModelError(
            f"The architecture {name} is not supported: it has layers of type {others[0]} ({count} of {len(listed)}): "
            f"{reason}. Use another model."
        )


@cache
def causal_lm_types() -> frozenset[str]:
    """Model types for which the installed transformers has a causal language model.

    Parsed from the library's source, because importing it is slow; imported if the source does not look as expected.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is not None and spec.origin is not None:
        names = _parse_mapping(Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py")
        if names:
            return names
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _parse_mapping(file: Path) -> frozenset[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
            and isinstance(node.value, ast.Call)
        ):
            try:
                return frozenset(str(name) for name, _ in ast.literal_eval(node.value.args[0]))
            except (ValueError, IndexError, TypeError):
                return frozenset()
    return frozenset()
