"""Linear layers of a native decoder in the integers that a quantised checkpoint stores, without computing others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.cpu.matmul import int8_bytes
from batchgen.kernels.quantization import INT8, GroupedWeight, groups_of
from batchgen.models.folder import ModelFolder
from batchgen.models.native_weights import FusedTensor, NativeLayout
from batchgen.models.quantized.dequantise import StoredIntegers
from batchgen.models.quantized.tensors import StoredTensor, integer_group
from batchgen.models.weights import WeightReader

Weights = Literal["none", "int8", "stored"]
"""How the weights of linear layers are computed. `none`: as numbers of the run's dtype. `int8`: all in int8. `stored`:
in the integers of the checkpoint where it has these, else as `none`."""


def kernel_group(tensors: Sequence[StoredTensor]) -> int | None:
    """Most inputs of a group of the int8 products such that each of their groups has one scale of each of `tensors`.

    None if the tensors, matrices [O, I] of one I, are not of integers, or there is no such size.
    """
    groups = [integer_group(tensor) for tensor in tensors]
    inner = tensors[0].shape[-1]
    shared = {group for group in groups if group is not None and group < inner}
    if None in groups or len(shared) > 1:
        return None
    if not shared:
        return INT8.group
    (group,) = shared
    size = group if group < INT8.group else INT8.group
    return size if inner % group == group % size == size % INT8.multiple == 0 else None


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
        group = kernel_group([self._tensors[name] for name, _ in fused.parts])
        if group is None:
            return None
        reader = self._reader if reader is None else reader
        assert reader is not None
        outer, inner = fused.shape
        scheme = replace(INT8, group=group)
        count, size = groups_of(inner, scheme)
        flat = torch.empty(outer * inner, dtype=torch.int8) if memory is None else memory.view(torch.int8)
        numbers, scales, start = flat[: outer * inner].view(outer, inner), torch.empty(outer, count), 0
        for name, rows in fused.parts:
            found = reader.integers(name, numbers[start : start + rows])
            if found is None:
                return None
            scales[start : start + rows] = _scales_of(found, count, size)
            start += rows
        padded = F.pad(numbers, (0, count * size - inner)).view(outer, count, size)
        return GroupedWeight(padded, scales, inner, scheme)


def _scales_of(stored: StoredIntegers, count: int, size: int) -> Tensor:
    """Scales [O, `count`] of groups of `size` inputs, each within one group of the stored ones."""
    return stored.scales[:, torch.arange(count) * size // stored.group]


def has_integer_inputs(folder: ModelFolder) -> bool:
    """Whether a checkpoint is made for products of integers: its description rounds the inputs of its layers, too."""
    return folder.quantisation is not None and folder.quantisation.integer_inputs


def count_integers(layout: NativeLayout, folder: ModelFolder) -> int:
    """Number of linear layers whose stored integers fit the int8 products, by their shapes."""
    return sum(_group(fused, folder) is not None for layer in layout.layers for fused in layer.values())


def stored_bytes(layout: NativeLayout, folder: ModelFolder, itemsize: int) -> int:
    """Bytes of a decoder whose linear layers are in their stored integers where they have such.

    Args:
        layout: the decoder.
        folder: its checkpoint.
        itemsize: bytes of a number of the other tensors.
    """
    size = 0
    for fused in layout:
        group = _group(fused, folder)
        outer, inner = (*fused.shape, 1)[:2]
        size += outer * inner * itemsize if group is None else int8_bytes(outer, inner, group)
    return size


def _group(fused: FusedTensor, folder: ModelFolder) -> int | None:
    return kernel_group([folder.tensors[name] for name, _ in fused.parts]) if fused.columns else None
