"""Tensors of a GGUF file under the names of the checkpoint on the hub, and how their bytes become values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from batchgen.errors import ModelError
from batchgen.gguf.families import IGNORED, LAYER_NAMES, TOP_NAMES, Assembly, Family
from batchgen.gguf.header import GgufHeader, TensorEntry

_NAME: Final = re.compile(r"(?:blk\.(\d{1,6})\.)?((?:nextn\.)?\w+)\.(weight|bias)")
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


@dataclass(frozen=True, slots=True)
class HubTensor:
    """A tensor of the checkpoint: one stored tensor, or parts that an `Assembly` puts together."""

    shape: tuple[int, ...]
    parts: tuple[tuple[TensorEntry, GgufForm], ...]
    assembly: Assembly | None = None
    matrices: tuple[int, int, int] = (0, 0, 0)
    """Of an assembled tensor: number of matrices, their rows and columns."""


def hub_tensors(header: GgufHeader, family: Family, config: Mapping[str, Any]) -> dict[str, HubTensor]:
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
    found: dict[str, HubTensor] = {}
    parts: dict[tuple[str, str], dict[str, tuple[TensorEntry, GgufForm]]] = {}
    for name, entry in header.tensors.items():
        match = _NAME.fullmatch(name)
        if match is not None and (match[2] in IGNORED or _drafts(header, config, match[1])):
            continue
        if entry.kind in unreadable:
            raise ModelError(
                f"{header.path}: {name[:80]} is stored as {entry.kind}, which the package gguf cannot read."
            )
        whole = None if match is None else _whole(family, config["num_hidden_layers"], *match.groups())
        target = None if match is None else _target(family, config["num_hidden_layers"], *match.groups())
        if target is None and whole is None:
            raise ModelError(
                f"{header.path} holds {name[:80]!r}, which a {family.model_type} model does not have. "
                "Use the checkpoint in safetensors form."
            )
        form = _form(family, name, entry, heads, kv_heads)
        if form is None or (target is not None and "{}" in target and len(entry.shape) < 2):
            raise _misshapen(header, name, entry)
        if whole is not None:
            parts.setdefault(whole, {})[name.partition("blk.")[2].partition(".")[2]] = (entry, form)
            continue
        assert target is not None, "checked above"
        held = dict(_slices(target, entry, form))
        if double := found.keys() & held.keys():
            raise ModelError(f"{header.path} holds {min(double)} under two names, {name[:80]} and another.")
        found |= held
    for (prefix, stem), stored in parts.items():
        found[prefix + stem] = _assembled(header, family.assembled[stem], stored, prefix + stem)
    return found


def _misshapen(header: GgufHeader, name: str, entry: TensorEntry) -> ModelError:
    return ModelError(f"{header.path}: {name[:80]} has the shape {list(entry.shape)}. Copy the file again.")


def _drafts(header: GgufHeader, config: Mapping[str, Any], layer: str | None) -> bool:
    """Whether a layer follows those of the model, to draft further tokens."""
    drafts = header.metadata.get(f"{header.metadata['general.architecture']}.nextn_predict_layers")
    first: int = config["num_hidden_layers"]
    return layer is not None and type(drafts) is int and first <= int(layer) < first + drafts


def _whole(family: Family, layers: int, layer: str | None, part: str, suffix: str) -> tuple[str, str] | None:
    """(prefix of the layer, name) of the assembled tensor that a stored one is a part of; None if it is none."""
    if layer is None or int(layer) >= layers:
        return None
    name = f"{part}.{suffix}"
    stem = next((stem for stem, assembly in family.assembled.items() if name in assembly.parts), None)
    return None if stem is None else (f"model.layers.{int(layer)}.", stem)


def _assembled(
    header: GgufHeader, assembly: Assembly, stored: Mapping[str, tuple[TensorEntry, GgufForm]], name: str
) -> HubTensor:
    if missing := [part for part in assembly.parts if part not in stored]:
        raise ModelError(f"{header.path} lacks {missing[0]}, a part of {name}. Copy the file again.")
    parts = tuple(stored[part] for part in assembly.parts)
    sizes = []  # of each part's matrices: those that all have, and that along the axis
    for (entry, _), transposed in zip(parts, assembly.transposed, strict=False):
        shape = entry.shape if assembly.stacked else (1, *entry.shape)
        if len(shape) != 3:
            raise _misshapen(header, name, entry)
        count, *matrix = shape
        matrix = matrix[::-1] if transposed else matrix
        sizes.append(((count, matrix[1 - assembly.axis]), matrix[assembly.axis]))
    common, along = {size for size, _ in sizes}, [size for _, size in sizes]
    if len(common) > 1 or (assembly.alternating and len(set(along)) > 1):
        raise _misshapen(header, name, parts[-1][0])
    count, other = common.pop()
    rows, columns = (sum(along), other) if assembly.axis == 0 else (other, sum(along))
    is_matrix = assembly.merged or not assembly.stacked
    whole = (count * rows, columns) if is_matrix else (count, rows, columns)
    return HubTensor(whole, parts, assembly, (count, rows, columns))


def _target(family: Family, layers: int, layer: str | None, part: str, suffix: str) -> str | None:
    """Name of a tensor in the checkpoint; None if the model has none."""
    if layer is None:
        stem = {**TOP_NAMES, **family.top_names}.get(part)
        return None if stem is None else f"{stem}.{suffix}"
    names = {**LAYER_NAMES, **family.names}
    known = names.get(f"{part}.{suffix}", names.get(part))
    if known is None or int(layer) >= layers:
        return None
    prefix = f"model.layers.{int(layer)}."
    return prefix + known[1:] if known.startswith("=") else f"{prefix}{known}.{suffix}"


def _form(family: Family, name: str, entry: TensorEntry, heads: int, kv_heads: int) -> GgufForm | None:
    """How a tensor is stored; None if it cannot be."""
    if family.paired_rotary and (".attn_q." in name or ".attn_k." in name):
        rows, odd = divmod(entry.shape[0], heads if ".attn_q." in name else kv_heads)
        return None if odd or rows % 2 else GgufForm(entry.kind, rows, pairs=True)
    if family.norms_plus_one and name.endswith("norm.weight"):
        return GgufForm(entry.kind, offset=-1.0)
    return GgufForm(entry.kind)


def _slices(target: str, entry: TensorEntry, form: GgufForm) -> Iterator[tuple[str, HubTensor]]:
    """The tensor, or those of all experts that are stored as one."""
    if "{}" not in target:
        # A gate with one output is stored as a vector.
        shape = (
            (1, *entry.shape) if target.endswith("shared_expert_gate.weight") and len(entry.shape) == 1 else entry.shape
        )
        yield target, HubTensor(shape, ((replace(entry, shape=shape), form),))
        return
    experts, *shape_of_one = entry.shape
    size = entry.nbytes // experts
    for i in range(experts):
        one = replace(entry, shape=tuple(shape_of_one), start=entry.start + i * size, nbytes=size)
        yield target.format(i), HubTensor(one.shape, ((one, form),))
