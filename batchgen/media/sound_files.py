"""What the bytes of sound files say of themselves: their format, and whether they are cut off."""

from __future__ import annotations

from typing import Final

from batchgen.media.faults import MediaFault

_CUT: Final = "is cut off: its {0} promises {1:,} bytes, but {2:,} follow; replace the file"
_UNKNOWN: Final = 0xFFFFFFFF
"""Size that a program writes which does not know the size yet."""
_SLACK: Final = 4096
"""Bytes that may be missing at the end of an MP3 file by its own count, which counts tags in different ways."""


def sound_format(data: bytes) -> str | None:
    """The format of an encoded sound by its first bytes; None if it is none that is read."""
    if data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE":
        return "WAV"
    if data[:4] == b"fLaC":
        return "FLAC"
    if data[:4] == b"OggS":
        return "OGG"
    if data[:3] == b"ID3" or _is_layer_three(data[:2]):
        return "MP3"
    return None


def _is_layer_three(head: bytes) -> bool:
    return len(head) == 2 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2 and head[1] & 0x18 != 0x08


def with_true_size(data: bytes, kind: str) -> bytes:
    """The bytes of a whole sound file, with its true size where the file tells it and the library complains.

    Raises:
        MediaFault: the file is cut off.
    """
    if kind == "WAV" and data[:4] == b"RIFF":
        _check_wav(data)
    elif kind == "OGG":
        _check_ogg(data)
    elif kind == "MP3":
        return _whole_mp3(data)
    return data


def _check_wav(data: bytes) -> None:
    at = 12
    while at + 8 <= len(data):
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8
        if name == b"data":
            if size != _UNKNOWN and size > len(data) - at:
                raise MediaFault(_CUT.format("header", size, len(data) - at))
            return
        at += size + size % 2


def _check_ogg(data: bytes) -> None:
    """Compare the size of the last page with the bytes after its beginning."""
    at = data.rfind(b"OggS")
    table = data[at + 27 : at + 27 + data[at + 26]] if at + 26 < len(data) else b""
    size = 27 + len(table) + sum(table)
    if at + 26 >= len(data) or len(table) < data[at + 26] or size > len(data) - at:
        raise MediaFault(_CUT.format("last page", max(size, 28), len(data) - at))


def _whole_mp3(data: bytes) -> bytes:
    """The file with its own size in the header of its first frame (Xing, Info), if it has one."""
    start = 0
    if data[:3] == b"ID3" and len(data) > 10:
        start = 10 + sum((byte & 127) << shift for byte, shift in zip(data[6:10], (21, 14, 7, 0), strict=True))
    head = data[start : start + 4]
    if len(head) < 4 or not _is_layer_three(head[:2]):
        return data
    is_first, is_mono = head[1] & 0x18 == 0x18, head[3] >> 6 == 3
    at = start + 4 + ((17 if is_mono else 32) if is_first else (9 if is_mono else 17))
    if data[at : at + 4] not in (b"Xing", b"Info"):
        return data
    flags = int.from_bytes(data[at + 4 : at + 8], "big")
    if not flags & 2:
        return data
    at += 8 + 4 * (flags & 1)
    told, size = int.from_bytes(data[at : at + 4], "big"), len(data) - start
    if told > size + max(_SLACK, size // 100):
        raise MediaFault(_CUT.format("first frame", told, size))
    return data[:at] + size.to_bytes(4, "big") + data[at + 4 :]
