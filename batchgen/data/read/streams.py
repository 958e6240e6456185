"""Plain, gzip and zstd byte streams, read in bounded pieces.

When a stream is cut, the readers of the standard library and of Arrow either lose data that they had decoded or do not
notice. These readers first deliver everything decoded before the cut, then raise `DamagedStream`. If a zstd stream is
damaged in the middle, up to 2 KiB before the damage are lost as well.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO, Literal, cast

import zstandard

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Compression = Literal["gzip", "zstd"]
COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
"""File name suffix -> compression."""

_GZIP_INPUT = 1 << 16
_ZSTD_INPUT = 1 << 11
"""Bytes of zstd input decoded at once: hostile input may grow 30,000-fold, so small pieces bound the memory."""
_GZIP_OUTPUT = 1 << 20
_READ_BUFFER = 1 << 18


class DamagedStream(Exception):
    """A compressed stream ends early or is damaged; everything before was delivered."""


class PositionedFile(io.RawIOBase):
    """Reader of an open descriptor with a separate position, so that several can read one unlinked file."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._position = 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move this reader's position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position}.get(whence)
        self._position = max(0, offset + (os.fstat(self._descriptor).st_size if base is None else base))
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Read at this reader's position."""
        view = memoryview(buffer)
        data = os.pread(self._descriptor, len(view), self._position)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


class _ChunkFile(io.RawIOBase):
    """Raw file over an iterator of byte chunks."""

    def __init__(self, chunks: Iterator[bytes], source: BinaryIO) -> None:
        super().__init__()
        self._chunks = chunks
        self._source = source
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer)
        if not self._rest:
            self._rest = memoryview(next(self._chunks, b""))
        size = min(len(view), len(self._rest))
        view[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size

    def close(self) -> None:
        self._source.close()
        super().close()


def decompressed(raw: BinaryIO, compression: Compression | None) -> BinaryIO:
    """Stream of decoded bytes; it delivers everything before any damage, then raises `DamagedStream`."""
    if compression is None:
        return raw
    chunks = _gunzip(raw) if compression == "gzip" else _unzstd(raw)
    return cast(BinaryIO, io.BufferedReader(_ChunkFile(chunks, raw), _READ_BUFFER))


def sniff_compression(head: bytes) -> Compression | None:
    """Compression of a stream by its first bytes; None if it is not compressed."""
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    skippable = len(head) >= 4 and head[0] & 0xF0 == 0x50 and head[1:4] == b"\x2a\x4d\x18"
    return "zstd" if skippable or head.startswith(b"\x28\xb5\x2f\xfd") else None


def _gunzip(raw: BinaryIO) -> Iterator[bytes]:
    """Decode concatenated gzip members; zero padding after a member is allowed, as in gzip itself."""
    started = False
    data = raw.read(_GZIP_INPUT)
    while data:
        decoder = zlib.decompressobj(wbits=31)
        while not decoder.eof and data:
            before = decoder.copy()
            try:
                piece = decoder.decompress(data, _GZIP_OUTPUT)
            except zlib.error as error:
                yield from _up_to_damage(before, data)
                raise DamagedStream(f"the gzip stream is damaged ({error})") from None
            if piece:
                yield piece
            data = decoder.unconsumed_tail or (b"" if decoder.eof else raw.read(_GZIP_INPUT))
        if not decoder.eof:
            raise DamagedStream("the gzip stream ends early")
        started = True
        data = _after_padding(decoder.unused_data, raw)
    if not started:
        raise DamagedStream("the gzip stream is empty")


def _up_to_damage(decoder: zlib._Decompress, data: bytes) -> Iterator[bytes]:
    """Data that a failed call had decoded: zlib discards it, so the input is decoded again byte by byte."""
    with suppress(zlib.error):
        for i in range(len(data)):
            piece = decoder.decompress(data[i : i + 1])
            if piece:
                yield piece


def _after_padding(data: bytes, raw: BinaryIO) -> bytes:
    data = data.lstrip(b"\0")
    while not data:
        more = raw.read(_GZIP_INPUT)
        if not more:
            return b""
        data = more.lstrip(b"\0")
    return data


def _unzstd(raw: BinaryIO) -> Iterator[bytes]:
    """Decode concatenated zstd frames."""
    decompressor = zstandard.ZstdDecompressor()
    data = raw.read(_ZSTD_INPUT)
    if not data:
        raise DamagedStream("the zstd stream is empty")
    while data:
        decoder = decompressor.decompressobj()
        try:
            while not decoder.eof and data:
                piece = decoder.decompress(data)
                if piece:
                    yield piece
                data = decoder.unused_data if decoder.eof else raw.read(_ZSTD_INPUT)
        except zstandard.ZstdError as error:
            raise DamagedStream(f"the zstd stream is damaged ({error})") from None
        if not decoder.eof:
            raise DamagedStream("the zstd stream ends early")
        data = data or raw.read(_ZSTD_INPUT)
