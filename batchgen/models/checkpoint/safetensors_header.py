"""Headers of safetensors files: names, types and offsets of the tensors, checked against the file's size.

The format: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, then the data.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Final

from batchgen.errors import ModelError
from batchgen.gguf.tensors import GgufForm
from batchgen.models.checkpoint.file_hashes import FileStamp, unreadable
from batchgen.request.foreign_text import ForeignTextError, read_json, typed

DTYPE_BYTES: Final[dict[str, float]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8, "F4": 0.5, "F6_E2M3": 0.75, "F6_E3M2": 0.75,
}  # fmt: skip
_MAX_HEADER: Final = 100_000_000
"""Limit of the format, in bytes."""
_MAX_SIZE: Final = 1 << 62
"""No tensor has as many elements, or as many bytes."""
_MAX_AXES: Final = 64


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Location of a stored tensor: `nbytes` bytes of `dtype` (safetensors' name) from byte `start` of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    form: GgufForm | None = None
    """How the bytes become values, where they are not values of `dtype` themselves."""


def read_header(file: Path) -> tuple[dict[str, TensorInfo], FileStamp]:
    """Read the tensors of one file, and the stamp that it had before.

    Raises:
        ModelError: the file cannot be read, is cut short, or is not a safetensors file.
    """
    try:
        with file.open("rb") as stream:
            stamp = FileStamp.of(os.fstat(stream.fileno()))
            size = stamp.size
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise _damaged(file, f"it holds {size} bytes; a copy or download was probably interrupted")
            (length,) = struct.unpack("<Q", prefix)
            if length > _MAX_HEADER:
                raise _damaged(file, "it does not begin with a safetensors header")
            if length > size - 8:
                raise _damaged(file, f"it ends inside its header ({size} bytes); a copy was probably interrupted")
            raw = stream.read(length)
    except OSError as error:
        raise unreadable(file, error) from None
    tensors = {name: _tensor(file, name, entry, 8 + length) for name, entry in _parse(file, raw).items()}
    end = 8 + length
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if info.start != end:
            what = "bytes of no tensor precede" if info.start > end else "other tensors have bytes of"
            raise _damaged(file, f"{what} {name[:200]}, by its header")
        end += info.nbytes
    _check_size(file, size, end)
    return tensors, stamp


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = typed(read_json(raw, unique_keys=True), {"__metadata__": (dict, NoneType)})
    except ForeignTextError as error:
        raise _damaged(file, f"its header {error}") from None
    header.pop("__metadata__", None)
    return header


def _tensor(file: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        fields = typed(entry, {"dtype": str, "shape": list, "data_offsets": list})
        dtype, shape = fields["dtype"], tuple(map(_size, fields["shape"]))
        begin, end = map(_size, fields["data_offsets"])
        elements = math.prod(shape) if len(shape) <= _MAX_AXES else _MAX_SIZE
        expected = min(elements, _MAX_SIZE) * DTYPE_BYTES[dtype]
    except (KeyError, ValueError):  # also that of the view
        raise _damaged(file, f"the header entry of {name[:200]} is not one this version can read") from None
    if not begin <= end or end - begin != expected:
        raise _damaged(file, f"{name[:200]} has {end - begin} bytes where its shape and dtype need {expected:.0f}")
    return TensorInfo(file, dtype, shape, data_start + begin, end - begin)


def _size(value: Any) -> int:
    """A number of elements or bytes.

    Raises:
        ValueError: it is none.
    """
    if type(value) is not int or not 0 <= value < _MAX_SIZE:
        raise ValueError
    return value


def _check_size(file: Path, size: int, expected: int) -> None:
    if size < expected:
        raise _damaged(file, f"it has {size} of {expected} bytes; a copy or download was probably interrupted")
    if size > expected:
        raise _damaged(file, f"it has {size} bytes where its header describes {expected}")


def _damaged(file: Path, reason: str) -> ModelError:
    return ModelError(f"{file} is damaged: {reason}. Copy or download the file again.")
