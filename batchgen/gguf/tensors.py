"""Tensors of a GGUF file under the names of the checkpoint on the hub, and how their bytes become values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from batchgen.errors import ModelError
from batchgen.gguf.family import IGNORED, Assembly, Family, gguf_family
from batchgen.gguf.header import GgufHeader, TensorEntry

_NAME: Final = re.compile(r"(?:blk\.(\d{1,6})\.)?((?:(?:nextn|shortconv)\.)?\w+)\.(weight|bias|scale|input_scale)")
_BARE: Final = (".ssm_a", ".ssm_d", ".ffn_norm")
"""Ends of names that may have no further one."""
_MOST_FACTORS: Final = 4096
"""Most factors: of rotary frequencies, a half of the largest head size; of experts, one each."""
_DTYPES: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


@dataclass(frozen=True, slots=True)
class GgufForm:
    """Conversion of the bytes of a tensor to its values, in pieces of whole rows."""

    kind: str
    """Type of the package `gguf`, such as Q4_K."""
    rows: int = 1
    """Rows that belong together: a piece holds whole groups."""
    order: tuple[int, int, int] | None = None
    """(a, b, n): a*b*n rows of a group are stored as a blocks of b*n rows, and wanted as b blocks of a*n: of each
    stored block n rows in turn."""
    first: int = 0
    """The first of these rows in a group."""
    in_row: bool = False
    """Whether `rows` and `order` are about the values of each row of the tensor, as if each were a row."""
    is_decay: bool = False
    """Whether -exp(x) is stored for each value x."""
    offset: float = 0.0
    """Number to add to each value."""
    factor: float = 1.0
    """Number that each value is multiplied with."""

    def columns(self, shape: Sequence[int]) -> int:
        """Length of a row of a tensor of this shape: a vector with rows in another order has rows of one value."""
        return 1 if self.order and (self.in_row or len(shape) == 1) else shape[-1]

    def values(self, data: Any, columns: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Values [rows, columns] of the bytes of some groups of rows, in float32."""
        values = dequantised(data, self.kind).reshape(-1, columns)
        if self.order is not None:
            a, b, n = self.order
            groups = values.reshape(-1, self.rows, columns)
            before, inside, behind = np.split(groups, (self.first, self.first + a * b * n), axis=1)
            moved = inside.reshape(-1, a, b, n, columns).swapaxes(1, 2).reshape(inside.shape)
            values = np.concatenate((before, moved, behind), axis=1).reshape(-1, columns)
        if self.is_decay:
            with np.errstate(divide="ignore", invalid="ignore"):  # of a damaged file
                return np.log(-values)
        values = values if self.factor == 1.0 else values * np.float32(self.factor)
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


