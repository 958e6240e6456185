"""Byte streams: plain, gzip or zstd, every one read a bounded piece at a time.

The readers of the standard library and of Arrow either lose what they had decoded when a stream turns out to be cut,
or do not notice the cut. Here what was decoded before the cut is delivered first, then `DamagedStream` is raised. Of a
zstd stream with damage inside (not cut) at most the last 2 KiB before it are lost too.
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

__all__ = ["Compression", "DamagedStream", "PositionedFile", "decompressed", "sniff_compression"]

Compression = Literal["gzip", "zstd"]

_GZIP_INPUT = 1 << 16
_ZSTD_INPUT = 1 << 11
"""zstd decodes a piece at once, and a hostile piece grows 30,000-fold: small pieces bound the memory."""
_GZIP_OUTPUT = 1 << 20
_READ_BUFFER = 1 << 18


class DamagedStream(Exception):
    """A compressed stream ends early or is not what it claims; what came before it was delivered."""


class PositionedFile(io.RawIOBase):
    """A reader over an open descriptor with a position of its own, so that several may read one unlinked file."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._position = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Read from the own position on."""
        view = memoryview(buffer)
        data = os.pread(self._descriptor, len(view), self._position)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


class _ChunkFile(io.RawIOBase):
    """A raw file over an iterator of byte chunks."""

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
    """The stream of decoded bytes. Reading raises `DamagedStream` at damage, after everything before it."""
    if compression is None:
        return raw
    chunks = _gunzip(raw) if compression == "gzip" else _unzstd(raw)
    return cast(BinaryIO, io.BufferedReader(_ChunkFile(chunks, raw), _READ_BUFFER))


def sniff_compression(head: bytes) -> Compression | None:
    """Tell a compressed stream by its first bytes."""
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
    """What a call that fails had decoded: zlib gives none of it, so the bytes go in one by one."""
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
