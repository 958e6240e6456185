"""Linear layers of a native decoder in the numbers that a quantised checkpoint stores, without computing others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import TracebackType

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.cpu.matmul import int8_bytes
from batchgen.kernels.quantization import FP8, INT4, INT8, GroupedWeight, groups_of, in_four_bits
from batchgen.kernels.stream import in_lines
from batchgen.models.base import Form
from batchgen.models.checkpoint.dequantise import StoredNumbers
from batchgen.models.checkpoint.folder import ModelFolder
from batchgen.models.checkpoint.quantized_tensors import PackedTensor, StoredTensor, float_group, integer_group
from batchgen.models.checkpoint.weights import WeightReader
from batchgen.models.native.weights import FusedTensor, NativeLayout


def kernel_group(fused: FusedTensor, tensors: Sequence[StoredTensor]) -> int | None:
    """Most inputs of a group of the int8 products such that each of their groups has one scale of each of `tensors`.

    None if the tensors, matrices of which `fused` [O, I] is made, are not of integers, or there is no such size.
    """
    groups = [integer_group(tensor) for tensor in tensors]
    inner = fused.shape[-1]
    shared = _shared(fused, tensors, groups)
    if shared is None:
        return None
    if not shared:
        return INT8.group
    (group,) = shared
    size = group if group < INT8.group else INT8.group
    return size if inner % group == group % size == size % INT8.multiple == 0 else None


def _shared(fused: FusedTensor, tensors: Sequence[StoredTensor], groups: Sequence[int | None]) -> set[int] | None:
    """The size of groups that are shorter than a stored row, if there are any; None: they do not fit a product."""
    shared = {group for group in groups if group is not None and group < tensors[0].shape[-1]}
    cut = any(fused.first_column % group for group in shared)
    return None if None in groups or len(shared) > 1 or cut else shared


class OwnIntegers:
    """Reader of the integers that a checkpoint stores; as a context manager it keeps the current file open."""

    def __init__(self, folder: ModelFolder, layout: NativeLayout) -> None:
        self.layout = layout
        """The decoder's tensors."""
        self._tensors = folder.tensors
        self._reader: WeightReader | None = None

    def __enter__(self) -> OwnIntegers:
        self._reader = WeightReader(self._tensors)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._reader is not None
        self._reader.__exit__(kind, error, at)
        self._reader = None

    def read(
        self, fused: FusedTensor, reader: WeightReader | None = None, memory: Tensor | None = None
    ) -> GroupedWeight | None:
        """The stored integers of a fused matrix [O, I]; None if they do not fit the int8 products.

        Args:
            fused: the matrix.
            reader: of the checkpoint's tensors; None in the context of this object.
            memory: at least O x I bytes, in which the result's integers may be; None: new memory.

        Raises:
            ModelError: a file cannot be read.
        """
        group = kernel_group(fused, [self._tensors[name] for name, _ in fused.parts])
        if group is None:
            return None
        reader = self._reader if reader is None else reader
        assert reader is not None
        outer, inner = fused.shape
        scheme = replace(INT8, group=group)
        count, size = groups_of(inner, scheme)
        flat = torch.empty(outer * inner, dtype=torch.int8) if memory is None else memory.view(torch.int8)
        numbers = flat[: outer * inner].view(outer, inner)
        scales = _read_parts(fused, reader.integers, numbers, count, size)
        if scales is None:
            return None
        padded = F.pad(numbers, (0, count * size - inner)).view(outer, count, size)
        return GroupedWeight(padded, scales, inner, scheme)

    def read_weight(self, fused: FusedTensor, reader: WeightReader) -> GroupedWeight | None:
        """The stored numbers of a fused matrix for products of full inputs; None if it has none that fit.

        Integers whose codes have four bits are packed in these.

        Raises:
            ModelError: a file cannot be read.
        """
        parts = [self._tensors[name] for name, _ in fused.parts]
        form = weight_form(fused, parts)
        if form is None:
            return None
        (outer, inner), count, size = fused.shape, form.groups, form.size
        dtype = FP8.dtype if form.floats else torch.int8
        whole = torch.zeros(outer, count * size, dtype=torch.uint8).view(dtype)
        read = reader.floats if form.floats else reader.integers
        scales = _read_parts(fused, read, whole[:, :inner], count, size)
        if scales is None:
            return None
        scheme = replace(FP8 if form.floats else INT8, group=size)
        weight = GroupedWeight(whole.view(outer, count, size), scales, inner, scheme)
        return in_four_bits(weight) if form.bits == 4 else weight


