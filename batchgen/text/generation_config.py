"""What a model folder says about generating: sampling defaults and end-of-sequence ids.

Read from generation_config.json; config.json gives the end-of-sequence ids where that file is missing or silent.
`do_sample` is not heeded: a model's published temperature is meant for use, and a greedy run says `temperature: 0`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from batchgen.errors import ModelError, RowError
from batchgen.params import SamplingParams
from batchgen.text.folder import find_folder

__all__ = ["SAMPLING_KEYS", "GenerationConfig", "load_generation_config", "read_generation_defaults"]

_UNSET = SamplingParams()

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p")
"""The sampling fields a model may set defaults for."""


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The generation settings of one model folder."""

    eos_ids: frozenset[int] = frozenset()
    raw: Mapping[str, Any] = field(default_factory=dict)
    """generation_config.json as it stands, {} where there is none."""

    def sampling_defaults(self) -> dict[str, Any]:
        """Those of `SAMPLING_KEYS` that the model sets.

        Raises:
            ModelError: a value that is no number or out of range, with the remedy.
        """
        found: dict[str, Any] = {}
        for key in SAMPLING_KEYS:
            value: Any = self.raw.get(key)
            if value is None:
                continue
            if key == "top_k" and type(value) is float and value.is_integer():
                value = int(value)
            try:
                replace(_UNSET, **{key: value})
            except RowError as error:
                remedy = "correct it or run with --sampling-defaults openai"
                raise ModelError(f"generation_config.json: {error}; {remedy}") from None
            found[key] = value
        return found


def load_generation_config(folder: Path) -> GenerationConfig:
    """Read the generation settings of the model in `folder`; a folder without any gives empty ones.

    Raises:
        ModelError: a file that is damaged, or end-of-sequence ids that are no token ids.
    """
    raw = _read_object(folder / "generation_config.json")
    eos = raw.get("eos_token_id")
    if eos is None:
        config = _read_object(folder / "config.json")
        nested = config.get("text_config")
        eos = config.get("eos_token_id", nested.get("eos_token_id") if isinstance(nested, dict) else None)
    listed = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(type(token) is not int or token < 0 for token in listed):
        raise ModelError(f"{folder.name}: eos_token_id must be a token id or a list of them, got {eos!r}")
    return GenerationConfig(frozenset(listed), raw)


def read_generation_defaults(model: str | Path, revision: str | None = None) -> dict[str, Any]:
    """The sampling defaults of a model given as a folder or a cached hub id.

    Raises:
        ModelError: as `load_generation_config` and `GenerationConfig.sampling_defaults`.
    """
    return load_generation_config(find_folder(model, revision)).sampling_defaults()


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} of the model cannot be read ({error}); fetch the model again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} of the model must hold a JSON object; fetch the model again")
    return value