def hub_tensors(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, HubTensor]:
    """Tensors by their names in the checkpoint on the hub.

    Args:
        header: the file.
        config: its configuration.

    Raises:
        ModelError: a tensor has no place in the model, a shape that it cannot have, or a type that cannot be read.
    """
    family = gguf_family(header)
    unreadable = {entry.kind for entry in header.tensors.values()}
    unreadable = {kind for kind in unreadable if not can_dequantise(kind)}
    scales = _scales(header, family)
    tensors: dict[str, HubTensor] = {}
    parts: dict[tuple[str, str], dict[str, tuple[TensorEntry, GgufForm]]] = {}
    for name, entry in header.tensors.items():
        match = _NAME.fullmatch(f"{name}.weight" if name.endswith(_BARE) else name)
        if match is not None and (match[2] in IGNORED or _drafts(header, config, match[1])):
            continue
        if name in scales or name.endswith(".input_scale"):  # scales of inputs are not needed, which are not rounded
            continue
        if entry.kind in unreadable:
            raise ModelError(
                f"{header.path}: {name[:80]} is stored as {entry.kind}, which the package gguf cannot read."
            )
        whole = None if match is None else _whole(family, config["num_hidden_layers"], *match.groups())
        targets = () if match is None else _targets(family, config["num_hidden_layers"], *match.groups())
        if not targets and whole is None:
            raise ModelError(
                f"{header.path} holds {name[:80]!r}, which a {family.model_type} model does not have. "
                "Use the checkpoint in safetensors form."
            )
        form = _form(family, name, entry, config)
        factors = scales.get(name.removesuffix(".weight") + ".scale", [1.0])
        if form is None or (targets and len(entry.shape) < 1 + ("{}" in targets[0])):
            raise _misshapen(header, name, entry)
        if len(factors) > 1 and (whole is not None or len(factors) != _matrices(targets, entry)):
            raise ModelError(
                f"{header.path}: {name[:80]} has {len(factors)} scales, which is not supported for this architecture. "
                "Use the checkpoint in safetensors form."
            )
        if whole is not None:
            form = replace(form, factor=factors[0])
            parts.setdefault(whole, {})[name.partition("blk.")[2].partition(".")[2]] = (entry, form)
            continue
        sizes = _sizes(targets, entry, config)
        if sum(sizes) != _rows(targets, entry):
            raise _misshapen(header, name, entry)
        forms = [replace(form, factor=factor) for factor in factors] * (_matrices(targets, entry) // len(factors))
        held = {
            key: held for target, rows in _shares(targets, sizes) for key, held in _slices(target, entry, forms, rows)
        }
        if double := tensors.keys() & held.keys():
            raise ModelError(f"{header.path} holds {min(double)} under two names, {name[:80]} and another.")
        tensors |= held
    tensors |= dict(_listed(header, family, config["num_hidden_layers"]))
    for (prefix, stem), stored in parts.items():
        tensors[prefix + stem] = _assembled(header, family.assembled[stem], stored, prefix + stem, config)
    return tensors


def _scales(header: GgufHeader, family: Family) -> dict[str, list[float]]:
    """Scales of whole weights, by their own names: one number, or one for each expert."""
    scales: dict[str, list[float]] = {}
    for name, entry in header.tensors.items():
        base = name.removesuffix(".scale")
        if base == name or name.split(".", 2)[-1] in family.names:  # the model's own
            continue
        if f"{base}.weight" in header.tensors:
            scales[name] = read_factors(header, name, entry)
    return scales


def read_factors(header: GgufHeader, name: str, entry: TensorEntry) -> list[float]:
    """The values of a small float32 tensor of factors.

    Raises:
        ModelError: it has another form, or cannot be read.
    """
    if entry.kind != "F32" or len(entry.shape) != 1 or entry.shape[0] > _MOST_FACTORS:
        raise ModelError(
            f"{header.path}: {name[:80]} must be at most {_MOST_FACTORS} float32 values. Copy the file again."
        )
    try:
        with entry.file.open("rb") as stream:
            stream.seek(entry.start)
            values = np.frombuffer(stream.read(entry.nbytes), "<f4")
    except OSError as error:
        raise ModelError(f"Cannot read {entry.file}: {error.strerror or error}.") from None
    if len(values) != entry.shape[0] or not np.isfinite(values).all() or (values == 0).any():
        raise ModelError(f"{header.path}: {name[:80]} must hold finite factors other than 0. Copy the file again.")
    return [float(value) for value in values]


def _misshapen(header: GgufHeader, name: str, entry: TensorEntry) -> ModelError:
    return ModelError(f"{header.path}: {name[:80]} has the shape {list(entry.shape)}. Copy the file again.")


def _listed(header: GgufHeader, family: Family, layers: int) -> Iterator[tuple[str, HubTensor]]:
    """Tensors of one number that the metadata lists for the layers."""
    for key, (name, shape) in family.listed.items():
        entry = header.listed.get(key)
        if entry is None or entry.shape != (layers,):
            raise ModelError(f"{header.path}: {key} must list {layers} numbers. Copy the file again.")
        for i in range(layers):
            one = replace(entry, shape=shape, start=entry.start + 4 * i, nbytes=4)
            yield f"{family.prefix}{i}.{name}", HubTensor(shape, ((one, GgufForm("F32")),))


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
    return None if stem is None else (f"{family.prefix}{int(layer)}.", stem)


def _assembled(
    header: GgufHeader,
    assembly: Assembly,
    stored: Mapping[str, tuple[TensorEntry, GgufForm]],
    name: str,
    config: Mapping[str, Any],
) -> HubTensor:
    if missing := [part for part in assembly.parts if part not in stored]:
        raise ModelError(f"{header.path} lacks {missing[0]}, a part of {name}. Copy the file again.")
    parts = tuple(stored[part] for part in assembly.parts)
    if assembly.by_key_head:
        parts = tuple(_by_key_head(parts, config))
        kinds = tuple(map(str, range(len(parts))))
        assembly = replace(assembly, parts=kinds, transposed=(False,) * len(parts), by_key_head=False)
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


def _by_key_head(
    parts: Sequence[tuple[TensorEntry, GgufForm]], config: Mapping[str, Any]
) -> Iterator[tuple[TensorEntry, GgufForm]]:
    """Queries, keys, values and gates of a gated delta rule, each with an axis of its key heads in front.

    A part with the wrong number of rows gives parts that do not fit together.
    """
    heads, keys = config["linear_num_key_heads"], config["linear_num_key_heads"] * config["linear_key_head_dim"]
    (entry, form), gate = parts
    rows = entry.nbytes // entry.shape[0]
    cuts = (0, keys, 2 * keys, max(entry.shape[0], 2 * keys))
    whole = [
        (replace(entry, start=entry.start + a * rows, nbytes=(b - a) * rows, shape=(b - a, *entry.shape[1:])), form)
        for a, b in pairwise(cuts)
    ]
    for part, of_part in (*whole, gate):
        yield replace(part, shape=(heads, part.shape[0] // heads, *part.shape[1:])), of_part


def _targets(family: Family, layers: int, layer: str | None, part: str, suffix: str) -> tuple[str, ...]:
    """Names of what a tensor is in the checkpoint, one below the other; none if the model has none."""
    if layer is None:
        stem = family.top_names.get(part)
        return () if stem is None else (f"{stem}.{suffix}",)
    if int(layer) >= layers:
        return ()
    names = family.names
    one = names.get(f"{part}.{suffix}", names.get(part) if suffix != "scale" else None)
    known = family.splits.get(part) or ((one,) if one is not None else ())
    if part == "ffn_gate_up_exps" and not known:  # the converter joins them on request
        known = (names["ffn_gate_exps"], names["ffn_up_exps"])
    prefix = f"{family.prefix}{int(layer)}."
    return tuple(prefix + (name[1:] if name[0] == "=" else f"{name}.{suffix}") for name in known)


def _sizes(targets: Sequence[str], entry: TensorEntry, config: Mapping[str, Any]) -> list[int]:
    """Rows of each target: of q, k and v as the heads have them, of others the same number."""
    if len(targets) == 3:
        heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        return [heads * dim, kv_heads * dim, kv_heads * dim]
    return [_rows(targets, entry) // len(targets)] * len(targets)


def _matrices(targets: Sequence[str], entry: TensorEntry) -> int:
    """Number of tensors that are stored as one: those of all experts."""
    return entry.shape[0] if "{}" in targets[0] else 1


def _rows(targets: Sequence[str], entry: TensorEntry) -> int:
    """Rows of a stored matrix or vector, or of that of each expert."""
    return entry.shape[1 if "{}" in targets[0] else 0]


def _shares(targets: Sequence[str], sizes: Sequence[int]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Each target with the first and the number of its rows."""
    first = 0
    for target, rows in zip(targets, sizes, strict=True):
        yield target, (first, rows)
        first += rows


def _form(family: Family, name: str, entry: TensorEntry, config: Mapping[str, Any]) -> GgufForm | None:
    """Form of a stored tensor; None if its shape is wrong."""
    part = name.split(".")[2] if name.startswith("blk.") else ""
    if (family.paired_rotary or family.halved_rotary) and part in ("attn_q", "attn_k"):
        rows, odd = divmod(entry.shape[0], config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"])
        rotated = int(rows * config["rope_parameters"].get("partial_rotary_factor", 1.0))
        if odd or rows % 2 or rotated > rows:
            return None
        order = (rows // 2, 2, 1) if family.paired_rotary else (2, rotated // 2, 1)
        return GgufForm(entry.kind, rows, order)
    if family.fused_by_kind and part == "attn_qkv":
        heads, dim = config["num_attention_heads"], config["head_dim"]
        rows = 3 * heads * dim
        return GgufForm(entry.kind, rows, (3, heads, dim)) if entry.shape[0] == rows else None
    if family.norms_plus_one and name.endswith("norm.weight") and part != "ssm_norm":
        return GgufForm(entry.kind, offset=-1.0)
    form = _tiled(entry, part, config) if family.tiled_values and part in _VALUE_HEADS else GgufForm(entry.kind)
    return replace(form, is_decay=True) if form is not None and part == "ssm_a" else form


_VALUE_HEADS: Final = {
    "attn_qkv": True, "ssm_conv1d": True, "attn_gate": True, "ssm_out": True, "ssm_alpha": False, "ssm_beta": False,
    "ssm_a": False, "ssm_dt": False,
}  # fmt: skip
"""Tensors of a gated delta rule that have an axis of its value heads -> whether each has all of its channels there."""


def _tiled(entry: TensorEntry, part: str, config: Mapping[str, Any]) -> GgufForm | None:
    """Form of a tensor whose value heads are stored by their place in the group of a key head, not by that group."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = config["linear_value_head_dim"] if _VALUE_HEADS[part] else 1
    first = 2 * keys * config["linear_key_head_dim"] if part in ("attn_qkv", "ssm_conv1d") else 0
    rows = entry.shape[-1 if part == "ssm_out" else 0]
    if rows != first + values * size or values % keys:
        return None
    return GgufForm(entry.kind, rows, (values // keys, keys, size), first, in_row=part == "ssm_out")


_ROW_VECTORS: Final = ("shared_expert_gate.weight", "moe_statics.e_score_correction_bias")
"""Matrices with one row, which are stored as vectors."""
_CONVOLUTIONS: Final = (".conv1d.weight", ".conv.conv.weight")
"""Convolutions of each channel by itself, which are stored as matrices."""


def _slices(
    target: str, entry: TensorEntry, forms: Sequence[GgufForm], rows: tuple[int, int]
) -> Iterator[tuple[str, HubTensor]]:
    """The tensor, or those of all experts that are stored as one: of each matrix the (first, number of) `rows`."""
    experts, shape = _matrices([target], entry), entry.shape[1:] if "{}" in target else entry.shape
    first, count = rows
    size = entry.nbytes // experts
    row = size // shape[0]
    wanted = _shape(target, (count, *shape[1:]))
    for i in range(experts):
        one = replace(entry, shape=wanted, start=entry.start + i * size + first * row, nbytes=row * count)
        yield target.format(i), HubTensor(wanted, ((one, forms[i]),))


def _shape(target: str, stored: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor in the checkpoint, where the file has it without an axis of 1, or with one more axis."""
    if target.endswith(_ROW_VECTORS) and len(stored) == 1:
        return (1, *stored)
    if target.endswith(_CONVOLUTIONS) and len(stored) == 2:
        return (stored[0], 1, stored[1])
    is_vector = target.endswith((".D", ".mamba.norm.weight", ".mixer.norm.weight")) or (
        target.endswith(".A_log") and stored[-1] == 1
    )
    return (math.prod(stored),) if is_vector else stored