def _read_parts(
    fused: FusedTensor,
    read: Callable[[str, Tensor, tuple[slice, ...]], StoredNumbers | None],
    numbers: Tensor,
    count: int,
    size: int,
) -> Tensor | None:
    """Fill `numbers` [O, I] with those of all parts; None if one has none of the kind.

    Returns:
        Scales [O, `count`] of groups of `size` inputs, each within one group of the stored ones.
    """
    scales, start = torch.empty(len(numbers), count), 0
    for part, (name, rows) in enumerate(fused.parts):
        stored = read(name, numbers[start : start + rows], fused.index_of(part))
        if stored is None:
            return None
        scales[start : start + rows] = stored.scales[:, torch.arange(count) * size // stored.group]
        start += rows
    return scales


@dataclass(frozen=True, slots=True)
class WeightForm:
    """Form of a weight [O, I] in products of full inputs."""

    outer: int
    inner: int
    size: int
    """Inputs of a group, of which the last one may use fewer."""
    bits: int
    floats: bool

    @property
    def groups(self) -> int:
        """Number of groups of a row."""
        return -(-self.inner // self.size)

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers, scales and zeros."""
        return self.outer * self.groups * (self.size * self.bits // 8 + (5 if self.bits == 4 else 4))


def weight_form(fused: FusedTensor, tensors: Sequence[StoredTensor]) -> WeightForm | None:
    """The form of a matrix [O, I] made of matrices whose numbers all are floats or all are integers.

    None if they have another one, or their groups do not fit the products.
    """
    floats = float_group(tensors[0]) is not None
    groups = [float_group(tensor) if floats else integer_group(tensor) for tensor in tensors]
    outer, inner = fused.shape
    shared = _shared(fused, tensors, groups)
    if shared is None:
        return None
    size = next(iter(shared)) if shared else inner + -inner % INT4.multiple
    if shared and size % INT4.multiple:
        return None
    small = all(isinstance(tensor, PackedTensor) and tensor.bits <= 4 for tensor in tensors)
    return WeightForm(outer, inner, size, 4 if small else 8, floats)


def stream_bytes(layout: NativeLayout, itemsize: int, numbers: ModelFolder | None = None) -> tuple[int, ...]:
    """Bytes of the linear layers of each block, as `LayerStream` copies them; the vectors of norms are not streamed.

    `numbers`: the folder whose stored numbers are kept for products of full inputs where they fit; None: none are.
    """

    def nbytes(fused: FusedTensor) -> int:
        stored = [numbers.tensors[name] for name, _ in fused.parts] if numbers is not None and fused.columns else []
        own = weight_form(fused, stored) if stored else None
        if own is None:
            return in_lines(prod(fused.shape) * itemsize)
        sizes = (own.size * own.bits // 8, 4, *([1] if own.bits == 4 else []))
        return sum(in_lines(own.outer * own.groups * size) for size in sizes)

    return tuple(sum(nbytes(x) for name, x in layer.items() if not name.endswith("_norm")) for layer in layout.layers)


def weight_forms(layout: NativeLayout, folder: ModelFolder) -> list[WeightForm]:
    """The forms of a decoder's linear layers that have one."""
    forms = [weight_form(*matrix) for matrix in _matrices(layout, folder)]
    return [form for form in forms if form is not None]


def stored_sizes(layout: NativeLayout, folder: ModelFolder, form: Form) -> list[tuple[int, int]]:
    """(numbers, bytes) of each linear layer of a decoder that keeps the numbers of the checkpoint, by their shapes."""
    if form == "full":
        return []
    if form == "weight-only":
        return [(each.outer * each.inner, each.nbytes) for each in weight_forms(layout, folder)]
    groups = [(fused.shape, kernel_group(fused, tensors)) for fused, tensors in _matrices(layout, folder)]
    return [(outer * inner, int8_bytes(outer, inner, group)) for (outer, inner), group in groups if group is not None]


def _matrices(layout: NativeLayout, folder: ModelFolder) -> list[tuple[FusedTensor, list[StoredTensor]]]:
    """The fused tensors, and the stored ones, of the matrices of linear layers."""
    linears = [fused for layer in layout.layers for fused in layer.values() if fused.columns]
    matrices = linears if layout.head is None else [*linears, layout.head]
    return [(fused, [folder.tensors[name] for name, _ in fused.parts]) for fused in matrices]
