"""Parts of a file: segments, chunks, blocks or tags. The libraries spend time on each, whatever it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, repeat
from typing import Final, Literal

from batchgen.media.faults import MediaFault

MAX_PARTS: Final = 1 << 16
"""Most parts of a file of another format than JPEG."""
MAX_SEGMENTS: Final = 512
"""Most segments of a JPEG file in front of the pixels: the library joins those of EXIF one by one."""
_FURTHER: Final = frozenset({34665, 34853, 40965})
"""Tags of TIFF that lead to further tags: of EXIF, GPS, interoperability."""
_WIDTHS: Final = {3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
"""Type of a tag of TIFF -> bytes of a value, where each becomes a number."""


def check_parts(data: bytes, form: str) -> None:
    """Refuse a file by the number of its parts, before a library reads it.

    Raises:
        MediaFault: it has more than are allowed.
    """
    parts, most = _PARTS.get(form), MAX_SEGMENTS if form == "JPEG" else MAX_PARTS
    if parts is not None and next(islice(parts(data), most, None), None) is not None:
        raise MediaFault(f"is a {form} file of more than {most:,} parts; convert it")


def png_chunks(data: bytes) -> Iterator[int]:
    """Offsets of the chunks of a PNG file."""
    at = 8
    while at + 8 <= len(data):
        yield at
        at += 12 + int.from_bytes(data[at : at + 4], "big")


def riff_chunks(data: bytes, inside: bytes = b"") -> Iterator[int]:
    """Offsets of the chunks of a RIFF file; of chunks called `inside`, those within them."""
    at = 12
    while at + 8 <= len(data):
        yield at
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 24 if data[at : at + 4] == inside else 8 + size + size % 2


def _jpeg_segments(data: bytes) -> Iterator[int]:
    """Segments before the first scan, and each byte between them."""
    at = 2
    while at + 1 < len(data):
        yield at
        code = data[at + 1] if data[at] == 0xFF else 0
        if code == 0xDA:
            return
        alone = code in (0, 1, 0xFF) or 0xD0 <= code <= 0xD9
        at += 1 if alone else 2 + int.from_bytes(data[at + 2 : at + 4], "big")


def _gif_blocks(data: bytes) -> Iterator[int]:
    """Blocks of the extensions before the first picture, and each byte between them."""
    flags = data[10] if len(data) > 10 else 0
    at = 13 + (3 << (flags & 7) + 1 if flags & 128 else 0)
    while at < len(data) and data[at] not in b",;":
        yield at
        at += 2 if (extension := data[at] == 0x21) else 1
        while extension and at < len(data) and data[at]:
            yield at
            at += 1 + data[at]
        at += extension


def _tiff_values(data: bytes) -> Iterator[int]:
    """Tags of the first picture and of those that they lead to, once for each number that they hold."""
    order: Literal["little", "big"] = "little" if data[:2] == b"II" else "big"
    wide, counts, entry = (8, 8, 20) if 43 in data[2:4] else (4, 2, 12)
    number = partial(_number, data, order)
    tables = [number(wide, wide)]
    for table in tables:
        start = table + counts
        for at in range(start, min(start + entry * number(table, counts), len(data)), entry):
            width = _WIDTHS.get(number(at + 2, 2))
            yield from repeat(at, 1 if width is None else max(1, min(number(at + 4, wide), len(data) // width)))
            if number(at, 2) in _FURTHER:
                tables.append(number(at + 4 + wide, wide))


def _number(data: bytes, order: Literal["little", "big"], at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], order)


_PARTS: Final[dict[str, Callable[[bytes], Iterator[int]]]] = {
    "JPEG": _jpeg_segments,
    "PNG": png_chunks,
    "WEBP": partial(riff_chunks, inside=b"ANMF"),
    "GIF": _gif_blocks,
    "TIFF": _tiff_values,
    "WAV": riff_chunks,
}
