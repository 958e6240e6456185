"""Hidden-state parts of an unfinished job: one file in the work folder for each results part.

Results part N is committed after states part N and records the number of its records. A killed run therefore leaves
either both, or a states part without its results part, which is removed.

A part is a sequence of records (header length, header, values) followed by an index, so that records can be read one
by one in any order. Values are stored in the model's dtype, half the bytes of the float32 of the result.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.data.durable_files import NO_FILE, output_errors, part_errors, write_durably
from batchgen.data.files import make_durably, open_own, size_of
from batchgen.data.results_file import DamagedFile
from batchgen.data.schema import OutputRow
from batchgen.request.completion import StateBlock

_MAGIC: Final = b"batchgen states "
_LENGTH: Final = struct.Struct("<I")
_TRAILER: Final = struct.Struct("<QI16s")
"""Number of index entries, CRC-32 of the index, magic."""

INDEX_DTYPE: Final = np.dtype([
    ("row_index", "<i8"), ("prompt_index", "<i4"), ("sample_index", "<i4"), ("layer", "<i4"), ("crc", "<u4"),
    ("offset", "<i8"), ("length", "<i8"),
])  # fmt: skip
Index = npt.NDArray[np.void]
"""[records] of `INDEX_DTYPE`: key, offset, length and CRC-32 of each record; 36 bytes each."""


class StateRecord(NamedTuple):
    """Hidden states of one sample at one layer, with its key and row id."""

    key: tuple[int, int, int]
    """(row_index, prompt_index, sample_index)"""
    id: str
    block: StateBlock


def records_of(row: OutputRow) -> list[StateRecord]:
    """The hidden-state records of one finished sample."""
    return [StateRecord(row.completion.key, row.id, block) for block in row.completion.states or ()]


def states_part(results_part: Path) -> Path:
    """Path of the states of a results part: `WORK/states/part-000007.states`."""
    return results_part.parent.parent / "states" / f"{results_part.stem}.states"


def write_states_part(
    path: Path, records: Iterable[StateRecord], check_size: Callable[[int], None] = lambda size: None
) -> int:
    """Write a part durably and return its size in bytes; one record is in memory at a time.

    Args:
        path: path of the part.
        records: the records to write.
        check_size: called with the bytes so far after each record; if it raises, the part is not written.

    Raises:
        OutputError: the disk is full.
    """
    size = 0

    def write(stream: BinaryIO) -> None:
        nonlocal size
        entries = []
        for record in records:
            offset = stream.tell()
            crc = 0
            for chunk in _record_chunks(record):
                crc = zlib.crc32(chunk, crc)
                stream.write(chunk)
            entries.append((*record.key, record.block.layer, crc, offset, stream.tell() - offset))
            check_size(stream.tell())
        index = np.array(entries, INDEX_DTYPE).tobytes()
        stream.write(index)
        stream.write(_TRAILER.pack(len(entries), zlib.crc32(index), _MAGIC))
        size = stream.tell()

    with output_errors(path.parent):
        make_durably(path.parent)
    write_durably(path, write)
    return size


def _record_chunks(record: StateRecord) -> tuple[bytes, bytes, memoryview]:
    block = record.block
    assert block.values.ndim == 2
    packed, values = pack_values(np.ascontiguousarray(block.values, np.float32), block.dtype)
    header = json.dumps(
        [record.id, block.span, block.token_start, [*block.values.shape], block.dtype, packed], ensure_ascii=False
    ).encode("utf-8", "surrogatepass")
    return _LENGTH.pack(len(header)), header, values.reshape(-1).view(np.uint8).data


def pack_values(values: npt.NDArray[np.float32], dtype: str) -> tuple[str, npt.NDArray[Any]]:
    """(dtype, values): in the model's dtype if it represents every value exactly, otherwise float32."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        if not (bits & 0xFFFF).any():
            return dtype, (bits >> 16).astype(np.uint16)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if np.array_equal(half.astype(np.float32), values, equal_nan=True):
            return dtype, half
    return "float32", values


def read_index(path: Path) -> Index:
    """The index of a part.

    Raises:
        OSError: the part cannot be read, or is incomplete or damaged.
    """
    with open_own(path) as stream:
        end = stream.seek(0, 2)
        stream.seek(max(0, end - _TRAILER.size))
        tail = stream.read()
        if len(tail) != _TRAILER.size:
            raise OSError("it is cut short")
        count, crc, magic = _TRAILER.unpack(tail)
        start = end - _TRAILER.size - count * INDEX_DTYPE.itemsize
        if magic != _MAGIC or start < 0:
            raise OSError("it is cut short")
        stream.seek(start)
        index = stream.read(count * INDEX_DTYPE.itemsize)
    if zlib.crc32(index) != crc:
        raise OSError("its index has a wrong checksum")
    return np.frombuffer(index, INDEX_DTYPE)


def check_states_part(path: Path, records: int, *, whole: bool) -> None:
    """Check a part of so many records: its index, and with `whole` every byte.

    Raises:
        DamagedFile: the part is damaged or missing.
        OutputError: it cannot be read now.
    """
    try:
        with part_errors(path):
            index = read_index(path)
            ends = np.cumsum(np.append(0, index["length"]))
            data = size_of(path) - _TRAILER.size - index.nbytes
            if len(index) != records or ends[-1] != data or not np.array_equal(index["offset"], ends[:-1]):
                raise OSError("its index is not that of its records")
            if whole:
                with open_own(path) as stream:
                    for entry in index:
                        _checked_content(stream, entry)
    except NO_FILE as problem:
        raise DamagedFile(path, "it is missing") from problem
    except OSError as problem:
        raise DamagedFile(path, str(problem)) from problem


def read_record(stream: BinaryIO, entry: np.void) -> StateRecord:
    """Read the record of an index entry.

    Raises:
        OSError: the record is damaged.
    """
    content = _checked_content(stream, entry)
    (length,) = _LENGTH.unpack_from(content)
    start = _LENGTH.size + length
    row_id, span, token_start, shape, dtype, packed = json.loads(content[_LENGTH.size : start])
    values = unpack_values(memoryview(content)[start:], packed).reshape(shape)
    key = (int(entry["row_index"]), int(entry["prompt_index"]), int(entry["sample_index"]))
    return StateRecord(key, row_id, StateBlock(int(entry["layer"]), span, token_start, values, dtype))


def _checked_content(stream: BinaryIO, entry: np.void) -> bytes:
    stream.seek(int(entry["offset"]))
    content = stream.read(int(entry["length"]))
    if zlib.crc32(content) != int(entry["crc"]):
        raise OSError("a record has a wrong checksum")
    return content


def unpack_values(content: bytes | memoryview, packed: str) -> npt.NDArray[np.float32]:
    """The flat values that `pack_values` gave as `packed`."""
    if packed == "bfloat16":
        return (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(content, np.float16 if packed == "float16" else np.float32).astype(np.float32, copy=False)
