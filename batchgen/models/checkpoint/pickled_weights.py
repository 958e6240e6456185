"""Weights in PyTorch's own files (`pytorch_model.bin`), found in them without reading their data.

Such a file is an archive of a pickle, which describes tensors, and of their data. A pickle can name any function to be
called: PyTorch's restricted reader (`weights_only`) makes tensors and plain containers, and refuses any other name.
"""

from __future__ import annotations

import math
import re
import zipfile
from pathlib import Path
from typing import Any, Final

from batchgen.errors import ModelError
from batchgen.models.checkpoint.file_hashes import FileStamp, unreadable
from batchgen.models.checkpoint.safetensors_header import TensorInfo

PICKLE: Final = "pytorch_model.bin"
PICKLE_INDEX: Final = "pytorch_model.bin.index.json"
PICKLE_SHARDS: Final = "pytorch_model-*-of-*.bin"
_NAMED: Final = re.compile(r"GLOBAL ([\w.]+)|call(?:ing|ed) ([\w.]+)|class ([\w.]+)")
"""What the restricted reader says that it does not make."""


def read_pickle_header(file: Path) -> tuple[dict[str, TensorInfo], FileStamp]:
    """The tensors of one file, and the stamp that it had before; only its pickle is read, and nothing of it is run.

    Raises:
        ModelError: the file cannot be read, is damaged, or holds anything but tensors by name.
    """
    import torch  # slow to import, and folders of safetensors do not need it here

    try:
        stamp = FileStamp.of(file.stat())
        _check_archive(file)
        held = torch.load(file, map_location="meta", weights_only=True)
    except OSError as error:
        raise unreadable(file, error) from None
    except ModelError:
        raise
    except Exception as error:  # readers of archives and pickles raise many types
        raise _refusal(file, str(error)) from None
    if not isinstance(held, dict) or not all(isinstance(name, str) for name in held):
        raise ModelError(f"{file} holds no tensors by name. Convert the checkpoint to safetensors.")
    codes = {getattr(torch, name): code for name, code in _CODES.items()}
    return {name: _info(file, name, value, codes, stamp.size) for name, value in held.items()}, stamp


def _check_archive(file: Path) -> None:
    """Refuse what is not an archive of uncompressed entries in this machine's order of bytes."""
    if not zipfile.is_zipfile(file):
        raise ModelError(
            f"{file} is damaged, or was saved by a PyTorch before 1.6. Copy it again, or convert it to safetensors."
        )
    with zipfile.ZipFile(file) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ModelError(f"{file} is compressed, which PyTorch's files never are. Copy it again.")
        orders = [entry for entry in archive.infolist() if entry.filename.endswith("/byteorder")]
        if any(entry.file_size > 16 or archive.read(entry) != b"little" for entry in orders):
            raise ModelError(f"{file} has another order of bytes than this machine. Convert it to safetensors.")


def _info(file: Path, name: str, value: Any, codes: dict[Any, str], size: int) -> TensorInfo:
    """Location of a tensor in its file."""
    code = codes.get(getattr(value, "dtype", None))
    if code is None or not hasattr(value, "untyped_storage"):
        raise ModelError(
            f"{file}: {name[:200]} is not a tensor of a known dtype. Convert the checkpoint to safetensors."
        )
    begin = getattr(value.untyped_storage(), "_checkpoint_offset", None)
    if begin is None:
        raise ModelError("This PyTorch does not say where a tensor is in a file. Update it, or convert to safetensors.")
    if not value.is_contiguous():
        raise ModelError(f"{file}: {name[:200]} is stored in another order of its axes. Convert it to safetensors.")
    shape = tuple(value.shape)
    nbytes = math.prod(shape) * value.element_size()
    start = int(begin) + value.storage_offset() * value.element_size()
    if start + nbytes > size:
        raise ModelError(f"{file} is damaged: it has {size} bytes, and {name[:200]} ends past them. Copy it again.")
    return TensorInfo(file, code, shape, start, nbytes)


_CODES: Final = {
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32",
    "int64": "I64",
}  # fmt: skip
"""PyTorch's dtypes by safetensors' names."""


def _refusal(file: Path, reason: str) -> ModelError:
    match = _NAMED.search(reason)
    if match is not None:
        named = next(part for part in match.groups() if part)
        return ModelError(
            f"{file} holds more than weights: reading it would use {named[:200]}, which can run code. Nothing of it "
            "was run. Use another checkpoint."
        )
    first = (reason.strip().splitlines() or [""])[0][:200].rstrip(".")
    return ModelError(f"{file} cannot be read as weights ({first}). Copy it again, or convert it to safetensors.")
