"""Choice of the implementation for a model, from config.json alone, without importing torch or transformers."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from batchgen.errors import ModelError
from batchgen.models.checkpoint.text_part import find_text_tensors, is_nested, text_config
from batchgen.models.native.config import NATIVE_TYPES, NativeUnsupported, parse_native_config

Implementation = Literal["native", "transformers"]
Requested = Literal["auto", "native", "transformers"]

_OWN_ATTENTION: Final = "its attention in transformers does not go through the attention interface"
_RECURRENT: Final = "it keeps a recurrent state in addition to keys and values"
_SPARSE: Final = "it selects the keys of its attention by a learned index"
_ENCODER: Final = "it is an encoder, or needs one"
_POSITIONS: Final = "it counts positions from its padding id, over the whole input"
_DRAFT: Final = "it drafts tokens for another model, whose states it reads"
_ACTIONS: Final = "it writes actions of a robot, and has no language head"
_DIFFUSION: Final = "it denoises blocks of tokens instead of writing one token after another"
_CONDITIONED: Final = "its decoder reads what is packed with it at every token, so text alone does not run"
_REASONS: Final[dict[str, str]] = {
    _OWN_ATTENTION: (
        "bloom cpmant ctrl diffllama doge falcon gpt_neo gpt_neox_japanese hrm_text inkling inkling_text "
        "inkling_mm_model inkling2 inkling2_text inkling2_loop inkling2_loop_text mpt openai-gpt xglm xlm "
        "xlnet reformer blt"
    ),
    _RECURRENT: "rwkv xlstm",
    _SPARSE: "deepseek_v4",
    _ENCODER: (
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod distilbert modernbert t5 mt5 umt5 "
        "bart mbart marian pegasus bigbird_pegasus blenderbot blenderbot-small plbart prophetnet mvp whisper trocr "
        "musicgen musicgen_melody moshi git"
    ),
    _DIFFUSION: "diffusion_gemma",
    _CONDITIONED: "blip evolla idefics kyutai_speech_to_text voxtral_realtime",
    _POSITIONS: "kosmos-2 kosmos-2.5",
    _DRAFT: "gemma4_assistant gemma4_unified_assistant",
    _ACTIONS: "pi0",
}
_UNSUPPORTED: Final[dict[str, str]] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
HYBRIDS: Final = (
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
MIXERS: Final = (
    "lfm2", "lfm2_moe", "lfm3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lara_mini",
    "granitemoehybrid", "nemotron_h", "bamba", "falcon_h1", "mamba2", "zamba2", "kimi_linear", "bailing_hybrid",
    "jamba", "mamba", "falcon_mamba", "zamba",
)  # fmt: skip
"""Hybrid types whose recurrent layers run."""
_NAMED_BY_WHOLE: Final = ("minimax_m3_vl",)
"""Types for whose stored names the library has rules in the class of the whole checkpoint alone."""
_LAYER_TYPES: Final = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "attention",
    "indexed_attention",
    "minimax_m3_sparse",
)
_NOT_ATTENTION: Final = {
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "recurrent", "hybrid", "hybrid_sliding"), _RECURRENT),
    "conv": _RECURRENT,
    **dict.fromkeys(("mlp", "moe"), "a layer without attention is not supported"),
}
"""Type of a layer -> why it is not supported."""


def choose_implementation(
    config: Mapping[str, Any], requested: Requested, names: Collection[str] = ()
) -> Implementation:
    """Choose the implementation for a config.json: native if it supports the text decoder, else transformers.

    Args:
        config: contents of config.json.
        requested: the implementation that the user asks for.
        names: names of the stored tensors.

    Raises:
        ModelError: no implementation, or not the requested one, supports the model; the message names the reason.
    """
    _check_supported(config)
    text = text_config(config)
    name = str(text.get("model_type"))
    if name in NATIVE_TYPES and (runs_alone(config, names) or not is_nested(config)):
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
    if name not in causal_lm_types() and config["model_type"] not in packed_types():
        raise ModelError(
            f"The architecture {name} is not supported: the installed transformers has no causal language model of "
            f"that type. Supported: {', '.join(NATIVE_TYPES)} natively, and most decoders of transformers."
        )
    return "transformers"


def runs_alone(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether the nested text decoder of a checkpoint runs as a causal language model without the class around it.

    It does if the library has such a model, and the stored `names` have its blocks under one prefix. The library's own
    class reads other names.
    """
    if not is_nested(config) or text_config(config).get("model_type") not in causal_lm_types():
        return False
    if config["model_type"] not in packed_types():
        return True
    if config["model_type"] in _NAMED_BY_WHOLE:
        return False
    blocks = f"{find_text_tensors(names, config).decoder}layers.0."
    return any(name.startswith(blocks) for name in names)


