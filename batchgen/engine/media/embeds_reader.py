"""`EmbedsReader`: stores prompts given as embeddings, in the row or in a file that the row names.

`TensorFiles` reads the tensors of files that rows name.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.errors import ErrorCode, ModelError, RowError
from batchgen.media.root import MediaRoot
from batchgen.models.checkpoint.safetensors_header import TensorInfo, read_header
from batchgen.request.checks import error_at, invalid, show
from batchgen.request.fields.prompts import EmbedsPrompt, StoredPrompt
from batchgen.request.table.embeds_store import EmbedsStore
from batchgen.request.table.request_table import ParsedRow

_FIELD = "input_embeds"
_FILE_SUFFIX = ".safetensors"
_MAX_CACHED_HEADERS = 8
"""Most file headers in the cache."""
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64, "I32": np.int32}
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

Floats = npt.NDArray[np.float32]


class TensorFiles:
    """Tensors of safetensors files below the media root, by name."""

    def __init__(self, media_root: MediaRoot) -> None:
        self._media_root = media_root
        self._headers: OrderedDict[tuple[Path, int, int], Mapping[str, TensorInfo]] = OrderedDict()

    def matrix(self, field: str, name: str, size: int) -> Floats:
        """A tensor of floating point numbers [tokens, size], as float32.

        Raises:
            RowError: as `read`.
        """
        info = self._find(field, name)
        if info.dtype not in _FLOATS or len(info.shape) != 2:
            shape = f"{info.dtype} {list(info.shape)}"
            raise invalid(field, f"names a tensor of {shape}; it must be floating point, [tokens, values]")
        if info.shape[1] != size:  # checked before the values are read
            raise invalid(field, f"has {info.shape[1]} values per token; the model needs {size}")
        return self._values(field, name, info)

    def read(self, field: str, name: str) -> npt.NDArray[Any]:
        """The tensor `name`: FILE.safetensors:TENSOR, or FILE.safetensors if the file has only one tensor.

        Raises:
            RowError: `media_error` if the file cannot be read, `invalid_field` for another kind of numbers.
        """
        info = self._find(field, name)
        if info.dtype not in _DTYPES:
            raise invalid(field, f"names a tensor of {info.dtype}; it must be one of {', '.join(_DTYPES)}")
        return self._values(field, name, info)

    def _find(self, field: str, name: str) -> TensorInfo:
        file, suffix, tensor = name.partition(_FILE_SUFFIX)
        if not suffix or (tensor and not (tensor.startswith(":") and len(tensor) > 1)):
            raise invalid(field, f"is {show(name)}; name a tensor as FILE{_FILE_SUFFIX}:TENSOR, or give a nested list")
        path = self._media_root.resolve(file + suffix, field)
        try:
            tensors = self._header(path)
        except (ModelError, OSError):
            raise _incomplete(field, name) from None
        info = tensors.get(tensor[1:]) if tensor else next(iter(tensors.values())) if len(tensors) == 1 else None
        if info is None:
            held = f"no tensor {show(tensor[1:])}" if tensor else f"{len(tensors)} tensors; name one of them"
            raise _media_error(field, f"{show(name)}: the file has {held}")
        return info

    def _header(self, path: Path) -> Mapping[str, TensorInfo]:
        state = path.stat()
        key = (path, state.st_mtime_ns, state.st_size)
        if key not in self._headers:
            self._headers[key] = read_header(path)[0]
            if len(self._headers) > _MAX_CACHED_HEADERS:
                self._headers.popitem(last=False)
        self._headers.move_to_end(key)
        return self._headers[key]

    def _values(self, field: str, name: str, info: TensorInfo) -> npt.NDArray[Any]:
        count = math.prod(info.shape)
        try:
            values = np.fromfile(info.file, np.dtype(_DTYPES[info.dtype]).newbyteorder("<"), count, offset=info.start)
        except OSError:
            raise _incomplete(field, name) from None
        if len(values) != count:
            raise _media_error(field, "names a file that was truncated while it was read")
        if info.dtype not in _FLOATS:
            return values.astype(np.int64).reshape(info.shape)
        if info.dtype == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore"):  # values beyond float32 become infinite, which is an error
            return values.astype(np.float32).reshape(info.shape)


class EmbedsReader:
    """Writes the embeddings of rows to the table's store."""

    def __init__(self, store: EmbedsStore, files: TensorFiles) -> None:
        self._store = store
        self._files = files

    def store(self, row: ParsedRow) -> ParsedRow:
        """Store the embeddings of a row; returns the row with references to them.

        Raises:
            RowError: `media_error` if a file cannot be read, `invalid_field` if the embeddings do not have the model's
                size, `empty_prompt`.
        """
        prompts = (self._stored(p) if isinstance(p, EmbedsPrompt) else p for p in row.prompts)
        return row._replace(prompts=tuple(prompts))

    def _stored(self, prompt: EmbedsPrompt) -> StoredPrompt:
        values = matrix_of(_FIELD, prompt.source, self._store.size, self._files)
        if not len(values):
            raise RowError(ErrorCode.EMPTY_PROMPT, f"`{_FIELD}` is empty; give at least one token", _FIELD)
        return StoredPrompt(self._store.add(values), len(values))


def matrix_of(field: str, source: Floats | str, size: int, files: TensorFiles) -> Floats:
    """[P, size] finite numbers, given as such or by the name of a tensor.

    Raises:
        RowError: `media_error` or `invalid_field`.
    """
    values = files.matrix(field, source, size) if isinstance(source, str) else source
    if len(values) and values.shape[1] != size:
        raise invalid(field, f"has {values.shape[1]} values per token; the model needs {size}")
    if not np.isfinite(values).all():
        raise invalid(field, "contains an infinite or NaN value, or one too large for float32")
    return values


def _incomplete(field: str, name: str) -> RowError:
    return _media_error(field, f"{show(name)} cannot be read: it is not a complete safetensors file")


def _media_error(field: str, problem: str) -> RowError:
    return error_at(ErrorCode.MEDIA_ERROR, field, problem)
