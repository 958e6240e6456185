"""Configuration of the native decoder, parsed from a Hugging Face config.json without importing torch.

Families: Llama, Mistral, Qwen2, Qwen3. Missing keys get the family's default in transformers. Both spellings of rope
settings are supported: `rope_theta` + `rope_scaling`, and `rope_parameters`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from batchgen.errors import ModelError
from batchgen.kernels.rope_config import ROPE_KINDS, RopeConfig, RopeKind
from batchgen.models.checkpoint.context import Contexts, contexts_of
from batchgen.models.checkpoint.text_part import is_nested, text_config

NATIVE_TYPES: Final = ("llama", "mistral", "qwen2", "qwen3")
_HEADLESS: Final = re.compile("(Llama|Mistral|Qwen[23])(Model|ForSequenceClassification)")
_ACTIVATIONS: Final = (
    "silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "quick_gelu", "relu",
)  # fmt: skip
"""Activations of `kernels.activation`, which cannot be imported without torch."""
_REQUIRED: Final = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}
_SIZES: Final = {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_NESTED_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "llama": {**_SIZES, "intermediate_size": 11008},
    "mistral": {**_SIZES, "intermediate_size": 14336},
    "qwen2": {**_SIZES, "vocab_size": 151936, "intermediate_size": 22016},
    "qwen3": {**_SIZES, "vocab_size": 151936, "intermediate_size": 22016},
}
"""Sizes in transformers, which nested configurations leave out where they are these."""
_MAX_SIZE: Final = 1 << 31
_MAX_SIZES: Final = {"num_hidden_layers": 10_000}
"""Largest sizes, beyond which a file is damaged."""


class NativeUnsupported(ModelError):
    """The model belongs to a native family but uses a feature that only the transformers path has."""


@dataclass(frozen=True, slots=True)
class NativeConfig:
    """Sizes and options of a native decoder."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    activation: str
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens; None: full attention."""
    rope: RopeConfig
    contexts: Contexts

    @property
    def q_size(self) -> int:
        """Number of rows of q in the fused projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Number of rows of k, and of v, in the fused projection."""
        return self.num_kv_heads * self.head_dim


class _Reader:
    """Typed access to config.json, with the family's defaults."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        text = text_config(config)
        self.model_type = str(text["model_type"])
        nested = _NESTED_DEFAULTS[self.model_type] if is_nested(config) else {}
        self.values = {**_DEFAULTS[self.model_type], **nested, **text}

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        most = _MAX_SIZES.get(key, _MAX_SIZE)
        if type(value) is not int or not 1 <= value <= most:
            problem = f"{key} must be a positive integer up to {most}, got {str(value)[:80]!r}"
            raise ModelError(f"config.json: {problem}. Copy the file again.")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ModelError(f"config.json: {key} must be a number, got {str(value)[:80]!r}. Copy the file again.")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        value = False if value is None else value
        if type(value) is not bool:
            raise ModelError(f"config.json: {key} must be true or false, got {value!r}. Copy the file again.")
        return value


def is_headless(config: Mapping[str, Any]) -> bool:
    """Whether a decoder is stored without a language head: alone, or with a head that scores sequences."""
    classes = [str(cls) for cls in config.get("architectures") or ()]
    known = not is_nested(config) and config.get("model_type") in NATIVE_TYPES
    return known and any(map(_HEADLESS.fullmatch, classes))


