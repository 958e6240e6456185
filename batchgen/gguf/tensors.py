"""Tensors of a GGUF file under the names of the checkpoint on the hub, and how their bytes become values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from batchgen.errors import ModelError
from batchgen.gguf.families import IGNORED, LAYER_NAMES, TOP_NAMES, Family
from batchgen.gguf.header import GgufHeader, TensorEntry

_NAME: Final = re.compile(r"(?:blk\.(\d{1,6})\.)?(\w+)\.(weight|bias)")
_DTYPES: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


@dataclass(frozen=True, slots=True)
class GgufForm:
    """How the bytes of a tensor become its values, in pieces of whole rows."""

    kind: str
    """Type of the package `gguf`, such as Q4_K."""
    rows: int = 1
    """Rows that belong together: a piece holds whole groups."""
    pairs: bool = False
    """Whether a group's rows are stored in adjacent pairs for rotary embeddings, and wanted in halves."""
    offset: float = 0.0
    """Number to add to each value."""

    def columns(self, shape: Sequence[int]) -> int:
        """Length of a row of a tensor of this shape: a vector of paired rows has rows of one value."""
        return 1 if self.pairs and len(shape) == 1 else shape[-1]

    def values(self, data: Any, columns: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Values [rows, columns] of the bytes of some groups of rows, in float32."""
        values = dequantised(data, self.kind).reshape(-1, columns)
        if self.pairs:
            groups = values.reshape(-1, self.rows // 2, 2, columns)
            values = groups.swapaxes(1, 2).reshape(-1, columns)
        return values + np.float32(self.offset) if self.offset else values


def dequantised(data: Any, kind: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Values of blocks of a type, in float32."""
    if kind in _DTYPES:
        return np.frombuffer(data, _DTYPES[kind]).astype(np.float32)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values: np.ndarray[Any, np.dtype[np.float32]] = dequantize(
        np.frombuffer(data, np.uint8), GGMLQuantizationType[kind]
    )
    return values


def can_dequantise(kind: str) -> bool:
    """Whether the package `gguf` gives the values of a type."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind in _DTYPES:
        return True
    try:
        dequantised(bytes(GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]), kind)
    except NotImplementedError:
        return False
    return True


def hub_tensors(
    header: GgufHeader, family: Family, config: Mapping[str, Any]
) -> dict[str, tuple[TensorEntry, GgufForm]]:
    """Tensors by their names in the checkpoint on the hub.

    Args:
        header: the file.
        family: what is known of its architecture.
        config: its configuration.

    Raises:
        ModelError: a tensor has no place in the model, a shape that it cannot have, or a type that cannot be read.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    unreadable = {entry.kind for entry in header.tensors.values()}
    unreadable = {kind for kind in unreadable if not can_dequantise(kind)}
    found: dict[str, tuple[TensorEntry, GgufForm]] = {}
    for name, entry in header.tensors.items():
        match = _NAME.fullmatch(name)
        if match is not None and match[2] in IGNORED:
            continue
        if entry.kind in unreadable:
            raise ModelError(
                f"{header.path}: {name[:80]} is stored as {entry.kind}, which the package gguf cannot read."
            )
        target = None if match is None else _target(family, config["num_hidden_layers"], *match.groups())
        if target is None:
            raise ModelError(
                f"{header.path} holds {name[:80]!r}, which a {family.model_type} model does not have. "
                "Use the checkpoint in safetensors form."
            )
        form = _form(family, name, entry, heads, kv_heads)
        if form is None or ("{}" in target and len(entry.shape) < 2):
            raise ModelError(f"{header.path}: {name[:80]} has the shape {list(entry.shape)}. Copy the file again.")
        held = dict(_slices(target, entry, form))
        if double := found.keys() & held.keys():
            raise ModelError(f"{header.path} holds {min(double)} under two names, {name[:80]} and another.")
        found |= held
    return found


def _target(family: Family, layers: int, layer: str | None, part: str, suffix: str) -> str | None:
    """Name of a tensor in the checkpoint; None if the model has none."""
    if layer is None:
        stem = {**TOP_NAMES, **family.top_names}.get(part)
    else:
        known = {**LAYER_NAMES, **family.names}.get(part)
        stem = None if known is None or int(layer) >= layers else f"model.layers.{int(layer)}.{known}"
    return None if stem is None else f"{stem}.{suffix}"


def _form(family: Family, name: str, entry: TensorEntry, heads: int, kv_heads: int) -> GgufForm | None:
    """How a tensor is stored; None if it cannot be."""
    if family.paired_rotary and (".attn_q." in name or ".attn_k." in name):
        rows, odd = divmod(entry.shape[0], heads if ".attn_q." in name else kv_heads)
        return None if odd or rows % 2 else GgufForm(entry.kind, rows, pairs=True)
    if family.norms_plus_one and name.endswith("norm.weight"):
        return GgufForm(entry.kind, offset=-1.0)
    return GgufForm(entry.kind)


def _slices(target: str, entry: TensorEntry, form: GgufForm) -> Iterator[tuple[str, tuple[TensorEntry, GgufForm]]]:
    """The tensor, or those of all experts that are stored as one."""
    if "{}" not in target:
        # A gate with one output is stored as a vector.
        shape = (
            (1, *entry.shape) if target.endswith("shared_expert_gate.weight") and len(entry.shape) == 1 else entry.shape
        )
        yield target, (replace(entry, shape=shape), form)
        return
    experts, *shape_of_one = entry.shape
    size = entry.nbytes // experts
    for i in range(experts):
        one = replace(entry, shape=tuple(shape_of_one), start=entry.start + i * size, nbytes=size)
        yield target.format(i), (one, form)
