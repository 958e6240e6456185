"""Reading of stored tensors directly into allocated tensors, without a second copy of the model in memory.

A tensor is read in place if its target has the stored dtype and is contiguous on the CPU. Otherwise it is converted and
copied in pieces through one buffer of at most 32 MiB.

Quantised tensors are dequantised in float32, in pieces of a few rows. Memory in addition to the target is that of a
piece: at most `_PIECE` values, or one matrix of a stack of experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from threading import Lock
from types import EllipsisType, TracebackType
from typing import BinaryIO, Final

import torch
from torch import Tensor

from batchgen.errors import ModelError
from batchgen.models.quantized.tensors import (
    AWQ_ORDER,
    AssembledTensor,
    BlockTensor,
    PackedTensor,
    QuantizedTensor,
    ScaledTensor,
    StoredTensor,
)
from batchgen.models.safetensors_header import StoredForm, TensorInfo

_TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_OTHER_DTYPES: Final[dict[str, torch.dtype]] = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Dtypes of parts of quantised tensors, and of buffers, which are never converted."""
_BUFFER_BYTES: Final = 32 << 20

_PIECE: Final = 1 << 20
"""Values of a piece that is dequantised."""
_FLOATS_OF_4_BITS: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1 values without a sign, by code."""

_ReadRows = Callable[[TensorInfo, int, int], Tensor]
"""Reads the rows from one up to another of a stored tensor, in its own dtype; a scalar is one row."""


class WeightReader:
    """Reader that copies named tensors into targets; keeps the current file open, so use it as a context manager.

    Quantised tensors are dequantised on the way, in pieces.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors
        self._name: str | None = None
        self._stream: BinaryIO | None = None
        self._buffer: Tensor | None = None
        self._lock = Lock()

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = self._buffer = None

    def read_into(self, name: str, target: Tensor) -> None:
        """Fill `target` with the stored tensor `name` of the same shape, converted to the dtype of `target`.

        Raises:
            ModelError: the tensor is not stored as floating point, or the file cannot be read.
        """
        info = self._tensors[name]
        assert info.shape == tuple(target.shape), (name, info.shape, target.shape)
        if isinstance(info, QuantizedTensor):
            _dequantise(target, info, self._rows)
            return
        dtype = _TORCH_DTYPES.get(info.dtype)
        if dtype is None and info.form is None:
            raise ModelError(
                f"{name} is stored as {info.dtype}, which is not supported. Use the unquantised checkpoint."
            )
        try:
            stream = self._open(info)
            stream.seek(info.start)
            if info.form is not None:
                self._decode(stream, info.form, target, info)
            elif dtype == target.dtype and target.device.type == "cpu" and target.is_contiguous():
                _fill(stream, target.view(-1), info)
            else:
                assert dtype is not None, "checked above"
                self._convert(stream, dtype, target, info)
        except OSError as error:
            raise ModelError(f"Cannot read {info.file}: {error.strerror or error}. Copy the file again.") from None

    def converts(self, dtype: torch.dtype) -> bool:
        """Whether `read` rounds a matrix to `dtype`, from what is stored."""
        infos = (info for info in self._tensors.values() if len(info.shape) > 1)
        return any(isinstance(i, QuantizedTensor) or _TORCH_DTYPES.get(i.dtype) != dtype for i in infos)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor `name` in new memory: floating-point matrices in `dtype`, decoded vectors in float32, others as
        they are stored.

        Threads may call it.

        Raises:
            ModelError: its dtype is not supported, or the file cannot be read.
        """
        info = self._tensors[name]
        with self._lock:
            if (
                isinstance(info, TensorInfo)
                and info.form is None
                and (len(info.shape) < 2 or info.dtype not in _TORCH_DTYPES)
            ):
                return self._rows(info, 0, info.shape[0] if info.shape else 1).view(info.shape)
            # Vectors are small, and modules that compute in float32 keep them exact.
            target = torch.empty(info.shape, dtype=torch.float32 if len(info.shape) == 1 else dtype)
            self.read_into(name, target)
            return target

    def _rows(self, info: TensorInfo, start: int, end: int) -> Tensor:
        """Leading rows of a stored tensor in its dtype, or decoded in float32; a scalar is one row."""
        if info.form is not None:
            return self._decoded_rows(info, info.form, start, end)
        dtype = _TORCH_DTYPES.get(info.dtype) or _OTHER_DTYPES.get(info.dtype)
        if dtype is None:
            raise ModelError(f"{info.file} holds tensors stored as {info.dtype}, which is not supported.")
        rows = info.shape[0] if info.shape else 1
        out = torch.empty((end - start, *info.shape[1:]), dtype=dtype)
        try:
            stream = self._open(info)
            stream.seek(info.start + start * (info.nbytes // max(1, rows)))
            _fill(stream, out.view(-1), info)
        except OSError as error:
            raise ModelError(f"Cannot read {info.file}: {error.strerror or error}. Copy the file again.") from None
        return out

    def _decoded_rows(self, info: TensorInfo, form: StoredForm, start: int, end: int) -> Tensor:
        shape = (end - start, *info.shape[1:])
        packed = torch.empty(info.nbytes // info.shape[0] * (end - start), dtype=torch.uint8)
        try:
            stream = self._open(info)
            stream.seek(info.start + start * (info.nbytes // info.shape[0]))
            _fill(stream, packed, info)
        except OSError as error:
            raise ModelError(f"Cannot read {info.file}: {error.strerror or error}. Copy the file again.") from None
        return torch.from_numpy(form.values(packed.numpy(), form.columns(shape))).view(shape)

    def _open(self, info: TensorInfo) -> BinaryIO:
        if self._stream is None or self._name != str(info.file):
            if self._stream is not None:
                self._stream.close()
            # Unbuffered, because every read is large.
            self._stream, self._name = info.file.open("rb", buffering=0), str(info.file)
        return self._stream

    def _convert(self, stream: BinaryIO, dtype: torch.dtype, target: Tensor, info: TensorInfo) -> None:
        assert target.is_contiguous(), "targets are slices of leading rows"
        if self._buffer is None:
            self._buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8)
        piece = self._buffer.view(dtype)
        flat = target.view(-1)
        for start in range(0, flat.numel(), piece.numel()):
            part = flat[start : start + piece.numel()]
            source = piece[: part.numel()]
            _fill(stream, source, info)
            part.copy_(source)

    def _decode(self, stream: BinaryIO, form: StoredForm, target: Tensor, info: TensorInfo) -> None:
        assert target.is_contiguous(), "targets are slices of leading rows"
        matrix = target.view(-1, form.columns(target.shape))
        rows, columns = matrix.shape
        group = max(form.rows, _BUFFER_BYTES // (4 * columns) // form.rows * form.rows)
        for start in range(0, rows, group):
            part = matrix[start : start + group]
            packed = torch.empty(info.nbytes // rows * len(part), dtype=torch.uint8)
            _fill(stream, packed, info)
            part.copy_(torch.from_numpy(form.values(packed.numpy(), columns)))


class LazyWeight:
    """A stored tensor that is read when the loader of transformers indexes it, by any thread."""

    def __init__(self, name: str, reader: WeightReader, dtype: torch.dtype) -> None:
        self._name = name
        self._reader = reader
        self._dtype = dtype

    def __getitem__(self, index: EllipsisType) -> Tensor:
        """The whole tensor, in new memory; quantised ones are computed in the dtype of the run."""
        return self._reader.read(self._name, self._dtype)


def _fill(stream: BinaryIO, target: Tensor, info: TensorInfo) -> None:
    """Read exactly the bytes of the flat CPU tensor `target`."""
    if not target.numel():
        return
    view = memoryview(target.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's buffers need Python 3.12
    while view:
        count = stream.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise ModelError(f"{info.file} ended while it was read. Copy the file again.")
        view = view[count:]


def _dequantise(target: Tensor, tensor: QuantizedTensor, read: _ReadRows) -> None:
    """Fill `target`, of the plain tensor's shape and contiguous, rounding each value to its dtype once."""
    assert tensor.shape == tuple(target.shape), (tensor.shape, target.shape)
    if isinstance(tensor, ScaledTensor):
        _fill_scaled(target, tensor, read)
    elif isinstance(tensor, PackedTensor):
        _fill_packed(target, tensor, read)
    elif isinstance(tensor, AssembledTensor):
        _fill_assembled(target, tensor, read)
    else:
        assert isinstance(tensor, BlockTensor)
        _fill_blocks(target, tensor, read)