def parse_native_config(config: Mapping[str, Any]) -> NativeConfig:
    """Parse a config.json of one of `NATIVE_TYPES`, or the nested part of one whose text decoder has such a type.

    Raises:
        NativeUnsupported: it uses a feature that this decoder does not have.
        ModelError: a value is invalid.
    """
    read = _Reader(config)
    for key in _REQUIRED:
        read.integer(key)
    heads, layers = read.integer("num_attention_heads"), read.integer("num_hidden_layers")
    kv_heads = read.integer("num_key_value_heads", heads)
    head_dim = read.integer("head_dim", read.integer("hidden_size") // heads)
    max_positions = read.integer("max_position_embeddings")
    if heads % kv_heads:
        raise ModelError(f"config.json: {heads} attention heads cannot share {kv_heads} kv heads. Copy the file again.")
    activation = str(read.values.get("hidden_act", "silu"))
    if activation not in _ACTIVATIONS:
        raise NativeUnsupported(f"The native decoder does not have the activation {activation}.")
    bias = read.model_type in ("llama", "qwen3") and read.flag("attention_bias")
    mlp_bias = read.model_type == "llama" and read.flag("mlp_bias")
    return NativeConfig(
        model_type=read.model_type,
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("hidden_size"),
        intermediate_size=read.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=read.number("rms_norm_eps", 1e-6),
        activation=activation,
        tied=read.flag("tie_word_embeddings"),
        qkv_bias=bias or read.model_type == "qwen2",
        o_bias=bias,
        mlp_bias=mlp_bias,
        qk_norm=read.model_type == "qwen3",
        windows=_windows(read, layers),
        rope=_rope(read, head_dim, max_positions),
        contexts=_contexts(read, max_positions),
    )


def _contexts(read: _Reader, max_positions: int) -> Contexts:
    rope = read.values.get("rope_scaling") or read.values.get("rope_parameters") or {}
    original = read.values.get("original_max_position_embeddings")
    return contexts_of(read.model_type, max_positions, rope, original if type(original) is int else None)


_LAYER_TYPES: Final = ("full_attention", "sliding_attention")


def _windows(read: _Reader, layers: int) -> tuple[int | None, ...]:
    types = read.values.get("layer_types")
    if isinstance(types, list) and any(kind not in _LAYER_TYPES for kind in types):
        raise NativeUnsupported("The native decoder does not have these layer_types.")
    if read.model_type == "llama" or read.values.get("sliding_window") is None:
        return (None,) * layers
    window = read.integer("sliding_window")
    if read.model_type == "mistral":
        if types:
            raise NativeUnsupported("The native decoder does not read layer_types of a Mistral model.")
        return (window,) * layers
    if not read.flag("use_sliding_window"):
        return (None,) * layers
    if types is None:
        full = read.integer("max_window_layers", 28) if read.values.get("max_window_layers") != 0 else 0
        return tuple(window if i >= full else None for i in range(layers))
    if len(types) < layers:
        raise NativeUnsupported("The native decoder does not have these layer_types.")
    return tuple(window if kind == "sliding_attention" else None for kind in types[:layers])


def _rope(read: _Reader, head_dim: int, max_positions: int) -> RopeConfig:
    stated = read.values.get("rope_scaling") or read.values.get("rope_parameters") or {}
    if not isinstance(stated, dict) or any(isinstance(value, dict) for value in stated.values()):
        raise NativeUnsupported("The native decoder does not have rope settings per layer type.")
    settings = dict(stated)
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise NativeUnsupported(f"The native decoder does not have the rope type {str(kind)[:80]!r}.")
    if (settings.get("partial_rotary_factor") or read.values.get("partial_rotary_factor") or 1.0) != 1.0:
        raise NativeUnsupported("The native decoder does not have partial rotary embeddings.")
    if head_dim % 2:
        raise ModelError(f"config.json: rotary embeddings need an even head size, got {head_dim}. Copy the file again.")
    theta = settings.get("rope_theta") or read.values.get("rope_theta") or 10_000.0
    try:
        base: dict[str, Any] = {"dim": head_dim, "theta": float(theta), "max_positions": max_positions}
        return RopeConfig(kind=cast(RopeKind, kind), **base, **_rope_numbers(read, kind, settings, head_dim))
    except Exception as error:  # its settings are of many kinds, each with its own values
        raise ModelError(
            f"config.json: rope type {kind!r} has a missing or invalid value: {error}. Copy the file again."
        ) from None


def _rope_numbers(read: _Reader, kind: str, settings: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    if kind == "default":
        return {}
    if kind in ("linear", "dynamic"):
        return {"factor": float(settings["factor"])}
    max_positions = read.integer("max_position_embeddings")
    # As in transformers, a top-level value has precedence over one in the rope settings.
    top_level = read.values.get("original_max_position_embeddings")
    original = int(top_level or settings.get("original_max_position_embeddings") or max_positions)
    factor = settings.get("factor")
    numbers: dict[str, Any] = {
        "original_positions": original,
        "factor": float(factor) if factor is not None else max_positions / original,
    }
    if kind == "llama3":
        return {**numbers, **{key: float(settings[key]) for key in ("low_freq_factor", "high_freq_factor")}}
    optional = ("attention_factor", "mscale", "mscale_all_dim") if kind == "yarn" else ("attention_factor",)
    numbers |= {key: float(settings[key]) for key in optional if settings.get(key) is not None}
    if kind == "yarn":
        numbers |= {
            "beta_fast": float(settings.get("beta_fast") or 32),
            "beta_slow": float(settings.get("beta_slow") or 1),
        }
        return {**numbers, "truncate": bool(settings.get("truncate", True))}
    for key in ("short_factor", "long_factor"):
        numbers[key] = tuple(float(x) for x in settings[key])
        if len(numbers[key]) != head_dim // 2:
            raise ValueError(f"{key} ({len(numbers[key])} entries for {head_dim // 2} frequencies)")
    return numbers
