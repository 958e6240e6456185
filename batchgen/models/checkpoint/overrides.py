"""Overrides of a checkpoint's config.json: `--hf-overrides` and `--rope-scaling`.

They are merged before anything else reads the configuration, and are part of its digest. Torch is not imported;
transformers is only for keys that not every model reads.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any, Final

from batchgen.errors import ModelError
from batchgen.models.checkpoint.text_part import NESTED
from batchgen.request.foreign_text import read_json

_ROPE: Final = ("rope_scaling", "rope_parameters", "rope_theta")
_ROPE_KEPT: Final = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Rope settings that scale nothing: they stay unless they are given."""
_ORIGINAL: Final = "original_max_position_embeddings"
_ROPE_KEYS: Final = frozenset((
    *_ROPE_KEPT, _ORIGINAL, "rope_type", "type", "factor", "attention_factor", "beta_fast", "beta_slow", "truncate",
    "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "short_mscale",
    "long_mscale",
))  # fmt: skip
_ALWAYS_READ: Final = frozenset((
    *_ROPE, *NESTED, _ORIGINAL, "model_type", "architectures", "dtype", "torch_dtype", "tie_word_embeddings",
    "eos_token_id", "max_position_embeddings", "quantization_config", "compression_config",
))  # fmt: skip
"""Keys that are read whatever the type of the model is."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """Values that replace those of a config.json, as JSON texts; None: none."""

    hf_overrides: str | None = None
    """Object of keys to replace; objects of nested configurations are merged with theirs."""
    rope_scaling: str | None = None
    """Rope settings of the text decoder, with or without its `rope_theta`."""

    def __bool__(self) -> bool:
        return self.hf_overrides is not None or self.rope_scaling is not None

    @property
    def options(self) -> Mapping[str, str]:
        """Option -> its value in one spelling, of those that are given."""
        texts = {f"--{name.replace('_', '-')}": value for name, value in asdict(self).items() if value is not None}
        return {name: json.dumps(read_json(value), sort_keys=True) for name, value in texts.items()}

    def merged(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration with the overrides.

        Raises:
            ModelError: a key is one that nothing reads; the message names it.
        """
        changed = dict(config)
        if self.hf_overrides is not None:
            changes = read_json(self.hf_overrides)
            changed = _merged(changed, changes)
            _check_known(changed, changes)
        if self.rope_scaling is not None:
            changed = _with_text_rope(changed, read_json(self.rope_scaling))
        return changed

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Let errors of the merged configuration say that it is merged."""
        try:
            yield
        except ModelError as error:
            if not self or str(error).startswith("--"):
                raise
            problem = str(error).replace(" Copy the file again.", "")
            raise ModelError(f"{problem} The configuration is changed by {' and '.join(self.options)}.") from error


NO_OVERRIDES: Final = Overrides()


def _merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(config)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(changed.get(key), dict) and key.endswith("_config"):
            changed[key] = _merged(changed[key], value)
        elif key not in _ROPE:
            changed[key] = value
    for key in _ROPE:
        if key in changes:
            settings = {"rope_theta": changes[key]} if key == "rope_theta" else changes[key]
            changed = _with_rope(changed, settings, f"--hf-overrides: {key}")
    return changed


def _with_text_rope(config: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """The configuration with the rope settings of its text decoder replaced."""
    key = next((key for key in NESTED if isinstance(config.get(key), dict)), None)
    if key is not None:
        return {**config, key: _with_text_rope(config[key], settings)}
    return _with_rope(config, settings, "--rope-scaling")


def _with_rope(config: Mapping[str, Any], rope: Any, option: str) -> dict[str, Any]:
    """A decoder's configuration with other rope settings, in the spelling that it has."""
    if rope is None:
        rope = {"rope_type": "default"}
    if not isinstance(rope, dict):
        raise ModelError(f"{option} must be an object of rope settings, got {str(rope)[:80]!r}.")
    spelling = "rope_parameters" if isinstance(config.get("rope_parameters"), dict) else "rope_scaling"
    old = config.get(spelling) or {}
    if _is_nested(rope):
        return {key: value for key, value in config.items() if key not in _ROPE} | {"rope_parameters": rope}
    if isinstance(old, dict) and _is_nested(old):
        raise ModelError(
            f"{option}: the model has rope settings for each type of layer ({', '.join(old)}). Give them all, as an "
            "object of objects."
        )
    _check_rope_keys(rope, option)
    changed = dict(config)
    if set(rope) <= set(_ROPE_KEPT):  # the scaling stays
        settings = {**old, **rope}
    else:
        settings = {key: old[key] for key in _ROPE_KEPT if key in old} | rope
    if spelling == "rope_scaling" and "rope_theta" in settings:
        changed["rope_theta"] = settings.pop("rope_theta")
    if _ORIGINAL in rope and _ORIGINAL in changed:  # else it would have precedence
        changed[_ORIGINAL] = rope[_ORIGINAL]
    return {**changed, spelling: settings} if settings or spelling in changed else changed


