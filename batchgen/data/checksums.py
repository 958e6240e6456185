"""Checksums over every byte of a Parquet file: one CRC-32 for each block of 256 KiB, in a table before the footer.

```
blocks    the row groups, as Parquet's writer gave them
table     CRC-32 of each block, then the trailer: number of blocks, CRC-32 of the footer, CRC-32 of the table, magic
footer    Parquet's footer, its length, "PAR1"
```

Parquet finds pages by the offsets in its footer, so every reader of Parquet skips the table. Checksums of pages, which
are written as well, cover neither the headers of pages nor the footer, where a column has its name.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

BLOCK: Final = 1 << 18
"""Bytes of a block: what a reader of a few columns checks in addition to them."""

_MAGIC: Final = b"PAR1"
_END: Final = struct.Struct("<I4s")
"""Length of the footer, Parquet's magic: the end of every Parquet file."""
_TRAILER: Final = struct.Struct("<III12s")
_OWN_MAGIC: Final = b"batchgen crc"


class DamagedBytes(ValueError):
    """Bytes that are not those that were written."""


@dataclass(frozen=True, slots=True)
class Checksums:
    """The checksums of a file, whose table and footer are found to be intact."""

    blocks: npt.NDArray[np.uint32]
    """[blocks] CRC-32 of each block."""
    data_bytes: int
    """Bytes before the table."""


class ChecksumWriter:
    """Stream for a Parquet writer that passes bytes on to `stream` and adds their checksums; at its position 0."""

    closed = False

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._size = 0
        self._blocks: list[int] = []
        self._crc = 0
        self._held: bytearray | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes."""
        if self._held is not None:
            self._held += data
        else:
            self._write(memoryview(data))
        return len(data)

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size + len(self._held or b"")

    def flush(self) -> None:
        """Pass on what the stream below has buffered."""
        self._stream.flush()

    @contextmanager
    def footer(self) -> Iterator[None]:
        """While Parquet's writer is closed, which writes the footer: the table is put before it."""
        self._held = bytearray()
        yield
        held, self._held = memoryview(bytes(self._held)), None
        (length, magic) = _END.unpack(held[-_END.size :])
        assert magic == _MAGIC
        end = len(held) - _END.size - length
        self._write(held[:end])
        self._stream.write(self._table(held[end:]))
        self._stream.write(held[end:])

    def _write(self, data: memoryview) -> None:
        self._stream.write(data)
        while len(data):
            piece = data[: BLOCK - self._size % BLOCK]
            self._crc = zlib.crc32(piece, self._crc)
            self._size += len(piece)
            data = data[len(piece) :]
            if not self._size % BLOCK:
                self._end_block()

    def _end_block(self) -> None:
        self._blocks.append(self._crc)
        self._crc = 0

    def _table(self, footer: memoryview) -> bytes:
        if self._size % BLOCK:
            self._end_block()
        table = np.array(self._blocks, "<u4").tobytes()
        crc = zlib.crc32(footer)
        return table + _TRAILER.pack(len(table) // 4, crc, zlib.crc32(table, crc), _OWN_MAGIC)


def read_checksums(stream: BinaryIO) -> Checksums | None:
    """The checksums of a Parquet file, whose footer is found to be intact; None if it was written without.

    Raises:
        DamagedBytes: the footer or the table is damaged, or the file is cut short.
        OSError: the file cannot be read.
    """
    size = stream.seek(0, io.SEEK_END)
    if size < len(_MAGIC) + _END.size:
        raise DamagedBytes("it is cut short")
    length, magic = _END.unpack(_read_at(stream, size - _END.size, _END.size))
    start = size - _END.size - length
    if magic != _MAGIC or start < len(_MAGIC):
        raise DamagedBytes("its end is not that of a Parquet file")
    footer = _read_at(stream, start, size - start)
    if start < _TRAILER.size:
        return None
    trailer = _read_at(stream, start - _TRAILER.size, _TRAILER.size)
    count, crc, table_crc, own = _TRAILER.unpack(trailer)
    data = start - _TRAILER.size - 4 * count
    table = _read_at(stream, data, 4 * count) if data >= 0 else b""
    intact = zlib.crc32(table, crc) == table_crc
    if own != _OWN_MAGIC and not (intact and count):
        return None
    if own != _OWN_MAGIC or not intact or count != -(-data // BLOCK):
        raise DamagedBytes("its table of checksums is damaged")
    if zlib.crc32(footer) != crc:
        raise DamagedBytes("its footer has a wrong checksum")
    return Checksums(np.frombuffer(table, "<u4"), data)


def _read_at(stream: BinaryIO, start: int, count: int) -> bytes:
    stream.seek(start)
    data = stream.read(count)
    if len(data) != count:
        raise DamagedBytes("it is cut short")
    return data


class CheckedStream:
    """A file for Parquet's reader that checks each block, once, before any byte of it is read."""

    closed = False

    def __init__(self, stream: BinaryIO, checksums: Checksums | None) -> None:
        self._stream = stream
        self._checksums = checksums
        self._checked = np.zeros(0 if checksums is None else len(checksums.blocks), np.bool_)
        self._at = 0

    def read(self, count: int = -1) -> bytes:
        """Read bytes.

        Raises:
            DamagedBytes: a block has a wrong checksum.
        """
        if self._checksums is not None:
            last = len(self._checked) - 1 if count < 0 else min((self._at + count - 1) // BLOCK, len(self._checked) - 1)
            for block in range(self._at // BLOCK, last + 1):
                if not self._checked[block]:
                    self._check(block)
        self._stream.seek(self._at)
        data = self._stream.read(count)
        self._at += len(data)
        return data

    def check(self) -> None:
        """Check all blocks.

        Raises:
            DamagedBytes: a block has a wrong checksum.
        """
        for block in np.flatnonzero(~self._checked).tolist():
            self._check(block)

    def _check(self, block: int) -> None:
        checksums = self._checksums
        assert checksums is not None
        start = block * BLOCK
        data = _read_at(self._stream, start, min(BLOCK, checksums.data_bytes - start))
        if zlib.crc32(data) != checksums.blocks[block]:
            raise DamagedBytes(f"the block at byte {start:,} has a wrong checksum")
        self._checked[block] = True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at}.get(whence)
        self._at = offset + (self._stream.seek(0, io.SEEK_END) if base is None else base)
        return self._at

    def tell(self) -> int:
        """The position."""
        return self._at

    def seekable(self) -> bool:
        """True."""
        return True

    def readable(self) -> bool:
        """True."""
        return True


class CrcStream(io.RawIOBase):
    """Stream for a writer that passes bytes on to `stream` and computes their CRC-32."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.crc = 0

    def write(self, data: Any) -> int:
        """Write bytes."""
        self.crc = zlib.crc32(data, self.crc)
        return self._stream.write(data)

    def writable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Position in the stream below."""
        return self._stream.tell()

    def flush(self) -> None:
        """Pass on what the stream below has buffered."""
        if not self._stream.closed:
            self._stream.flush()

    def check(self) -> None:
        """Read back what was written from the begin of the stream below, which can be read.

        Raises:
            DamagedBytes: it is not what was written.
        """
        self._stream.flush()
        self._stream.seek(0)
        if crc_of(self._stream) != self.crc:
            raise DamagedBytes("it was read back, and is not what was written")


def crc_of(stream: BinaryIO) -> int:
    """CRC-32 of a stream from its position to its end."""
    crc = 0
    while chunk := stream.read(1 << 20):
        crc = zlib.crc32(chunk, crc)
    return crc
