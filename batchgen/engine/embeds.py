"""Prompts given as embeddings: from a row, or from a file that it names, into the table's store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batchgen.checks import invalid, show
from batchgen.embeds import EmbedsStore
from batchgen.errors import ErrorCode, ModelError, RowError
from batchgen.media_root import MediaRoot
from batchgen.models.safetensors_header import TensorInfo, read_header
from batchgen.prompts import EmbedsPrompt, StoredPrompt
from batchgen.request import ParsedRow

__all__ = ["EmbedsReader"]

_FIELD = "input_embeds"
_SUFFIX = ".safetensors"
_HEADERS = 8
"""Headers of files kept at hand."""
_STORED = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}

Floats = npt.NDArray[np.float32]


class EmbedsReader:
    """Puts the embeddings of rows into a store."""

    def __init__(self, store: EmbedsStore, media_root: MediaRoot) -> None:
        self._store = store
        self._media_root = media_root
        self._headers: OrderedDict[tuple[Path, int, int], Mapping[str, TensorInfo]] = OrderedDict()

    def store(self, row: ParsedRow) -> ParsedRow:
        """The row with its embeddings on disk.

        Raises:
            RowError: `media_error` for a file that cannot be read, `invalid_field` for embeddings of another size
                than the model's, `empty_prompt`.
        """
        prompts = (self._stored(p) if isinstance(p, EmbedsPrompt) else p for p in row.prompts)
        return row._replace(prompts=tuple(prompts))

    def _stored(self, prompt: EmbedsPrompt) -> StoredPrompt:
        source = prompt.source
        values = self._read(source) if isinstance(source, str) else source
        if not len(values):
            raise RowError(ErrorCode.EMPTY_PROMPT, f"`{_FIELD}` holds no token; give at least one", _FIELD)
        if values.shape[1] != self._store.size:
            raise invalid(_FIELD, f"has {values.shape[1]} numbers for a token; the model takes {self._store.size}")
        if not np.isfinite(values).all():
            raise invalid(_FIELD, "holds a number that is infinite, not a number, or too large for float32")
        return StoredPrompt(self._store.add(values), len(values))

    def _read(self, name: str) -> Floats:
        """The tensor `name`, spelled FILE.safetensors:TENSOR, or FILE.safetensors where the file holds only one."""
        file, suffix, tensor = name.partition(_SUFFIX)
        if not suffix or (tensor and not (tensor.startswith(":") and len(tensor) > 1)):
            raise invalid(_FIELD, f"is {show(name)}; name a tensor as FILE{_SUFFIX}:TENSOR, or give a nested list")
        path = self._media_root.file(file + suffix, _FIELD)
        try:
            tensors = self._header(path)
            info = tensors.get(tensor[1:]) if tensor else next(iter(tensors.values())) if len(tensors) == 1 else None
            if info is None:
                found = f"no tensor {show(tensor[1:])}" if tensor else f"{len(tensors)} tensors; name one of them"
                raise _media_error(f"{show(name)}: the file has {found}")
            return self._values(info)
        except (ModelError, OSError):
            raise _media_error(f"{show(name)} cannot be read: it is no whole safetensors file") from None

    def _header(self, path: Path) -> Mapping[str, TensorInfo]:
        state = path.stat()
        key = (path, state.st_mtime_ns, state.st_size)
        if key not in self._headers:
            self._headers[key] = read_header(path)[0]
            if len(self._headers) > _HEADERS:
                self._headers.popitem(last=False)
        self._headers.move_to_end(key)
        return self._headers[key]

    def _values(self, info: TensorInfo) -> Floats:
        kind = _STORED.get(info.dtype)
        if kind is None or len(info.shape) != 2:
            shape = f"{info.dtype} {list(info.shape)}"
            raise invalid(_FIELD, f"names a tensor of {shape}; it must be floating point, [tokens, numbers]")
        if info.shape[1] != self._store.size:  # said before the numbers are read
            raise invalid(_FIELD, f"has {info.shape[1]} numbers for a token; the model takes {self._store.size}")
        count = info.shape[0] * info.shape[1]
        values = np.fromfile(info.file, np.dtype(kind).newbyteorder("<"), count, offset=info.start)
        if len(values) != count:
            raise _media_error("names a file that became shorter while it was read")
        if info.dtype == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore"):  # what does not fit float32 becomes infinite and is refused
            return values.astype(np.float32).reshape(info.shape)


def _media_error(problem: str) -> RowError:
    return RowError(ErrorCode.MEDIA_ERROR, f"`{_FIELD}` {problem}", _FIELD)