def _is_nested(settings: Mapping[str, Any]) -> bool:
    return any(isinstance(value, dict) for value in settings.values())


def _check_rope_keys(rope: Mapping[str, Any], option: str) -> None:
    unknown = next((key for key in rope if key not in _ROPE_KEYS), None)
    if unknown is not None:
        raise ModelError(f"{option} has the unknown key {unknown[:80]!r}{_hint(unknown, _ROPE_KEYS)}. Remove it.")
    factor = rope.get("factor", 1)
    if isinstance(factor, int | float) and not factor > 0:
        raise ModelError(f"{option}: factor must be a positive number, got {factor!r}.")
    if not set(rope) <= set(_ROPE_KEPT) and not isinstance(rope.get("rope_type", rope.get("type")), str):
        raise ModelError(f'{option} names no rope_type. Add it, as in "rope_type": "yarn".')


def _check_known(config: Mapping[str, Any], changes: Mapping[str, Any], cls: Any = None, where: str = "") -> None:
    """Refuse the first key of `changes` that no class reads.

    Args:
        config: the merged configuration at this place.
        changes: the overrides at this place.
        cls: the library's class for it; None: that of its `model_type`.
        where: path of the place, such as `text_config.`.
    """
    nested = [key for key in changes if key in NESTED and isinstance(changes[key], dict)]
    others = [key for key in changes if key not in _ALWAYS_READ]
    if nested or others:
        cls = _class_of(config) if cls is None or cls.__name__ == "AutoConfig" else cls
    known = _keys_of(cls) if others else frozenset()
    unknown = next((key for key in others if key not in known), None)
    if unknown is not None:
        inner = next((n for n in NESTED if isinstance(config.get(n), dict) and unknown in config[n]), None)
        hint, remedy = (f"; {inner} has it", "Nest it there") if inner else (_hint(unknown, known), "Remove it")
        raise ModelError(
            f"--hf-overrides has the key {(where + unknown)[:80]!r}, which no configuration class of a "
            f"{config.get('model_type') or 'nested'} model reads{hint}. {remedy}."
        )
    for key in nested:
        part = getattr(cls, "sub_configs", {}).get(key)
        _check_known(config[key], changes[key], part, f"{where}{key}.")


def _hint(key: str, known: Collection[str]) -> str:
    close = get_close_matches(key, list(known), 1, 0.75)
    return f" (did you mean {close[0]}?)" if close else ""


def _class_of(config: Mapping[str, Any]) -> Any:
    """The library's configuration class of a model type; None if it has none."""
    from transformers import CONFIG_MAPPING  # slow to import

    name = config.get("model_type")
    return CONFIG_MAPPING[name] if name in CONFIG_MAPPING else None  # noqa: SIM401  # its `get` knows none


def _keys_of(cls: Any) -> frozenset[str]:
    """Keys that a configuration class of the library reads, without those that all classes have."""
    from transformers import PreTrainedConfig  # slow to import

    own = frozenset(getattr(cls, "__dataclass_fields__", {})) - frozenset(PreTrainedConfig.__dataclass_fields__)
    return own | frozenset(getattr(cls, "attribute_map", {}))
