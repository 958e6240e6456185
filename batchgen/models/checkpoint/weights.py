"""Reading of stored tensors directly into allocated tensors, without a second copy of the model in memory.

A tensor is read in place if its target has the stored dtype and is contiguous on the CPU. Otherwise it is converted and
copied in pieces through one buffer of at most 32 MiB.

Quantised tensors are dequantised in pieces (`quantized.dequantise`), or given as the integers that they store.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import EllipsisType, TracebackType
from typing import BinaryIO, Final

import torch
from torch import Tensor

from batchgen.errors import ModelError
from batchgen.gguf.tensors import GgufForm
from batchgen.models.checkpoint.dequantise import StoredNumbers, dequantise, stored_floats, stored_integers
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
        assert info.shape == tuple(target.shape), (name, info.shape, target.shape)
        if isinstance(info, QuantizedTensor):
            dequantise(target, info, self._rows)
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

    def integers(self, name: str, into: Tensor) -> StoredNumbers | None:
        """The integers and scales of the stored matrix `name` [O, I], if it has a form of these.

        Args:
            name: of a quantised tensor.
            into: [O, I] int8, which receives the integers.

        Raises:
            ModelError: the file cannot be read.
        """
        info = self._tensors[name]
        return stored_integers(info, into, self._rows) if isinstance(info, QuantizedTensor) else None

    def floats(self, name: str, into: Tensor) -> StoredNumbers | None:
        """As `integers`, of floats of eight bits; `into` is float8_e4m3fn."""
        info = self._tensors[name]
        return stored_floats(info, into, self._rows) if isinstance(info, QuantizedTensor) else None

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
        if (
            isinstance(info, TensorInfo)
            and info.form is None
            and (len(info.shape) < 2 or info.dtype not in _TORCH_DTYPES)
        ):
            rows = info.shape[0] if info.shape else 1
            return self._thread.submit(self._rows, info, 0, rows).result().view(info.shape)
        # Vectors are small, and modules that compute in float32 keep them exact.
        target = torch.empty(info.shape, dtype=torch.float32 if len(info.shape) == 1 else dtype)
        self._thread.submit(self.read_into, name, target).result()
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

    def _decode(self, stream: BinaryIO, form: GgufForm, target: Tensor, info: TensorInfo) -> None:
        assert target.is_contiguous(), "targets are slices of leading rows"
        matrix = target.view(-1, form.columns(target.shape))
        rows, columns = matrix.shape
        group = max(form.rows, _BUFFER_BYTES // (4 * columns) // form.rows * form.rows)
        for start in range(0, rows, group):
            part = matrix[start : start + group]
            packed = torch.empty(info.nbytes * len(part) // rows, dtype=torch.uint8)
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
