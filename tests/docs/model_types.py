"""The generated table of model types: what the installed transformers has, and how each runs."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import CONFIG_MAPPING

from batchgen.errors import ModelError
from batchgen.models.architectures import HYBRIDS, causal_lm_types, choose_implementation, packed_types
from batchgen.models.checkpoint.text_part import is_packed, text_config
from batchgen.models.library.media_config import UNSUPPORTED
from tests.models.test_media_towers import CASES
from tests.models.tiny_media import FAMILIES
from tests.models.tiny_media_more import MORE, REFUSED

_NAMES = ("model.language_model.embed_tokens.weight", "model.language_model.layers.0.input_layernorm.weight")
"""Names of stored tensors, as checkpoints that pack more than a text decoder have them."""


def default_config(name: str) -> dict[str, Any]:
    """The configuration of a type with the library's default sizes."""
    try:
        config: dict[str, Any] = CONFIG_MAPPING[name]().to_dict()
    except Exception:  # some classes need values, or refuse their own defaults
        config = {"is_encoder_decoder": "encoder-decoder" in name}
    return {**config, "model_type": name}


def outcome(name: str) -> tuple[str, str]:
    """(how checkpoints of a type run, what runs of them or the missing computation)."""
    config = default_config(name)
    try:
        chosen = choose_implementation(config, "auto", _NAMES)
    except ModelError as error:
        words = str(error)
        for end in (". Use", ", which"):
            words = words.partition(end)[0]
        return "no", words.partition("not supported: ")[2] or words.partition(f"{name} ")[2] or words
    part = text_config(config).get("model_type")
    if part in HYBRIDS:
        return chosen, "where the configuration names layers of attention alone"
    return chosen, f"text, of `{part}`" if part not in (None, name) else "text" if is_packed(config) else ""


def media(name: str) -> str:
    """The kinds of items that checkpoints of a type take, or the missing computation."""
    if name in UNSUPPORTED:
        return f"no: {UNSUPPORTED[name]}"
    if name in REFUSED:
        return f"no: {REFUSED[name].refused}"
    tested = {**FAMILIES, **MORE}.get(name)
    if tested is not None:
        return ", ".join(tested.kinds)
    kinds = sorted({case.kind for case in CASES if case.name == name}, reverse=True)
    return ", ".join(kinds) or "not compared"


def row(name: str) -> str:
    """The row of a type in Markdown."""
    runs, what = outcome(name)
    cells = [name, runs, media(name) if name in packed_types() and runs != "no" else "", what]
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def table() -> str:
    """The table in Markdown."""
    names = sorted({*causal_lm_types(), *packed_types()} & set(CONFIG_MAPPING))
    head = [
        f"Types of transformers {transformers.__version__}:",
        "",
        "| type | runs | images and audio | what runs, or the missing computation |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *map(row, names), ""])
