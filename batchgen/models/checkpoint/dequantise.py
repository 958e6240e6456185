"""Dequantises stored tensors into allocated ones, and reads the integers that some of them store.

Values are computed in float32, in pieces of a few rows. Memory in addition to the target is that of a piece: at most
`_PIECE` values, or one matrix of a stack of experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from batchgen.errors import ModelError
from batchgen.models.checkpoint.quantized_tensors import (
    AWQ_ORDER,
    AssembledTensor,
    BlockTensor,
    PackedTensor,
    QuantizedTensor,
    ScaledTensor,
    float_group,
    integer_group,
)
from batchgen.models.checkpoint.safetensors_header import TensorInfo

_PIECE: Final = 1 << 19
"""Values of a piece that is dequantised."""
_FLOATS_OF_4_BITS: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1 values without a sign, by code."""

ReadRows = Callable[[TensorInfo, int, int], Tensor]
"""Reads the rows from one up to another of a stored tensor, in its own dtype; a scalar is one row."""


Part = tuple[slice, ...]
"""Which part of a tensor is read: the numbers from one up to another of each axis."""


def whole_index(shape: tuple[int, ...], index: Part) -> Part:
    """An index of the leading axes of a tensor, with the other axes whole."""
    return (*index, *(slice(0, size) for size in shape[len(index) :]))


def dequantise(target: Tensor, tensor: QuantizedTensor, read: ReadRows, part: Part) -> None:
    """Fill `target`, contiguous and of the shape of a part of the plain tensor, rounding each value to its dtype once.

    Rows and columns that are not in the part are read only where the format has them in the same piece.
    """
    if isinstance(tensor, ScaledTensor | PackedTensor):
        exchanged = isinstance(tensor, ScaledTensor) and tensor.transposed
        out = target.transpose(-1, -2) if exchanged else target
        stored = (*part[:-2], part[-1], part[-2]) if exchanged else part
        for piece in _number_pieces(tensor, read, stored):
            if (cut := _cut(piece.place, stored)) is not None:
                to, of = cut
                out[to] = (piece.numbers * piece.scales())[of].to(target.device)
    elif part != whole_index(tensor.shape, ()):
        whole = torch.empty(tensor.shape, dtype=target.dtype)
        dequantise(whole, tensor, read, whole_index(tensor.shape, ()))
        target.copy_(whole[part])
    elif isinstance(tensor, AssembledTensor):
        _fill_assembled(target, tensor, read)
    else:
        assert isinstance(tensor, BlockTensor)
        _fill_blocks(target, tensor, read)


@dataclass(frozen=True, slots=True)
class StoredNumbers:
    """Scales of a matrix [O, I] of numbers."""

    scales: Tensor
    """[O, G] float32"""
    group: int
    """Inputs that share a scale; the last group may be shorter."""


def stored_integers(tensor: QuantizedTensor, into: Tensor, read: ReadRows, part: Part) -> StoredNumbers | None:
    """Fill `into` int8 with the numbers of a part of a matrix [O, I] that scales multiply.

    None if they are others than such integers, or the part begins within a group of inputs.
    """
    group = integer_group(tensor)
    if group is None or part[1].start % group:
        return None
    assert isinstance(tensor, ScaledTensor | PackedTensor), "checked above"
    if isinstance(tensor, PackedTensor) and not torch.equal(_groups(tensor, read), _in_order(tensor)):
        return None
    for piece in _number_pieces(tensor, read, part):
        if (cut := _cut(piece.place, part)) is None:
            continue
        target, numbers = into[cut[0]], piece.numbers[cut[1]]
        target.copy_(numbers.clamp(-128, 127))
        if not torch.equal(target.float(), numbers):
            return None
    return StoredNumbers(_group_scales(tensor, read, part, group), group)


def stored_floats(tensor: QuantizedTensor, into: Tensor, read: ReadRows, part: Part) -> StoredNumbers | None:
    """As `stored_integers`, with floats; `into` is float8_e4m3fn."""
    group = float_group(tensor)
    if group is None or part[1].start % group:
        return None
    assert isinstance(tensor, ScaledTensor), "checked above"
    for start, end in _pieces(tensor.shape[0], tensor.shape[1], wanted=part[0]):
        values = read(tensor.parts["values"], start, end)
        cut = _cut((slice(start, end),), part)
        assert cut is not None, "pieces overlap the wanted rows"
        to, of = cut
        if bool((values[of].view(torch.uint8) & 0x7F == 0x7F).any()):  # not-a-number
            return None
        into[to] = values[of]
    return StoredNumbers(_group_scales(tensor, read, part, group), group)


