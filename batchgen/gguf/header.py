"""Header of a GGUF file: metadata and tensor entries.

Every length, count and offset is checked against the file's size and this reader's limits before it is used. The format
is read here and not by the package `gguf`, whose reader trusts the file; the package knows the block formats.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Final

from batchgen.errors import ModelError

SUFFIX: Final = ".gguf"
_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_HEADER: Final = 256 << 20
"""Largest header in bytes; a vocabulary of 262,144 tokens needs about 10 MB."""
MAX_ITEMS = 1 << 22
"""Most entries of all lists of one file; those of a vocabulary of 262,144 tokens have 1.3 million."""
MAX_ENTRIES = 1 << 18
"""Most keys and tensors of all files of a model."""
_MAX_AXES: Final = 4
_PIECE: Final = 1 << 20
"""Bytes that are read at a time."""
_LENGTH: Final = struct.Struct("<Q")
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Number of a value type -> its format for `struct`."""
_SPLIT: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Location of a stored tensor: `nbytes` bytes of `kind` (such as Q4_K) from byte `start` of `file`."""

    file: Path
    kind: str
    shape: tuple[int, ...]
    """Slowest axis first, as in torch."""
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Headers of all files of a model; one file, or the parts of a split one."""

    files: tuple[Path, ...]
    status: Mapping[Path, os.stat_result]
    """Status of each file before it was read."""
    metadata: Mapping[str, Any]
    """Metadata of the first file: numbers, strings, lists of strings, and lists of numbers as memory views."""
    listed: Mapping[str, TensorEntry]
    """The lists of float32 in the metadata as tensors with one axis."""
    tensors: Mapping[str, TensorEntry]
    digest: str
    """SHA-256 of all headers."""

    @property
    def path(self) -> Path:
        """The first file."""
        return self.files[0]


def read_gguf(path: Path) -> GgufHeader:
    """Read the headers of a GGUF file and, if it is a part of a split one, of all its parts.

    Raises:
        ModelError: the package `gguf` is missing, a file cannot be read, is damaged, or is not a GGUF file.
    """
    if find_spec("gguf") is None:
        raise ModelError(
            f"{path} is a GGUF file, which is read with the package gguf. Install the extra: "
            "pip install 'batchgen[gguf]'"
        )
    files = _parts(path)
    tensors: dict[str, TensorEntry] = {}
    status: dict[Path, os.stat_result] = {}
    metadata: dict[str, Any] = {}
    listed: dict[str, TensorEntry] = {}
    digest = hashlib.sha256()
    for number, file in enumerate(files):
        held, status[file], keys, lists = _read_file(file, digest)
        if len(files) > 1 and (keys.get("split.no"), keys.get("split.count")) != (number, len(files)):
            raise _damaged(file, f"it does not say that it is part {number + 1} of {len(files)}")
        metadata, listed = (metadata, listed) if metadata else (keys, lists)
        if double := tensors.keys() & held.keys():
            raise _damaged(file, f"it holds {_short(min(double))}, which another part holds too")
        tensors.update(held)
        if len(tensors) > MAX_ENTRIES:
            raise _damaged(file, f"the parts hold more than {MAX_ENTRIES} tensors")
    if not len(files) > 1 and metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(f"{path} is a part of a split model under another name. Name it NAME-00001-of-0000N.gguf.")
    return GgufHeader(tuple(files), status, metadata, listed, tensors, digest.hexdigest())


def is_later_part(path: Path) -> bool:
    """Whether a file is a part of a split one, and not the first."""
    match = _SPLIT.fullmatch(path.name)
    return match is not None and int(match[2]) != 1


def _parts(path: Path) -> list[Path]:
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    stem, _, count = match.groups()
    files = [path.with_name(f"{stem}-{i + 1:05}-of-{count}.gguf") for i in range(int(count))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            f"{path.parent} lacks {len(missing)} of the {len(files)} parts of the model, {missing[0]} first."
        )
    return files


_File = tuple[dict[str, TensorEntry], os.stat_result, dict[str, Any], dict[str, TensorEntry]]


def _read_file(file: Path, digest: Any) -> _File:
    """Tensors, status, metadata, and its lists of float32."""
    try:
        with file.open("rb") as stream:
            status = os.fstat(stream.fileno())
            reader = _Reader(file, stream, status.st_size)
            tensor_count, key_count = reader.counts()
            metadata = reader.metadata(key_count)
            tensors = reader.tensors(tensor_count, metadata)
            digest.update(reader.digest())
            return tensors, status, metadata, reader.listed
    except OSError as error:
        raise ModelError(f"Cannot read {file}: {error.strerror or error}. Check its permissions.") from None


