"""`EmbedsReader`: stores prompts given as embeddings, in the row or in a file that the row names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batchgen.errors import ErrorCode, ModelError, RowError
from batchgen.media.root import MediaRoot
from batchgen.models.safetensors_header import TensorInfo, read_header
from batchgen.request.checks import invalid, show
from batchgen.request.embeds_store import EmbedsStore
from batchgen.request.prompts import EmbedsPrompt, StoredPrompt
from batchgen.request.table import ParsedRow

_FIELD = "input_embeds"
_FILE_SUFFIX = ".safetensors"
_MAX_CACHED_HEADERS = 8
"""Most file headers in the cache."""
_FLOAT_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}

Floats = npt.NDArray[np.float32]


class EmbedsReader:
    """Writes the embeddings of rows to the table's store."""

    def __init__(self, store: EmbedsStore, media_root: MediaRoot) -> None:
        self._store = store
        self._media_root = media_root
        self._headers: OrderedDict[tuple[Path, int, int], Mapping[str, TensorInfo]] = OrderedDict()

    def store(self, row: ParsedRow) -> ParsedRow:
        """Store the embeddings of a row; returns the row with references to them.

        Raises:
            RowError: `media_error` if a file cannot be read, `invalid_field` if the embeddings do not have the model's
                size, `empty_prompt`.
        """
        prompts = (self._stored(p) if isinstance(p, EmbedsPrompt) else p for p in row.prompts)
        return row._replace(prompts=tuple(prompts))

    def _stored(self, prompt: EmbedsPrompt) -> StoredPrompt:
        source = prompt.source
        values = self._read(source) if isinstance(source, str) else source
        if not len(values):
            raise RowError(ErrorCode.EMPTY_PROMPT, f"`{_FIELD}` is empty; give at least one token", _FIELD)
        if values.shape[1] != self._store.size:
            raise invalid(_FIELD, f"has {values.shape[1]} values per token; the model needs {self._store.size}")
        if not np.isfinite(values).all():
            raise invalid(_FIELD, "contains an infinite or NaN value, or one too large for float32")
        return StoredPrompt(self._store.add(values), len(values))

    def _read(self, name: str) -> Floats:
        """Read the tensor `name`: FILE.safetensors:TENSOR, or FILE.safetensors if the file has only one tensor."""
        file, suffix, tensor = name.partition(_FILE_SUFFIX)
        if not suffix or (tensor and not (tensor.startswith(":") and len(tensor) > 1)):
            raise invalid(_FIELD, f"is {show(name)}; name a tensor as FILE{_FILE_SUFFIX}:TENSOR, or give a nested list")
        path = self._media_root.resolve(file + suffix, _FIELD)
        try:
            tensors = self._header(path)
            info = tensors.get(tensor[1:]) if tensor else next(iter(tensors.values())) if len(tensors) == 1 else None
            if info is None:
                found = f"no tensor {show(tensor[1:])}" if tensor else f"{len(tensors)} tensors; name one of them"
                raise _media_error(f"{show(name)}: the file has {found}")
            return self._values(info)
        except (ModelError, OSError):
            raise _media_error(f"{show(name)} cannot be read: it is not a complete safetensors file") from None

    def _header(self, path: Path) -> Mapping[str, TensorInfo]:
        state = path.stat()
        key = (path, state.st_mtime_ns, state.st_size)
        if key not in self._headers:
            self._headers[key] = read_header(path)[0]
            if len(self._headers) > _MAX_CACHED_HEADERS:
                self._headers.popitem(last=False)
        self._headers.move_to_end(key)
        return self._headers[key]

    def _values(self, info: TensorInfo) -> Floats:
        kind = _FLOAT_DTYPES.get(info.dtype)
        if kind is None or len(info.shape) != 2:
            shape = f"{info.dtype} {list(info.shape)}"
            raise invalid(_FIELD, f"names a tensor of {shape}; it must be floating point, [tokens, values]")
        if info.shape[1] != self._store.size:  # checked before the values are read
            raise invalid(_FIELD, f"has {info.shape[1]} values per token; the model needs {self._store.size}")
        count = info.shape[0] * info.shape[1]
        values = np.fromfile(info.file, np.dtype(kind).newbyteorder("<"), count, offset=info.start)
        if len(values) != count:
            raise _media_error("names a file that was truncated while it was read")
        if info.dtype == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore"):  # values beyond float32 become infinite, which is an error
            return values.astype(np.float32).reshape(info.shape)


def _media_error(problem: str) -> RowError:
    return RowError(ErrorCode.MEDIA_ERROR, f"`{_FIELD}` {problem}", _FIELD)
