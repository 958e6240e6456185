"""Generation settings of a model folder: sampling defaults and end-of-sequence ids.

They are read from generation_config.json; config.json gives the end-of-sequence ids where that file does not.
`do_sample` is ignored: a published temperature is meant to be used, and a greedy run sets `temperature: 0`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from batchgen.errors import ModelError, RowError
from batchgen.gguf.header import read_gguf
from batchgen.request.params import SamplingParams
from batchgen.text.model_files import read_object

_UNSET = SamplingParams()

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p")
"""Sampling fields that a model may set defaults for."""


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Generation settings of one model folder."""

    eos_ids: frozenset[int] = frozenset()
    raw: Mapping[str, Any] = field(default_factory=dict)
    """Content of generation_config.json, {} where the file is missing."""

    def sampling_defaults(self) -> dict[str, Any]:
        """Values of `SAMPLING_KEYS` that the model sets.

        Raises:
            ModelError: a value is not a number or out of range.
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


def load_generation_config(folder: Path, config: Mapping[str, Any] | None = None) -> GenerationConfig:
    """Read the generation settings of the model in `folder`, or in a GGUF file; one without any has empty ones.

    `config` is what counts in place of the contents of config.json.

    Raises:
        ModelError: a file is damaged, or an end-of-sequence id is not a token id.
    """
    if folder.is_file():
        # Imported here because its library is slow to import, and folders do not need it.
        from batchgen.gguf.vocabulary import gguf_end_ids, gguf_sampling

        header = read_gguf(folder)
        return GenerationConfig(gguf_end_ids(header), gguf_sampling(header))
    raw = read_object(folder / "generation_config.json")
    eos = raw.get("eos_token_id")
    if eos is None:
        config = read_object(folder / "config.json") if config is None else config
        nested = config.get("text_config")
        eos = config.get("eos_token_id", nested.get("eos_token_id") if isinstance(nested, dict) else None)
    listed = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(type(token) is not int or token < 0 for token in listed):
        raise ModelError(f"{folder.name}: eos_token_id must be a token id or a list of them, got {eos!r}")
    return GenerationConfig(frozenset(listed), raw)
