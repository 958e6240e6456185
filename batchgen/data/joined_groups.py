"""Parquet files whose row groups are encoded apart, in any thread, and then joined.

An encoded group is a Parquet file of one row group. In the joined file its bytes are the same, at another place: in its
footer, which is in Thrift's compact protocol, only the offsets of its pages change. PyArrow joins the footers.
"""

from __future__ import annotations

import io
import struct
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

MAGIC: Final = b"PAR1"
"""Begin and end of every Parquet file"""
_LENGTH: Final = struct.Struct("<I")
_OFFSETS: Final = frozenset(
    {(4, 5), (4, 1, 2), (4, 1, 4), (4, 1, 6), (4, 1, 3, 9), (4, 1, 3, 10), (4, 1, 3, 11), (4, 1, 3, 14)}
)
"""Numbers of the fields that are offsets in the file, from `FileMetaData` down: of row groups, columns and pages."""
_BOOLEANS: Final = (1, 2)
_INTEGERS: Final = (4, 5, 6)
_DOUBLE, _BINARY, _LIST, _STRUCT = 7, 8, 9, 12
"""Types of Thrift's compact protocol; others do not occur in a footer."""


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """A row group, encoded."""

    data: memoryview
    """Its pages"""
    footer: bytes
    """`FileMetaData` of a file that has `data` behind Parquet's magic"""
    nulls: Counter[str]
    """Column -> number of nulls"""


def encode_group(table: pa.Table, **options: Any) -> EncodedGroup:
    """Encode a table as one row group; `options`: more of `pyarrow.parquet.write_table`."""
    sink, rows = pa.BufferOutputStream(), max(1, len(table))
    pq.write_table(table, sink, row_group_size=rows, compression="zstd", write_page_checksum=True, **options)
    content = memoryview(sink.getvalue())
    end = len(content) - len(MAGIC) - _LENGTH.size
    start = end - _LENGTH.unpack_from(content, end)[0]
    nulls = Counter({name: column.null_count for name, column in zip(table.schema.names, table.columns, strict=True)})
    return EncodedGroup(content[len(MAGIC) : start], bytes(content[start:end]), nulls)


def metadata_at(group: EncodedGroup, offset: int) -> pq.FileMetaData:
    """The metadata of a group whose bytes begin at `offset` of a file."""
    footer = _Moved(group.footer, offset - len(MAGIC)).out
    return pq.read_metadata(io.BytesIO(MAGIC + footer + _LENGTH.pack(len(footer)) + MAGIC))


def joined_footer(schema: pa.Schema, keys: dict[bytes, bytes], groups: list[pq.FileMetaData]) -> bytes:
    """The end of a Parquet file: footer, its length, magic.

    Args:
        schema: of all groups.
        keys: keys of the footer, in addition to the metadata of `schema`.
        groups: in the order of their places.
    """
    empty, end = io.BytesIO(), io.BytesIO()
    with pq.ParquetWriter(empty, schema) as writer:
        writer.add_key_value_metadata(keys)
    whole = pq.read_metadata(io.BytesIO(empty.getvalue()))
    for group in groups:
        whole.append_row_groups(group)
    whole.write_metadata_file(end)
    return end.getvalue()[len(MAGIC) :]


class _Moved:
    """A copy of a footer with other offsets."""

    def __init__(self, footer: bytes, by: int) -> None:
        self.out = bytearray()
        self._from = memoryview(footer)
        self._at = 0
        self._by = by
        self._struct(())

    def _copy(self, count: int) -> int:
        """Copy bytes; returns the first."""
        self.out += self._from[self._at : self._at + count]
        self._at += count
        return self.out[-count] if count else 0

    def _varint(self, by: int = 0) -> int:
        """Copy an integer, or one in zigzag encoding increased by `by` unless it is 0."""
        value = shift = 0
        while True:
            byte = self._from[self._at]
            self._at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        left = value + 2 * by if value else 0
        while left > 127:
            self.out.append(left & 127 | 128)
            left >>= 7
        self.out.append(left)
        return value

    def _struct(self, path: tuple[int, ...]) -> None:
        field = 0
        while header := self._copy(1):
            if header >> 4:
                field += header >> 4
            else:
                number = self._varint()
                field = (number >> 1) ^ -(number & 1)
            if header & 15 not in _BOOLEANS:  # their value is their type
                self._value(header & 15, (*path, field))

    def _value(self, kind: int, path: tuple[int, ...]) -> None:
        if kind in _INTEGERS:
            self._varint(self._by if path in _OFFSETS else 0)
        elif kind == _DOUBLE:
            self._copy(8)
        elif kind == _BINARY:
            self._copy(self._varint())
        elif kind == _STRUCT:
            self._struct(path)
        elif kind == _LIST:
            header = self._copy(1)
            count = header >> 4 if header >> 4 < 15 else self._varint()
            for _ in range(count):
                self._value(header & 15, path)
        else:  # a byte, or a boolean of a list
            self._copy(1)