def _fill_assembled(target: Tensor, tensor: AssembledTensor, read: _ReadRows) -> None:
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


def _whole(info: TensorInfo, read: _ReadRows) -> Tensor:
    return read(info, 0, info.shape[0] if info.shape else 1)


def _pieces(rows: int, row_values: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Row ranges of at most `_PIECE` values but at least `multiple` rows, whose starts are its multiples."""
    step = max(1, _PIECE // max(1, row_values * multiple)) * multiple
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def _fill_scaled(target: Tensor, tensor: ScaledTensor, read: _ReadRows) -> None:
    out = target.transpose(-1, -2) if tensor.transposed else target
    groups = tensor.parts.get("groups")
    columns = None if groups is None else _whole(groups, read).long()
    factor = tensor.factor
    if "global_scale" in tensor.parts:
        one = float(_whole(tensor.parts["global_scale"], read).float().flatten()[0])
        factor = factor / one if tensor.divides else factor * one
    scales, zeros = (_RowScales(name, tensor, read, columns) for name in ("scale", "zero"))
    for start, end in _pieces(tensor.stored_shape[0], math.prod(tensor.stored_shape[1:])):
        values = _decoded(read(tensor.parts["values"], start, end), tensor)
        if "zero" in tensor.parts:
            values -= zeros.rows(start, end)
        values *= scales.rows(start, end) * factor
        out[start:end] = values.to(target.device)


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

    def __init__(self, part: str, tensor: ScaledTensor, read: _ReadRows, columns: Tensor | None) -> None:
        self._tensor = tensor
        self._columns = columns
        self._read = read
        self._info = tensor.parts.get(part)
        # Read once if several rows share a scale.
        shared = tensor.blocks[0] != 1 and self._info is not None
        self._all = self._floats(0, tensor.scale_shape[0]) if shared else None

    def rows(self, start: int, end: int) -> Tensor:
        """Those of the rows from `start` to `end`, broadcastable to their values."""
        shape, blocks = self._tensor.stored_shape, self._tensor.blocks
        shared = self._all
        found = self._floats(start, end) if shared is None else shared[torch.arange(start, end) // blocks[0]]
        for axis in range(1, len(shape)):
            if found.shape[axis] not in (1, shape[axis]):
                found = self._along(found, axis)
        return found

    def _along(self, found: Tensor, axis: int) -> Tensor:
        if self._columns is not None and axis == len(self._tensor.stored_shape) - 1:
            return found.index_select(axis, self._columns)
        size = self._tensor.stored_shape[axis]
        return found.repeat_interleave(self._tensor.blocks[axis], axis).narrow(axis, 0, size)

    def _floats(self, start: int, end: int) -> Tensor:
        assert self._info is not None
        stored = self._read(self._info, start, end)
        if self._tensor.exponents and stored.dtype == torch.uint8:
            stored = stored.view(torch.float8_e8m0fnu)
        return stored.float().view(end - start, *self._tensor.scale_shape[1:])


def _fill_packed(target: Tensor, tensor: PackedTensor, read: _ReadRows) -> None:
    if tensor.layout == "columns":
        _fill_columns(target, tensor, read)
    else:
        _fill_by_inputs(target, tensor, read)


def _groups(tensor: PackedTensor, read: _ReadRows) -> Tensor:
    """[I]: the group of each input."""
    if "groups" in tensor.parts:
        return _whole(tensor.parts["groups"], read).long()
    return torch.arange(tensor.shape[1]) // tensor.group


def _fill_columns(target: Tensor, tensor: PackedTensor, read: _ReadRows) -> None:
    rows, inputs = tensor.shape
    groups = _groups(tensor, read)
    zero = tensor.parts.get("zero")
    packed = None if zero is None else _unpacked(_whole(zero, read).T, tensor.bits).T  # [O, G]
    for start, end in _pieces(rows, inputs):
        codes = _unpacked(read(tensor.parts["words"], start, end), tensor.bits)[:, :inputs].float()
        scale = read(tensor.parts["scale"], start, end).float().view(end - start, -1)  # [n, G]
        if packed is None:
            codes -= 1 << (tensor.bits - 1)
        else:
            codes -= packed[start:end].float().index_select(1, groups)
        target[start:end] = (codes * scale.index_select(1, groups)).to(target.device)


def _fill_by_inputs(target: Tensor, tensor: PackedTensor, read: _ReadRows) -> None:
    outputs = tensor.shape[0]
    groups = _groups(tensor, read)
    scale = _whole(tensor.parts["scale"], read).float()  # [G, O]
    zero = _zeros(tensor, _whole(tensor.parts["zero"], read))[:, :outputs].float()  # [G, O]
    # Codes of 32 inputs fill as many whole words as a code has bits.
    per_row, multiple = (32 // tensor.bits, tensor.bits) if tensor.layout == "gptq" else (1, 1)
    for start, end in _pieces(tensor.parts["words"].shape[0], outputs * per_row, multiple):
        words = read(tensor.parts["words"], start, end)
        codes = _awq(words) if tensor.layout == "awq" else _unpacked(words.T, tensor.bits).T  # [n, O]
        first = start * 32 // tensor.bits if tensor.layout == "gptq" else start
        group = groups[first : first + codes.shape[0]]
        piece = (codes[: len(group), :outputs].float() - zero[group]) * scale[group]
        target[:, first : first + len(group)] = piece.to(target.device).T


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


def _fill_blocks(target: Tensor, tensor: BlockTensor, read: _ReadRows) -> None:
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
