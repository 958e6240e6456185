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
from batchgen.models.native.config import NATIVE_TYPES, NativeUnsupported, is_headless, parse_native_config

Implementation = Literal["native", "transformers"]
Requested = Literal["auto", "native", "transformers"]

_REASONS: Final[dict[str, str]] = {
    "it keeps a recurrent state in addition to keys and values": "rwkv xlstm",
    "it denoises blocks of tokens instead of writing one token after another": "diffusion_gemma",
    "its decoder reads what is packed with it at every token, so text alone does not run": (
        "blip evolla idefics kyutai_speech_to_text voxtral_realtime"
    ),
    "it counts positions from its padding id, over the whole input": "kosmos-2 kosmos-2.5",
    "it selects summaries of several keys by a learned index, which are not stored": (
        "deepseek_v4 glm5_next qwen4_exp qwen4_exp_text"
    ),
    "it groups its tokens into patches, whose bounds it computes from the whole input": "blt",
    "it needs the language of each row, whose adapters it has": "xmod",
    "it drafts tokens for another model, whose states it reads": "gemma4_assistant gemma4_unified_assistant",
}
"""Reasons that no forward without weights shows -> the types."""
_UNSUPPORTED: Final[dict[str, str]] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
_SETTINGS: Final[dict[tuple[str, object], str]] = {
    ("prefix_lm", True): "the tokens of a prompt see one another (prefix_lm)",
    ("is_causal", False): "its tokens see later ones too (is_causal)",
    ("recurrent_kv_cache_mode", "last_loop"): "loops see what later ones have stored (recurrent_kv_cache_mode)",
}
"""Values of the text decoder's configuration -> why models with them are not supported."""
ENCODERS: Final = (
    "bert", "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "modernbert", "distilbert", "electra", "ernie",
    "nomic_bert", "eurobert", "roberta-prelayernorm", "albert",
)  # fmt: skip
"""Types of encoders that run through the library's attention interface."""
_NAMED_BY_WHOLE: Final = ("minimax_m3_vl", "nemo_speechlm")
"""Types for whose stored names the library has rules in the class of the whole checkpoint alone."""


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
    if is_encoder(config):
        if requested == "native":
            raise ModelError("The native decoder computes no encoders. Use --model-impl auto or transformers.")
        return "transformers"
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


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether all tokens of a row see one another, and the checkpoint writes no text."""
    classes = [str(cls) for cls in config.get("architectures") or ()]
    writes = config.get("is_decoder") or any(cls.endswith(("ForCausalLM", "LMHeadModel")) for cls in classes)
    return config.get("model_type") in ENCODERS and not writes


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
    for (key, value), reason in _SETTINGS.items():
        if text.get(key) == value:
            raise ModelError(f"The architecture {name} is not supported: {reason}. Use another model.")
    if config.get("is_encoder_decoder") or text.get("is_encoder_decoder"):
        raise ModelError(f"The architecture {name} is an encoder-decoder, which is not supported. Use a decoder.")
    _check_class(config, name)
    types = (name, part) if is_nested(config) else (name,)
    if config.get("auto_map") and name not in packed_types() and causal_lm_types().isdisjoint(types):
        raise ModelError(
            f"The architecture {name} needs code from its folder, which batchgen never runs. Use another model."
        )


def _check_class(config: Mapping[str, Any], name: str) -> None:
    """Refuse classes without a language head; those around a nested decoder may have any name that names no task."""
    classes = [str(cls) for cls in config.get("architectures") or ()]
    if (
        not classes
        or is_headless(config)
        or any(cls.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for cls in classes)
    ):
        return
    if name in packed_types() and any(cls.endswith(packed_types()[name]) for cls in classes):
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
