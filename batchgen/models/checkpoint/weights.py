"""Reading of stored tensors directly into allocated tensors, without a second copy of the model in memory.

A tensor is read in place if its target has the stored dtype and is contiguous on the CPU. Otherwise it is converted and
copied in pieces through one buffer of at most 32 MiB.

Quantised tensors are dequantised in pieces (`quantized.dequantise`), or given as the integers that they store.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import EllipsisType, TracebackType
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.errors import ModelError
from batchgen.gguf.tensors import GgufForm
from batchgen.models.checkpoint.dequantise import (
    Part,
    StoredNumbers,
    dequantise,
    stored_floats,
    stored_integers,
    whole_index,
)
from batchgen.models.checkpoint.quantized_tensors import QuantizedTensor, StoredTensor
from batchgen.models.checkpoint.safetensors_header import TensorInfo

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


class WeightReader:
    """Reader that copies named tensors into targets; keeps the current file open, so use it as a context manager.

    Quantised tensors are dequantised on the way, in pieces.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors
        self._name: str | None = None
        self._stream: BinaryIO | None = None
        self._buffer: Tensor | None = None
        # One thread reads for all callers, so that one pool of the allocator, and not one a caller, keeps what pieces
        # took. It starts with the first tensor.
        self._thread = ThreadPoolExecutor(max_workers=1)

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._thread.shutdown()
        if self._stream is not None:
            self._stream.close()
        self._stream = self._buffer = None

    def read_into(self, name: str, target: Tensor, index: tuple[slice, ...] = ()) -> None:
        """Fill `target` with the part `index` of the stored tensor `name`, converted to the dtype of `target`.

        `index` has a slice for each leading axis that is not read whole.

        Raises:
            ModelError: the tensor is not stored as floating point, or the file cannot be read.
        """
        info = self._tensors[name]
        part = whole_index(info.shape, index)
        assert target.shape == _shape_of(part), (name, info.shape, index, target.shape)
        if isinstance(info, QuantizedTensor):
            dequantise(target, info, self._rows, part)
            return
        dtype = _TORCH_DTYPES.get(info.dtype)
        if dtype is None and info.form is None:
            raise ModelError(
                f"{name} is stored as {info.dtype}, which is not supported. Use the unquantised checkpoint."
            )
        try:
            stream = self._open(info)
            if info.form is not None:
                self._decode(stream, info.form, target, info, part)
            else:
                assert dtype is not None, "checked above"
                self._copy(stream, dtype, target, info, part)
        except OSError as error:
            raise ModelError(f"Cannot read {info.file}: {error.strerror or error}. Copy the file again.") from None

    def integers(self, name: str, into: Tensor, index: tuple[slice, ...] = ()) -> StoredNumbers | None:
        """The integers and scales of a part of the stored matrix `name`, if it has a form of these.

        Args:
            name: of a quantised tensor.
            into: [O, I] int8, which receives the integers.
            index: as for `read_into`; its columns begin with a group.

        Raises:
            ModelError: the file cannot be read.
        """
        info = self._tensors[name]
        part = whole_index(info.shape, index)
        return stored_integers(info, into, self._rows, part) if isinstance(info, QuantizedTensor) else None

    def floats(self, name: str, into: Tensor, index: tuple[slice, ...] = ()) -> StoredNumbers | None:
        """As `integers`, of floats of eight bits; `into` is float8_e4m3fn."""
        info = self._tensors[name]
        part = whole_index(info.shape, index)
        return stored_floats(info, into, self._rows, part) if isinstance(info, QuantizedTensor) else None

    def converts(self, dtype: torch.dtype) -> bool:
        """Whether `read` rounds a matrix to `dtype`, from what is stored."""
        infos = (info for info in self._tensors.values() if len(info.shape) > 1)
        return any(isinstance(i, QuantizedTensor) or _TORCH_DTYPES.get(i.dtype) != dtype for i in infos)

    def read(self, name: str, dtype: torch.dtype, index: tuple[slice, ...] = ()) -> Tensor:
        """The part `index` of the tensor `name` in new memory, as for `read_into`.

        Floating-point matrices are in `dtype`, decoded vectors in float32, others as they are stored.

        Threads may call it.

        Raises:
            ModelError: its dtype is not supported, or the file cannot be read.
        """
        info = self._tensors[name]
        part = whole_index(info.shape, index)
        if (
            isinstance(info, TensorInfo)
            and info.form is None
            and (len(info.shape) < 2 or info.dtype not in _TORCH_DTYPES)
        ):
            rows = info.shape[0] if info.shape else 1
            return self._thread.submit(self._rows, info, 0, rows).result().view(info.shape)[part].contiguous()
        # Vectors are small, and modules that compute in float32 keep them exact.
        target = torch.empty(_shape_of(part), dtype=torch.float32 if len(info.shape) == 1 else dtype)
        self._thread.submit(self.read_into, name, target, part).result()
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
        self._fill_from(info, start * (info.nbytes // max(1, rows)), out.view(-1))
        return out

    def _decoded_rows(self, info: TensorInfo, form: GgufForm, start: int, end: int) -> Tensor:
        shape = (end - start, *info.shape[1:])
        packed = torch.empty(info.nbytes // info.shape[0] * (end - start), dtype=torch.uint8)
        self._fill_from(info, start * (info.nbytes // info.shape[0]), packed)
        return torch.from_numpy(form.values(packed.numpy(), form.columns(shape))).view(shape)

    def _fill_from(self, info: TensorInfo, offset: int, target: Tensor) -> None:
        """Fill a flat tensor with the bytes from an offset in a stored tensor on."""
        try:
            stream = self._open(info)
            stream.seek(info.start + offset)
            _fill(stream, target, info)
        except OSError as error:
            raise ModelError(f"Cannot read {info.file}: {error.strerror or error}. Copy the file again.") from None

    def _open(self, info: TensorInfo) -> BinaryIO:
        if self._stream is None or self._name != str(info.file):
            if self._stream is not None:
                self._stream.close()
            # Unbuffered, because every read is large.
            self._stream, self._name = info.file.open("rb", buffering=0), str(info.file)
        return self._stream

    def _copy(self, stream: BinaryIO, dtype: torch.dtype, target: Tensor, info: TensorInfo, part: Part) -> None:
        """Read a part of a tensor in the order of its numbers, in place or in pieces through the buffer."""
        assert target.is_contiguous(), "targets are slices of leading rows"
        flat, (starts, length) = target.view(-1), _runs(info.shape, part)
        in_place = dtype == target.dtype and target.device.type == "cpu"
        if not in_place and self._buffer is None:
            self._buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8)
        most = flat.numel() if in_place or self._buffer is None else self._buffer.view(dtype).numel()
        for begin in range(0, flat.numel(), max(1, most)):
            piece = flat[begin : begin + most]
            source = piece if in_place or self._buffer is None else self._buffer.view(dtype)[: piece.numel()]
            at = 0
            while at < piece.numel():
                run, inside = divmod(begin + at, length)
                count = min(length - inside, piece.numel() - at)
                stream.seek(info.start + (int(starts[run]) + inside) * dtype.itemsize)
                _fill(stream, source[at : at + count], info)
                at += count
            if not in_place:
                piece.copy_(source)

    def _decode(self, stream: BinaryIO, form: GgufForm, target: Tensor, info: TensorInfo, part: Part) -> None:
        """Decode groups of whole rows, and keep what is in the part."""
        columns = form.columns(info.shape)
        if len(part) > 2 and part[1:] != whole_index(info.shape[1:], ()):
            size = info.nbytes // info.shape[0]
            for number, target_of in enumerate(target):
                start = info.start + (part[0].start + number) * size
                one = replace(info, shape=info.shape[1:], start=start, nbytes=size)
                self._decode(stream, form, target_of, one, part[1:])
            return
        rows = math.prod(info.shape) // columns
        each, inside = rows // info.shape[0], slice(None)
        wanted = slice(part[0].start * each, part[0].stop * each)
        if not each:  # a vector is one row
            wanted, inside = slice(0, 1), part[0]
        elif len(part) == 2 and columns == info.shape[1]:
            inside = part[1]
        matrix = target.view(wanted.stop - wanted.start, -1)
        group = max(form.rows, _BUFFER_BYTES // (4 * columns) // form.rows * form.rows)
        for begin in range(wanted.start // form.rows * form.rows, wanted.stop, group):
            end = min(begin + group, rows)
            stream.seek(info.start + info.nbytes * begin // rows)
            packed = torch.empty(info.nbytes * (end - begin) // rows, dtype=torch.uint8)
            _fill(stream, packed, info)
            values = torch.from_numpy(form.values(packed.numpy(), columns))
            low, high = max(begin, wanted.start), min(end, wanted.stop)
            matrix[low - wanted.start : high - wanted.start].copy_(values[low - begin : high - begin, inside])


def _shape_of(part: Part) -> tuple[int, ...]:
    return tuple(axis.stop - axis.start for axis in part)


def _runs(shape: tuple[int, ...], part: Part) -> tuple[npt.NDArray[np.int64], int]:
    """Where the runs of numbers that follow each other in a part of a tensor begin, and how long each is."""
    cut = max((axis for axis, each in enumerate(part) if each != slice(0, shape[axis])), default=0)
    inner = math.prod(shape[cut + 1 :])
    starts = np.zeros(1, np.int64)
    for axis in range(cut):
        starts = (starts[:, None] * shape[axis] + np.arange(part[axis].start, part[axis].stop)).ravel()
    if not part:
        return starts, 1
    return (starts * shape[cut] + part[cut].start) * inner, (part[cut].stop - part[cut].start) * inner


class LazyWeight:
    """A stored tensor that is read when the loader of transformers indexes it, by any thread.

    `indexes`: the parts to read, as for `WeightReader.read_into`, which follow each other along the last axis of these.
    """

    def __init__(self, name: str, reader: WeightReader, dtype: torch.dtype, indexes: Sequence[Part] = ((),)) -> None:
        self._name = name
        self._reader = reader
        self._dtype = dtype
        self._indexes = indexes

    def __getitem__(self, index: EllipsisType) -> Tensor:
        """What is wanted of the tensor, in new memory; quantised ones are computed in the dtype of the run."""
        parts = [self._reader.read(self._name, self._dtype, index) for index in self._indexes]
        return parts[0] if len(parts) == 1 else torch.cat(parts, len(self._indexes[0]) - 1)


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
