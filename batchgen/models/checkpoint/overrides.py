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
    def given(self) -> Mapping[str, str]:
        """Option -> its value in one spelling, of those that are given."""
        found = {f"--{name.replace('_', '-')}": value for name, value in asdict(self).items() if value is not None}
        return {name: json.dumps(read_json(value), sort_keys=True) for name, value in found.items()}

    def merged(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration with the overrides.

        Raises:
            ModelError: a key is one that nothing reads; the message names it.
        """
        found = dict(config)
        if self.hf_overrides is not None:
            given = read_json(self.hf_overrides)
            found = _merged(found, given)
            _check_known(found, given)
        if self.rope_scaling is not None:
            found = _with_text_rope(found, read_json(self.rope_scaling))
        return found

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Let errors of the merged configuration say that it is merged."""
        try:
            yield
        except ModelError as error:
            if not self or str(error).startswith("--"):
                raise
            problem = str(error).replace(" Copy the file again.", "")
            raise ModelError(f"{problem} The configuration is changed by {' and '.join(self.given)}.") from error


NO_OVERRIDES: Final = Overrides()


def _merged(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(config)
    for key, value in given.items():
        if isinstance(value, dict) and isinstance(found.get(key), dict) and key.endswith("_config"):
            found[key] = _merged(found[key], value)
        elif key not in _ROPE:
            found[key] = value
    for key in _ROPE:
        if key in given:
            settings = {"rope_theta": given[key]} if key == "rope_theta" else given[key]
            found = _with_rope(found, settings, f"--hf-overrides: {key}")
    return found


def _with_text_rope(config: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """The configuration with the rope settings of its text decoder replaced."""
    key = next((key for key in NESTED if isinstance(config.get(key), dict)), None)
    if key is not None:
        return {**config, key: _with_text_rope(config[key], settings)}
    return _with_rope(config, settings, "--rope-scaling")


def _with_rope(config: Mapping[str, Any], given: Any, option: str) -> dict[str, Any]:
    """A decoder's configuration with other rope settings, in the spelling that it has."""
    if given is None:
        given = {"rope_type": "default"}
    if not isinstance(given, dict):
        raise ModelError(f"{option} must be an object of rope settings, got {str(given)[:80]!r}.")
    spelling = "rope_parameters" if isinstance(config.get("rope_parameters"), dict) else "rope_scaling"
    old = config.get(spelling) or {}
    if _is_nested(given):
        return {key: value for key, value in config.items() if key not in _ROPE} | {"rope_parameters": given}
    if isinstance(old, dict) and _is_nested(old):
        raise ModelError(
            f"{option}: the model has rope settings for each type of layer ({', '.join(old)}). Give them all, as an "
            "object of objects."
        )
    _check_rope_keys(given, option)
    found = dict(config)
    if set(given) <= set(_ROPE_KEPT):  # the scaling stays
        settings = {**old, **given}
    else:
        settings = {key: old[key] for key in _ROPE_KEPT if key in old} | given
    if spelling == "rope_scaling" and "rope_theta" in settings:
        found["rope_theta"] = settings.pop("rope_theta")
    if _ORIGINAL in given and _ORIGINAL in found:  # else it would have precedence
        found[_ORIGINAL] = given[_ORIGINAL]
    return {**found, spelling: settings} if settings or spelling in found else found


def _is_nested(settings: Mapping[str, Any]) -> bool:
    return any(isinstance(value, dict) for value in settings.values())


def _check_rope_keys(given: Mapping[str, Any], option: str) -> None:
    unknown = next((key for key in given if key not in _ROPE_KEYS), None)
    if unknown is not None:
        raise ModelError(f"{option} has the unknown key {unknown[:80]!r}{_hint(unknown, _ROPE_KEYS)}. Remove it.")
    factor = given.get("factor", 1)
    if isinstance(factor, int | float) and not factor > 0:
        raise ModelError(f"{option}: factor must be a positive number, got {factor!r}.")
    if not set(given) <= set(_ROPE_KEPT) and not isinstance(given.get("rope_type", given.get("type")), str):
        raise ModelError(f'{option} names no rope_type. Add it, as in "rope_type": "yarn".')


def _check_known(config: Mapping[str, Any], given: Mapping[str, Any], cls: Any = None, where: str = "") -> None:
    """Refuse the first key of `given` that no class reads.

    Args:
        config: the merged configuration at this place.
        given: the overrides at this place.
        cls: the library's class for it; None: that of its `model_type`.
        where: path of the place, such as `text_config.`.
    """
    nested = [key for key in given if key in NESTED and isinstance(given[key], dict)]
    others = [key for key in given if key not in _ALWAYS_READ]
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
        _check_known(config[key], given[key], part, f"{where}{key}.")


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
