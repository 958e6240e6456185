"""Reading of stored tensors directly into allocated tensors, without a second copy of the model in memory.

A tensor is read in place if its target has the stored dtype and is contiguous on the CPU. Otherwise it is converted and
copied in pieces through one buffer of at most 32 MiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import BinaryIO, Final

import torch
from torch import Tensor

from batchgen.errors import ModelError
from batchgen.models.safetensors_header import StoredForm, TensorInfo

_TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_BUFFER_BYTES: Final = 32 << 20


class WeightReader:
    """Reader that copies named tensors into targets; keeps the current file open, so use it as a context manager."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._tensors = tensors
        self._name: str | None = None
        self._stream: BinaryIO | None = None
        self._buffer: Tensor | None = None

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


class _StoredTensor:
    """A tensor for transformers, which reads it by indexing when its turn comes."""

    def __init__(self, name: str, info: TensorInfo, dtype: torch.dtype) -> None:
        self._name = name
        self._info = info
        # Vectors are small, and modules that compute in float32 keep them exact.
        self.dtype = torch.float32 if len(info.shape) == 1 else dtype
        self.shape = info.shape

    def __getitem__(self, where: object) -> Tensor:
        assert where is Ellipsis, "tensors are read whole"
        target = torch.empty(self.shape, dtype=self.dtype)
        with WeightReader({self._name: self._info}) as reader:
            reader.read_into(self._name, target)
        return target


def stored_tensors(tensors: Mapping[str, TensorInfo], dtype: torch.dtype) -> dict[str, _StoredTensor]:
    """Tensors that are read, and converted to `dtype`, one by one when transformers takes them."""
    return {name: _StoredTensor(name, info, dtype) for name, info in tensors.items()}