def _check_supported(config: Mapping[str, Any]) -> None:
    text = text_config(config)
    name, part = str(config["model_type"]), str(text.get("model_type") or "")
    for kind in (name, part):
        if kind in _UNSUPPORTED:
            raise ModelError(f"The architecture {kind} is not supported: {_UNSUPPORTED[kind]}. Use another model.")
    if config.get("is_encoder_decoder") or text.get("is_encoder_decoder"):
        raise ModelError(f"The architecture {name} is an encoder-decoder, which is not supported. Use a decoder.")
    alone = is_nested(config) and part in causal_lm_types()
    known = alone or name in causal_lm_types() or name in packed_types()
    _check_class(config, name)
    if config.get("auto_map") and not known:
        raise ModelError(
            f"The architecture {name} needs code from its folder, which batchgen never runs. Use another model."
        )
    if name in HYBRIDS and name not in MIXERS and not any(text.get(key) for key in _HYBRID_KEYS):
        raise ModelError(f"The architecture {name} is not supported: {_RECURRENT}. Use another model.")
    check_layer_types(name, text.get("layer_types") or text.get("layers_block_type"))


def check_layer_types(name: str, types: Any) -> None:
    """Check that all layers are attention, whatever the architecture `name` is called.

    Args:
        name: the `model_type`.
        types: the type of each layer, or None if the configuration does not list them.

    Raises:
        ModelError: a layer has another type; the message says what is missing.
    """
    listed = [str(kind) for kind in types] if isinstance(types, list | tuple) else []
    others = [] if name in MIXERS else sorted(set(listed) - set(_LAYER_TYPES))
    if others:
        count, reason = listed.count(others[0]), _NOT_ATTENTION.get(others[0], "their computation is not known here")
        raise ModelError(
            f"The architecture {name} is not supported: it has layers of type {others[0]} ({count} of {len(listed)}): "
            f"{reason}. Use another model."
        )


def _check_class(config: Mapping[str, Any], name: str) -> None:
    """Refuse classes without a language head; those around a nested decoder may have any name that names no task."""
    classes = [str(cls) for cls in config.get("architectures") or ()]
    heads = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", packed_types().get(name, "ForCausalLM"))
    if not classes or any(cls.endswith(heads) for cls in classes):
        return
    if not is_nested(config) or "For" in classes[0]:
        raise ModelError(
            f"{classes[0]} ({name}) is not a causal language model. Use a checkpoint with a language head."
        )


@cache
def causal_lm_types() -> frozenset[str]:
    """Model types for which the installed transformers has a causal language model."""
    return frozenset(_library_classes("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"))


@cache
def packed_types() -> Mapping[str, str]:
    """Model types for which the installed transformers has a class that reads images or audio -> its name."""
    return _library_classes("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES")


@cache
def _library_classes(mapping: str) -> Mapping[str, str]:
    """Model types and class names of one of the library's mappings.

    Parsed from the library's source, because importing it is slow; imported if the source does not look as expected.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is not None and spec.origin is not None:
        names = _parse_mapping(Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py", mapping)
        if names:
            return names
    from transformers.models.auto import modeling_auto

    return dict(getattr(modeling_auto, mapping, {}))


def _parse_mapping(file: Path, mapping: str) -> dict[str, str]:
    try:
        calls = {
            node.targets[0].id: node.value
            for node in ast.parse(file.read_text(encoding="utf-8")).body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        return _entries(calls, mapping)
    except (OSError, SyntaxError, ValueError, IndexError, TypeError, KeyError, AttributeError):
        return {}


def _entries(values: Mapping[str, ast.expr], mapping: str) -> dict[str, str]:
    """Entries of `mapping = OrderedDict([(type, class), *list(other_mapping.items()), ...])`."""
    classes: dict[str, str] = {}
    listed: Any = values[mapping]
    for entry in listed.args[0].elts:
        if isinstance(entry, ast.Starred):
            inner: Any = entry.value  # list(other_mapping.items())
            classes |= _entries(values, inner.args[0].func.value.id)
        else:
            key, name = ast.literal_eval(entry)
            classes[str(key)] = str(name)
    return classes
