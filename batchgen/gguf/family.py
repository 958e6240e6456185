"""Architectures of GGUF files: configuration keys, tensor names and changes to stored weights of each.

The file families.toml has what llama.cpp's converter does to each family.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from batchgen.errors import ModelError
from batchgen.gguf.header import GgufHeader

IGNORED: Final = ("rope_freqs", "rope_factors_long", "rope_factors_short", "attn_rot_embd")
"""Tensors that the configuration is made from, or that it determines."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """A tensor of the checkpoint that is stored in parts: a stack of matrices, of which each part has its share."""

    parts: tuple[str, ...]
    """Stored tensors of a layer, in order."""
    axis: int = 0
    """Axis of the matrices along which the parts follow each other."""
    alternating: bool = False
    """Whether the parts alternate along the axis, instead of one following the other."""
    transposed: tuple[bool, ...] = (False, False)
    """Whether the axes of a part's matrices are exchanged."""
    stacked: bool = True
    """Whether the first axis of the parts counts the matrices; else each part is one matrix."""
    merged: bool = False
    """Whether the matrices lie one below the other in one matrix, as those of heads; those of experts have an axis."""
    by_key_head: bool = False
    """Whether the parts are q, k and v in one, and gates, of a gated delta rule, and follow each other in each key
    head."""


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture."""

    model_type: str
    """`model_type` of the configuration in transformers."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Metadata key -> configuration key, beyond those of every architecture."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the family that its files do not state."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer."""
    top_names: Mapping[str, str] = field(default_factory=dict)
    """Tensors outside of the layers."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Configuration key -> tensor of a layer whose presence it states."""
    assembled: Mapping[str, Assembly] = field(default_factory=dict)
    """Tensors of a layer in the checkpoint that are stored in parts."""
    listed: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """List in the metadata, of one number for each layer -> name and shape of that tensor in the checkpoint."""
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Stored tensor of a layer -> tensors of the checkpoint that its rows are, of q, k and v."""
    prefix: str = "model.layers."
    """Name of the layers in the checkpoint."""
    varying: tuple[str, ...] = ()
    """Keys of every architecture in which the layers may differ."""
    latent: bool = False
    """Whether it has multi-head latent attention."""
    paired_rotary: bool = False
    """Whether rows of q and k are stored for rotary embeddings of adjacent pairs instead of halves."""
    halved_rotary: bool = False
    """Whether rotated rows of q and k are stored in halves instead of adjacent pairs."""
    fused_by_kind: bool = False
    """Whether the rows of a fused q, k and v are stored by kind instead of by head."""
    norms_plus_one: bool = False
    """Whether norms are stored with one added."""
    tiled_values: bool = False
    """Whether value heads of a gated delta rule are stored by their place in the group of a key head."""
    variants: Mapping[str, str] = field(default_factory=dict)
    """Metadata key -> family of the files that have the key."""


@cache
def _table() -> dict[str, Any]:
    """Contents of families.toml."""
    table: dict[str, Any] = _fixed(tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8")))
    return table


def _fixed(value: Any) -> Any:
    """The value with tuples for lists."""
    if isinstance(value, dict):
        return {name: _fixed(item) for name, item in value.items()}
    return tuple(map(_fixed, value)) if isinstance(value, list) else value


@cache
def families(kind: str = "families") -> Mapping[str, Family]:
    """Families by `general.architecture`; of the kind `variants`, those that share it with another, by our names."""
    return {name: _family(entry) for name, entry in _table()[kind].items()}


def missing() -> dict[str, str]:
    """`general.architecture` -> the missing computation."""
    return {name: reason for reason, names in _table()["missing"].items() for name in names}


def _family(entry: Mapping[str, Any]) -> Family:
    table = _table()
    shared = [table["shared"][name] for name in entry.get("include", ())]
    fields: dict[str, Any] = {}
    for part in ({"names": table["layer_names"], "top_names": table["top_names"]}, *shared, entry):
        for name, value in part.items():
            fields[name] = {**fields.get(name, {}), **value} if isinstance(value, dict) else value
    fields.pop("include", None)
    parts = fields.pop("assembled", {})
    return Family(assembled={name: Assembly(**assembly) for name, assembly in parts.items()}, **fields)


def gguf_family(header: GgufHeader) -> Family:
    """The family of the file's architecture.

    Raises:
        ModelError: it is not supported, or the file holds no language model.
    """
    name = header.metadata.get("general.architecture")
    kind = header.metadata.get("general.type", "model")
    if not isinstance(name, str) or kind not in ("model", None):
        what = f"a file of type {kind}" if isinstance(kind, str) and kind != "model" else "names no architecture"
        raise ModelError(f"{header.path} holds no language model: {what}. Name the file with the text model.")
    family = families().get(name)
    if family is None:
        reason = missing().get(name, "batchgen does not know how its configuration and tensors are stored")
        remedy = "Use another model." if name in missing() else "Use the checkpoint in safetensors form."
        raise ModelError(f"{header.path}: the GGUF architecture {name[:80]!r} is not supported: {reason}. {remedy}")
    variant = next((kind for key, kind in family.variants.items() if header.metadata.get(f"{name}.{key}")), None)
    return family if variant is None else families("variants")[variant]
