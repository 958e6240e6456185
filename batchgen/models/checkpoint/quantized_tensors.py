"""Plain tensors that are computed from quantised ones, as descriptions that need no torch, and their blocks.

The reader of weights computes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from batchgen.models.checkpoint.safetensors_header import TensorInfo


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A plain tensor of `shape`, and the stored tensors that it is computed from."""

    shape: tuple[int, ...]
    parts: Mapping[str, TensorInfo]
    """Role ("values", "scale", ...) -> stored tensor."""
    label: str
    """The encoding in words, as "FP8 in blocks of 128 x 128"."""

    @property
    def dtype(self) -> str:
        """Dtype in which the values are computed, by safetensors' name."""
        return "F32"

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return sum(part.nbytes for part in self.parts.values())


@dataclass(frozen=True, slots=True)
class ScaledTensor(QuantizedTensor):
    """(values - zero) x scale x factor, with one scale for each block of values.

    Parts: `values` (floats of 8 bits, int8, or pairs of 4-bit floats in bytes), `scale`, and optionally `zero`,
    `global_scale` (one number) and `groups` (the number of each column's group of scales).
    """

    stored_shape: tuple[int, ...]
    """Shape of the values before they are transposed, with two of them for each byte of 4-bit floats."""
    scale_shape: tuple[int, ...]
    """Shape of the scale, with as many axes as `stored_shape`."""
    blocks: tuple[int, ...]
    """Size of a block along each axis."""
    pairs: bool = False
    """Whether each byte holds two 4-bit floats (E2M1), the first one in its low half."""
    exponents: bool = False
    """Whether a scale is stored as the exponent of a power of two, with a bias of 127."""
    divides: bool = False
    """Whether `global_scale` divides."""
    factor: float = 1.0
    transposed: bool = False
    """Whether the last two axes of the plain tensor are those of the stored one, exchanged."""


Layout = Literal["columns", "gptq", "awq"]


@dataclass(frozen=True, slots=True)
class PackedTensor(QuantizedTensor):
    """A matrix [O, I] of small integers in 32-bit words, (code - zero) x scale, with scales for groups of inputs.

    Parts: `words`, `scale`, and optionally `zero` and `groups` (int32 [I], each input's group).

    | layout | words | scale | zero |
    |---|---|---|---|
    | columns | [O, I x bits / 32] | [O, G] | [O x bits / 32, G]; without it, half of the codes' range |
    | gptq | [I x bits / 32, O] | [G, O] | [G, O x bits / 32] |
    | awq | [I, O / 8] | [G, O] | [G, O / 8], columns in the order of `AWQ_ORDER` |
    """

    bits: int
    layout: Layout
    group: int
    """Inputs of a group; unused with a part `groups`."""
    zeros_less_one: bool = False
    """Whether one less than each zero is stored (first version of GPTQ's format)."""
    symmetric: bool = False
    """Whether the description says that every zero is half of the codes' range."""


@dataclass(frozen=True, slots=True)
class BlockTensor(QuantizedTensor):
    """Four-bit codes of a table, in blocks over the flat tensor (bitsandbytes): table[code] x absmax of the block.

    Parts: `values` (the first code of a byte in its high half), `table` [16], `absmax`; if these are quantised, too,
    `absmax_table` [256] and `absmax_scale`: absmax = absmax_table[stored] x absmax_scale of its block + `offset`.
    """

    block: int
    absmax_block: int = 1
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class AssembledTensor(QuantizedTensor):
    """A stack of matrices of which each of `parts`, in order, stores its share, a matrix of each."""

    matrices: tuple[int, int, int]
    """Number of matrices, their rows and columns; the product is the number of values of the plain tensor."""
    axis: int = 0
    """Axis of the matrices along which the parts follow each other."""
    alternating: bool = False
    """Whether the parts alternate along the axis, instead of one following the other."""
    transposed: tuple[bool, ...] = ()
    """Whether the axes of a part's matrices are exchanged."""


AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of a word, from the lowest on, hold each of its eight columns."""

StoredTensor = TensorInfo | QuantizedTensor
"""A tensor of a checkpoint as the model takes it: stored as it is, or computed."""


def integer_group(tensor: StoredTensor) -> int | None:
    """Inputs of a row that share a scale, of a matrix [O, I] of integers times scales; None for other tensors.

    A shorter last group counts as a whole one. An order of inputs that is stored may still divide the groups, and
    zeros may make the integers larger than eight bits.
    """
    if isinstance(tensor, PackedTensor):
        return min(tensor.group, tensor.shape[1])
    if not isinstance(tensor, ScaledTensor) or len(tensor.stored_shape) != 2 or tensor.transposed:
        return None
    if tensor.parts["values"].dtype != "I8" or tensor.exponents or "groups" in tensor.parts:
        return None
    return min(tensor.blocks[1], tensor.shape[1])


def float_group(tensor: StoredTensor) -> int | None:
    """As `integer_group`, of a matrix of floats of eight bits (E4M3) times scales."""
    if not isinstance(tensor, ScaledTensor) or len(tensor.stored_shape) != 2 or tensor.transposed:
        return None
    if tensor.parts["values"].dtype != "F8_E4M3" or tensor.exponents or not tensor.parts.keys().isdisjoint(_CHANGED):
        return None
    return min(tensor.blocks[1], tensor.shape[1])


_CHANGED: Final = ("zero", "groups")
"""Parts that make other numbers of stored ones."""


def aligned(scale: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The scale's shape with the axes of the values; empty if they do not fit."""
    if math.prod(scale) == 1:
        return (1,) * len(shape)
    if len(scale) == len(shape):
        return scale
    if len(scale) == 1 and shape and scale[0] == shape[0]:
        return (*scale, *(1,) * (len(shape) - 1))
    if len(scale) == len(shape) - 1 and scale == shape[:-1]:
        return (*scale, 1)
    return ()


def block_size(size: int, count: int, known: int | None) -> int:
    """Size of the `count` blocks of an axis; 0 if there is none.

    Only the last block may be shorter. Blocks of a power of two are preferred, since the sizes that quantisers use are.
    """
    if count == 1:
        return max(1, size, known or 0)
    if count == size:
        return 1
    candidates = [known, *(1 << power for power in range(16)), size // count if count and size % count == 0 else None]
    return next((each for each in candidates if each and -(-size // each) == count), 0)


def granularity(shape: tuple[int, ...], blocks: tuple[int, ...]) -> str:
    """The blocks in words, as "in groups of 128"."""
    rows, columns = blocks[-2] if len(blocks) > 1 else 1, blocks[-1]
    whole_row = columns == shape[-1]
    if whole_row and rows == (shape[-2] if len(shape) > 1 else 1):
        return "per tensor"
    if whole_row and rows == 1:
        return "per channel"
    return f"in groups of {columns}" if rows == 1 else f"in blocks of {rows} x {columns}"