def _group_scales(tensor: ScaledTensor | PackedTensor, read: ReadRows, part: Part, group: int) -> Tensor:
    """Scales [O, G] float32 of the groups of each row of a part."""
    outputs, groups = tensor.shape[0], slice(part[1].start // group, -(-part[1].stop // group))
    scales = _whole(tensor.parts["scale"], read).float()
    if isinstance(tensor, ScaledTensor):
        rows = torch.arange(part[0].start, part[0].stop) // tensor.blocks[0]
        scales = scales.view(tensor.scale_shape).expand(-1, tensor.scale_shape[1])[rows] * _factor(tensor, read)
        return scales[:, groups]
    return (scales.view(outputs, -1) if tensor.layout == "columns" else scales.T)[part[0], groups]


def _cut(place: Part, part: Part) -> tuple[Part, Part] | None:
    """Where what a piece at `place` has of a part is in that part, and where in the piece; None: it has nothing."""
    to, of = [], []
    for axis, wanted in enumerate(part):
        whole = axis >= len(place) or place[axis] == slice(None)
        held = slice(0, wanted.stop) if whole else place[axis]
        low, high = max(held.start, wanted.start), min(held.stop, wanted.stop)
        if low >= high:
            return None
        to.append(slice(low - wanted.start, high - wanted.start))
        of.append(slice(low - held.start, high - held.start))
    return tuple(to), tuple(of)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a plain tensor, numbers x scales, at `place` in it."""

    place: tuple[slice, ...]
    numbers: Tensor
    """float32"""
    scales: Callable[[], Tensor]
    """Computes them, float32, in a shape that the numbers' contains."""


def _number_pieces(tensor: ScaledTensor | PackedTensor, read: ReadRows, part: Part) -> Iterator[_Piece]:
    """The pieces that have something of a part."""
    if isinstance(tensor, ScaledTensor):
        return _scaled_pieces(tensor, read, part[0])
    if tensor.layout == "columns":
        return _column_pieces(tensor, read, part[0])
    return _input_pieces(tensor, read, part[1])


def _fill_assembled(target: Tensor, tensor: AssembledTensor, read: ReadRows) -> None:
    stack, begin = target.view(tensor.matrices), 0
    for turn, (info, transposed) in enumerate(zip(tensor.parts.values(), tensor.transposed, strict=False)):
        rows = info.shape[0] // tensor.matrices[0]
        for number, matrix in enumerate(stack):
            stored = read(info, number * rows, (number + 1) * rows)
            stored = stored.view(stored.shape[-2:]) if tensor.matrices[0] > 1 else stored.view(info.shape[-2:])
            share = stored.T if transposed else stored
            size = share.shape[tensor.axis]
            place = slice(turn, None, len(tensor.parts)) if tensor.alternating else slice(begin, begin + size)
            (matrix.T if tensor.axis else matrix)[place] = (share.T if tensor.axis else share).to(target.device)
        begin += size


def _whole(info: TensorInfo, read: ReadRows) -> Tensor:
    return read(info, 0, info.shape[0] if info.shape else 1)


def _pieces(rows: int, row_values: int, multiple: int = 1, wanted: slice | None = None) -> Iterator[tuple[int, int]]:
    """Row ranges of at most `_PIECE` values but at least `multiple` rows, whose starts are its multiples.

    They overlap the rows `wanted`; None: all.
    """
    step = max(1, _PIECE // max(1, row_values * multiple)) * multiple
    first, end = (0, rows) if wanted is None else (wanted.start // multiple * multiple, min(rows, wanted.stop))
    for start in range(first, end, step):
        yield start, min(rows if wanted is None else -(-end // multiple) * multiple, start + step, rows)


def _scaled_pieces(tensor: ScaledTensor, read: ReadRows, wanted: slice) -> Iterator[_Piece]:
    groups = tensor.parts.get("groups")
    columns = None if groups is None else _whole(groups, read).long()
    factor = _factor(tensor, read)
    scales, zeros = (_RowScales(name, tensor, read, columns) for name in ("scale", "zero"))

    def scale(start: int, end: int) -> Tensor:
        return scales.rows(start, end) * factor

    for start, end in _pieces(tensor.stored_shape[0], math.prod(tensor.stored_shape[1:]), wanted=wanted):
        values = _decoded(read(tensor.parts["values"], start, end), tensor)
        if "zero" in tensor.parts:
            values -= zeros.rows(start, end)
        yield _Piece((slice(start, end),), values, partial(scale, start, end))


def _factor(tensor: ScaledTensor, read: ReadRows) -> float:
    """Factor of all scales."""
    if "global_scale" not in tensor.parts:
        return tensor.factor
    one = float(_whole(tensor.parts["global_scale"], read).float().flatten()[0])
    return tensor.factor / one if tensor.divides else tensor.factor * one


def _decoded(stored: Tensor, tensor: ScaledTensor) -> Tensor:
    """The values of some rows in float32."""
    if not tensor.pairs:
        return stored.float().view(stored.shape[0], *tensor.stored_shape[1:])
    positive = torch.tensor(_FLOATS_OF_4_BITS)
    codes = torch.cat([positive, -positive])
    of_byte = torch.stack([codes.repeat(16), codes.repeat_interleave(16)], 1)  # [256, 2]
    both = of_byte.index_select(0, stored.contiguous().view(torch.uint8).flatten().int())
    return both.view(stored.shape[0], *tensor.stored_shape[1:])


class _RowScales:
    """Scales, or zeros, of rows of values, each repeated over its block."""

    def __init__(self, part: str, tensor: ScaledTensor, read: ReadRows, columns: Tensor | None) -> None:
        self._tensor = tensor
        self._columns = columns
        self._read = read
        self._info = tensor.parts.get(part)
        # Read once if several rows share a scale.
        shared = tensor.blocks[0] != 1 and self._info is not None
        self._all = self._floats(0, tensor.scale_shape[0]) if shared else None

    def rows(self, start: int, end: int) -> Tensor:
        """Scales of the rows from `start` to `end`, broadcastable to their values."""
        shape, blocks = self._tensor.stored_shape, self._tensor.blocks
        shared = self._all
        scales = self._floats(start, end) if shared is None else shared[torch.arange(start, end) // blocks[0]]
        for axis in range(1, len(shape)):
            if scales.shape[axis] not in (1, shape[axis]):
                scales = self._along(scales, axis)
        return scales

    def _along(self, scales: Tensor, axis: int) -> Tensor:
        if self._columns is not None and axis == len(self._tensor.stored_shape) - 1:
            return scales.index_select(axis, self._columns)
        size = self._tensor.stored_shape[axis]
        return scales.repeat_interleave(self._tensor.blocks[axis], axis).narrow(axis, 0, size)

    def _floats(self, start: int, end: int) -> Tensor:
        assert self._info is not None
        stored = self._read(self._info, start, end)
        if self._tensor.exponents and stored.dtype == torch.uint8:
            stored = stored.view(torch.float8_e8m0fnu)
        return stored.float().view(end - start, *self._tensor.scale_shape[1:])


def _groups(tensor: PackedTensor, read: ReadRows) -> Tensor:
    """[I]: the group of each input."""
    if "groups" in tensor.parts:
        return _whole(tensor.parts["groups"], read).long()
    return _in_order(tensor)


def _in_order(tensor: PackedTensor) -> Tensor:
    """[I]: the group of each input, where groups are runs of inputs."""
    return torch.arange(tensor.shape[1]) // tensor.group


def _column_pieces(tensor: PackedTensor, read: ReadRows, wanted: slice) -> Iterator[_Piece]:
    rows, inputs = tensor.shape
    groups = _groups(tensor, read)
    zero = tensor.parts.get("zero")
    packed = None if zero is None else _unpacked(_whole(zero, read).T, tensor.bits).T[:rows]  # [O, G]
    if packed is not None:
        _check_zeros(tensor, packed)

    def scale(start: int, end: int) -> Tensor:
        stored = read(tensor.parts["scale"], start, end).float().view(end - start, -1)  # [n, G]
        return stored.index_select(1, groups)

    for start, end in _pieces(rows, inputs, wanted=wanted):
        codes = _unpacked(read(tensor.parts["words"], start, end), tensor.bits)[:, :inputs].float()
        if packed is None:
            codes -= 1 << (tensor.bits - 1)
        else:
            codes -= packed[start:end].float().index_select(1, groups)
        yield _Piece((slice(start, end),), codes, partial(scale, start, end))


def _input_pieces(tensor: PackedTensor, read: ReadRows, wanted: slice) -> Iterator[_Piece]:
    outputs = tensor.shape[0]
    groups = _groups(tensor, read)
    scale = _whole(tensor.parts["scale"], read).float()  # [G, O]
    zero = _zeros(tensor, _whole(tensor.parts["zero"], read))[:, :outputs].float()  # [G, O]
    _check_zeros(tensor, zero)
    # Codes of 32 inputs fill as many whole words as a code has bits.
    per_row, multiple = (32 // tensor.bits, tensor.bits) if tensor.layout == "gptq" else (1, 1)
    bits = tensor.bits if tensor.layout == "gptq" else 32
    stored = slice(wanted.start * bits // 32, -(-wanted.stop * bits // 32))
    for start, end in _pieces(tensor.parts["words"].shape[0], outputs * per_row, multiple, stored):
        words = read(tensor.parts["words"], start, end)
        codes = _awq(words) if tensor.layout == "awq" else _unpacked(words.T, tensor.bits).T  # [n, O]
        first = start * 32 // tensor.bits if tensor.layout == "gptq" else start
        group = groups[first : first + codes.shape[0]]
        numbers = (codes[: len(group), :outputs].float() - zero[group]).T
        yield _Piece((slice(None), slice(first, first + len(group))), numbers, partial(_transposed, scale, group))


def _check_zeros(tensor: PackedTensor, zero: Tensor) -> None:
    """Refuse zeros that codes do not have which the description calls symmetric."""
    if tensor.symmetric and bool((zero != 1 << (tensor.bits - 1)).any()):
        raise ModelError(
            f"{tensor.parts['zero'].file} holds zero points that the symmetric codes of its description do not have. "
            "Correct the description, or use another checkpoint."
        )


def _transposed(scale: Tensor, group: Tensor) -> Tensor:
    """Scales [O, n] of inputs whose groups are `group` [n], of scales [G, O]."""
    return scale[group].T


def _zeros(tensor: PackedTensor, words: Tensor) -> Tensor:
    if tensor.layout == "awq":
        return _awq(words)
    if not tensor.zeros_less_one:
        return _unpacked(words, tensor.bits)
    if 32 % tensor.bits:
        return (_unpacked(words, tensor.bits) + 1) & ((1 << tensor.bits) - 1)
    # One was taken from each code of a word as a whole, so that a zero of 0 borrowed from the next code.
    ones = sum(1 << shift for shift in range(0, 32, tensor.bits))
    return _unpacked(((words.long() & 0xFFFFFFFF) + ones) & 0xFFFFFFFF, tensor.bits)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Codes [R, W x 32 / bits] of words [R, W], lowest bits first; a code may span two words."""
    mask = (1 << bits) - 1
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=words.dtype)
        return ((words[..., None] >> shifts) & mask).flatten(1)
    wide = words.long() & 0xFFFFFFFF  # [R, W]
    first = torch.arange(0, words.shape[1] * 32 - bits + 1, bits)  # first bit of each code
    following = torch.cat([wide[:, 1:], torch.zeros_like(wide[:, :1])], 1)
    at = first // 32
    return (wide[:, at] >> (first % 32) | following[:, at] << (32 - first % 32)) & mask


def _awq(words: Tensor) -> Tensor:
    """Codes [R, W x 8] of words [R, W]."""
    shifts = torch.tensor(AWQ_ORDER, dtype=torch.int32) * 4
    return ((words[..., None] >> shifts) & 15).flatten(1)


def _fill_blocks(target: Tensor, tensor: BlockTensor, read: ReadRows) -> None:
    parts = tensor.parts
    table = _whole(parts["table"], read).float()  # [16]
    absmax = _whole(parts["absmax"], read)  # [blocks]
    if "absmax_scale" in parts:
        scale = _whole(parts["absmax_scale"], read).float().repeat_interleave(tensor.absmax_block)[: absmax.numel()]
        absmax = _whole(parts["absmax_table"], read).float()[absmax.int()] * scale + tensor.offset
    flat, values = target.view(-1), parts["values"]
    for start, end in _pieces(values.shape[0], 2 * math.prod(values.shape[1:]), tensor.block):
        codes = read(values, start, end).view(torch.uint8).flatten()
        both = torch.stack([codes >> 4, codes & 15], 1).flatten()[: flat.numel() - 2 * start]
        blocks = absmax[torch.arange(2 * start, 2 * start + both.numel()) // tensor.block].float()
        flat[2 * start : 2 * start + both.numel()] = (table[both.int()] * blocks).to(target.device)
