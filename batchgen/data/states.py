"""Hidden states while a job is unfinished: parts of plain records in the work folder, each beside its results part.

Results part N is committed after states part N, and says how many records that holds. Whatever a killed run leaves is
therefore either whole, or a states part without its results part, which is removed.

A part is a row of records (header length, header, values) and an index of them, so that gathering reads each record
alone, in any order, in one piece. Values stand in the format that the model computed them in: half the bytes of the
float32 that they become.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from batchgen.data.files import write_durably
from batchgen.data.schema import OutputRow
from batchgen.request import StateBlock

__all__ = [
    "INDEX",
    "Index",
    "StateRecord",
    "read_index",
    "read_record",
    "records_of",
    "states_part",
    "write_states_part",
]

_MAGIC: Final = b"batchgen states "
_LENGTH: Final = struct.Struct("<I")
_TRAILER: Final = struct.Struct("<QI16s")
"""Entries of the index, crc of the index, magic."""

INDEX: Final = np.dtype([
    ("row_index", "<i8"), ("prompt_index", "<i4"), ("sample_index", "<i4"), ("layer", "<i4"), ("crc", "<u4"),
    ("offset", "<i8"), ("length", "<i8"),
])  # fmt: skip
Index = npt.NDArray[np.void]
"""[records] of `INDEX`: the key of each record, where it stands and the crc32 of its bytes; 36 bytes each."""

_HALVES: Final = ("bfloat16", "float16")


class StateRecord:
    """States of one sample at one layer, with all that the file says of them."""

    __slots__ = ("block", "id", "key")

    def __init__(self, key: tuple[int, int, int], row_id: str, block: StateBlock) -> None:
        self.key = key
        """(row_index, prompt_index, sample_index)"""
        self.id = row_id
        self.block = block


def records_of(row: OutputRow) -> list[StateRecord]:
    """The records of one finished sample."""
    return [StateRecord(row.completion.key, row.id, block) for block in row.completion.states or ()]


def states_part(results_part: Path) -> Path:
    """Where the states of a results part stand: `WORK/states/part-000007.states`."""
    return results_part.parent.parent / "states" / f"{results_part.stem}.states"


def write_states_part(
    path: Path, records: Iterable[StateRecord], hold: Callable[[int], None] = lambda size: None
) -> int:
    """Write a part durably and return its bytes; one record is in memory at a time.

    Args:
        path: the part.
        records: taken one by one.
        hold: told the bytes so far after each record; what it raises ends the part, of which nothing is left.

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
            for piece in _pieces(record):
                crc = zlib.crc32(piece, crc)
                stream.write(piece)
            entries.append((*record.key, record.block.layer, crc, offset, stream.tell() - offset))
            hold(stream.tell())
        index = np.array(entries, INDEX).tobytes()
        stream.write(index)
        stream.write(_TRAILER.pack(len(entries), zlib.crc32(index), _MAGIC))
        size = stream.tell()

    path.parent.mkdir(exist_ok=True)
    write_durably(path, write)
    return size


def _pieces(record: StateRecord) -> tuple[bytes, bytes, memoryview]:
    block = record.block
    assert block.values.ndim == 2
    packed, values = _packed(np.ascontiguousarray(block.values, np.float32), block.dtype)
    header = json.dumps(
        [record.id, block.span, block.token_start, [*block.values.shape], block.dtype, packed], ensure_ascii=False
    ).encode("utf-8", "surrogatepass")
    return _LENGTH.pack(len(header)), header, values.reshape(-1).view(np.uint8).data


def _packed(values: npt.NDArray[np.float32], dtype: str) -> tuple[str, npt.NDArray[Any]]:
    """The values in the format they came from, if that holds every one of them exactly."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        if not (bits & 0xFFFF).any():
            return dtype, (bits >> 16).astype(np.uint16)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        if np.array_equal(halves.astype(np.float32), values, equal_nan=True):
            return dtype, halves
    return "float32", values


def read_index(path: Path) -> Index:
    """The index of a part.

    Raises:
        OSError: it cannot be read, or is no whole part.
    """
    with path.open("rb") as stream:
        end = stream.seek(0, 2)
        stream.seek(max(0, end - _TRAILER.size))
        tail = stream.read()
        if len(tail) != _TRAILER.size:
            raise OSError(f"{path} is cut short")
        count, crc, magic = _TRAILER.unpack(tail)
        start = end - _TRAILER.size - count * INDEX.itemsize
        if magic != _MAGIC or start < 0:
            raise OSError(f"{path} is cut short")
        stream.seek(start)
        index = stream.read(count * INDEX.itemsize)
    if zlib.crc32(index) != crc:
        raise OSError(f"{path} has a damaged index")
    return np.frombuffer(index, INDEX)


def read_record(stream: BinaryIO, entry: np.void) -> StateRecord:
    """The record of an index entry.

    Raises:
        OSError: its bytes are not those that were written.
    """
    stream.seek(int(entry["offset"]))
    content = stream.read(int(entry["length"]))
    if zlib.crc32(content) != int(entry["crc"]):
        raise OSError(f"{stream.name} has a damaged record")
    (length,) = _LENGTH.unpack_from(content)
    start = _LENGTH.size + length
    row_id, span, token_start, shape, dtype, packed = json.loads(content[_LENGTH.size : start])
    values = _unpacked(memoryview(content)[start:], packed).reshape(shape)
    key = (int(entry["row_index"]), int(entry["prompt_index"]), int(entry["sample_index"]))
    return StateRecord(key, row_id, StateBlock(int(entry["layer"]), span, token_start, values, dtype))


def _unpacked(content: memoryview, packed: str) -> npt.NDArray[np.float32]:
    if packed == "bfloat16":
        return (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(content, np.float16 if packed == "float16" else np.float32).astype(np.float32, copy=False)
