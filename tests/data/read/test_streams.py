"""Compressed streams: complete ones decode, cut ones deliver everything before the cut and report it."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import tracemalloc
import zlib

import pytest
import zstandard

from batchgen.data.read.jsonl import json_line_rows, json_rows
from batchgen.data.read.pieces import RowsOfStream
from batchgen.data.read.streams import (
    Compression,
    DamagedStream,
    PositionedFile,
    decompressed,
    sniff_compression,
)
from batchgen.errors import ErrorCode

LINES = [json.dumps({"text": f"row {i} {random.Random(i).random()}"}) for i in range(2000)]
DATA = "".join(line + "\n" for line in LINES).encode()


def compress(data: bytes, kind: Compression) -> bytes:
    return gzip.compress(data) if kind == "gzip" else zstandard.compress(data)


KINDS = pytest.mark.parametrize("kind", ["gzip", "zstd"])


@KINDS
def test_concatenated_streams(kind: Compression) -> None:
    packed = b"".join(compress(DATA[i : i + 10_000], kind) for i in range(0, len(DATA), 10_000))
    assert decompressed(io.BytesIO(packed), kind).read() == DATA
    assert decompressed(io.BytesIO(compress(b"", kind)), kind).read() == b""


def test_gzip_padding_is_allowed_and_garbage_is_not() -> None:
    packed = compress(DATA, "gzip")
    assert decompressed(io.BytesIO(packed + b"\0" * 100_000), "gzip").read() == DATA
    with pytest.raises(DamagedStream):
        decompressed(io.BytesIO(packed + b"garbage"), "gzip").read()


@KINDS
@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("read", [json_line_rows, json_rows])
def test_a_cut_stream_delivers_its_rows_and_then_one_error(kind: Compression, share: float, read: RowsOfStream) -> None:
    packed = compress(DATA, kind)
    rows = [*read(decompressed(io.BytesIO(packed[: int(len(packed) * share)]), kind), "in")]
    values = [row.value for row in rows if row is not None]
    assert values[:-1] == [json.loads(line) for line in LINES[: len(values) - 1]]
    assert rows[-1] is not None
    assert rows[-1].error is not None
    assert rows[-1].error.code == ErrorCode.TRUNCATED_INPUT
    if kind == "gzip" and share == 0.999:
        assert len(values) > len(LINES) * 0.9, "everything decoded before the cut is delivered"


@KINDS
def test_damage_in_the_middle(kind: Compression) -> None:
    packed = bytearray(compress(DATA, kind))
    packed[len(packed) // 2 : len(packed) // 2 + 64] = b"\xff" * 64
    rows = [*json_line_rows(decompressed(io.BytesIO(bytes(packed)), kind), "in")]
    assert rows[-1] is not None
    assert rows[-1].error is not None
    assert rows[-1].error.code in (ErrorCode.TRUNCATED_INPUT, ErrorCode.INVALID_JSON, ErrorCode.INVALID_UNICODE)


def test_a_wrong_gzip_checksum_gives_an_error_row() -> None:
    packed = bytearray(compress(DATA, "gzip"))
    packed[-8] ^= 1
    rows = [*json_line_rows(decompressed(io.BytesIO(bytes(packed)), "gzip"), "in")]
    assert len(rows) == len(LINES) + 1
    assert rows[-1] is not None
    assert rows[-1].error is not None
    assert rows[-1].error.code == ErrorCode.TRUNCATED_INPUT


@KINDS
def test_a_decompression_bomb_is_read_in_bounded_pieces(kind: Compression) -> None:
    size = 1 << 28
    packer = zlib.compressobj(wbits=31) if kind == "gzip" else zstandard.ZstdCompressor().compressobj()
    block = b"\0" * (1 << 20)
    packed = b"".join(packer.compress(block) for _ in range(size >> 20)) + packer.flush()
    stream = decompressed(io.BytesIO(packed), kind)
    tracemalloc.start()
    try:
        assert stream.read(1 << 20) == block
        assert tracemalloc.get_traced_memory()[1] < size // 2
    finally:
        tracemalloc.stop()


def test_sniff_compression() -> None:
    assert sniff_compression(compress(b"x", "gzip")) == "gzip"
    assert sniff_compression(compress(b"x", "zstd")) == "zstd"
    assert sniff_compression(b"\x52\x2a\x4d\x18\0\0\0\0") == "zstd"
    assert sniff_compression(b'{"a":1}') is None
    assert sniff_compression(b"") is None


def test_two_readers_of_one_descriptor() -> None:
    descriptor = os.memfd_create("x")
    try:
        os.write(descriptor, DATA)
        first, second = (io.BufferedReader(PositionedFile(descriptor)) for _ in range(2))
        assert first.read(100) == DATA[:100]
        assert second.read() == DATA
        assert first.read() == DATA[100:]
    finally:
        os.close(descriptor)