class _Reader:
    """Reader of one header that takes no more bytes than the file has."""

    def __init__(self, file: Path, stream: BinaryIO, size: int) -> None:
        self._file = file
        self._stream = stream
        self._size = size
        self.listed: dict[str, TensorEntry] = {}
        self._data = bytearray()
        self._at = 0
        self._items = 0
        """Entries of the lists so far."""

    def counts(self) -> tuple[int, int]:
        """Numbers of tensors and of metadata keys."""
        if self._take(4) != _MAGIC:
            raise ModelError(f"{self._file} is not a GGUF file: it does not begin with the letters GGUF.")
        version = self._number("I")
        if version not in _VERSIONS:
            big_endian = version & 0xFFFF == 0
            what = "is big-endian" if big_endian else f"has version {version}"
            raise ModelError(f"{self._file} {what}; GGUF files of version 2 and 3, little-endian, are supported.")
        tensors, keys = self._number("Q"), self._number("Q")
        if tensors + keys > MAX_ENTRIES:
            raise _damaged(self._file, f"its header counts {tensors} tensors and {keys} keys")
        return tensors, keys

    def metadata(self, count: int) -> dict[str, Any]:
        """All keys and values."""
        values: dict[str, Any] = {}
        for _ in range(count):
            key = self._string()
            if key in values:
                raise _damaged(self._file, f"the key {_short(key)} occurs twice")
            values[key] = self._value(self._number("I"), key)
        return values

    def tensors(self, count: int, metadata: Mapping[str, Any]) -> dict[str, TensorEntry]:
        """Entries of all tensors, inside the file."""
        entries = [self._entry() for _ in range(count)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            raise _damaged(self._file, "its general.alignment is not a number of bytes")
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise _damaged(self._file, f"it holds {_short(name)} twice")
            stored, nbytes = self._size_of(name, shape, kind)
            if begin + offset + nbytes > self._size:
                raise _damaged(
                    self._file,
                    f"it has {self._size} bytes, and {_short(name)} ends at {begin + offset + nbytes}; a copy or "
                    "download was probably interrupted",
                )
            tensors[name] = TensorEntry(self._file, stored, shape, begin + offset, nbytes)
        return tensors

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, axes = self._string(), self._number("I")
        if not 1 <= axes <= _MAX_AXES:
            raise _damaged(self._file, f"{_short(name)} has {axes} axes")
        shape = tuple(self._number("Q") for _ in range(axes))[::-1]
        if 0 in shape:
            raise _damaged(self._file, f"{_short(name)} has an axis of length 0")
        return name, shape, self._number("I"), self._number("Q")

    def _size_of(self, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            type_ = GGMLQuantizationType(kind)
            block, nbytes = GGML_QUANT_SIZES[type_]
        except (ValueError, KeyError):
            raise ModelError(
                f"{self._file}: {_short(name)} is stored as type {kind}, which the installed package gguf does not "
                "know. Install a newer one: pip install -U gguf"
            ) from None
        width = shape[-1]
        if width % block:
            raise _damaged(self._file, f"{_short(name)} has rows of {width} values in blocks of {block}")
        return str(type_.name), math.prod(shape) // block * nbytes

    def digest(self) -> bytes:
        """SHA-256 of what was read."""
        return hashlib.sha256(memoryview(self._data)[: self._at]).digest()

    def _fill(self, end: int) -> None:
        """Hold the first `end` bytes of the file."""
        if end > min(self._size, _MAX_HEADER):
            raise _damaged(self._file, "it ends inside its header; a copy or download was probably interrupted")
        self._data += self._stream.read(max(end - len(self._data), _PIECE))
        if end > len(self._data):
            raise _damaged(self._file, "it ended while it was read")

    def _take(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            self._fill(self._at)
        return bytes(self._data[start : self._at])

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))[0]

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        texts: list[str] = []
        try:
            for _ in range(count):
                texts.append(self._take(_LENGTH.unpack(self._take(8))[0]).decode())
        except UnicodeDecodeError:
            raise _damaged(self._file, "a text in its header is not UTF-8") from None
        return texts

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise _damaged(self._file, f"{_short(key)} has a value of the unknown type {kind}")
        kind, count = self._number("I"), self._number("Q")
        self._items += count
        if self._items > MAX_ITEMS:
            raise _damaged(self._file, f"its lists up to {_short(key)} have {self._items} entries")
        if kind == _STRING:
            return self._strings(count)
        if kind not in _NUMBERS:
            raise _damaged(self._file, f"{_short(key)} has entries of the unknown type {kind}")
        form: Any = _NUMBERS[kind]
        if kind == _FLOAT32:
            self.listed[key] = TensorEntry(self._file, "F32", (count,), self._at, 4 * count)
        return memoryview(self._take(count * struct.calcsize(f"<{form}"))).cast(form)


def _short(text: str) -> str:
    return ascii(text)[1:-1][:200]


def _damaged(file: Path, reason: str) -> ModelError:
    return ModelError(f"{file} is damaged: {reason}. Copy or download the file again.")
