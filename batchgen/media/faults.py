"""`MediaFault`: what is wrong with an item, in words that follow its name; and what bytes of other files are."""

from __future__ import annotations

from typing import Final

_MAX_REASON: Final = 120
_KINDS: Final = (
    (b"%PDF", "a PDF document"),
    (b"%!PS", "a PostScript file"),
    (b"\xc5\xd0\xd3\xc6", "a PostScript file"),
    (b"version https://git-lfs", "a Git LFS pointer, whose file was not fetched"),
    (b"<svg", "an SVG drawing"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip file"),
    (b"8BPS", "a Photoshop file"),
    (b"qoif", "a QOI image"),
    (b"\0\0\x01\0", "an icon"),
    (b"\xff\x0a", "a JPEG XL image"),
    (b"\0\0\0\x0cJXL ", "a JPEG XL image"),
    (b"\0\0\0\x0cjP  ", "a JPEG 2000 image"),
    (b"FORM", "an AIFF sound"),
    (b"fLaC", "a FLAC sound"),
    (b"OggS", "an Ogg sound"),
    (b"ID3", "an MP3 sound"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\x89PNG", "a PNG image"),
    (b"GIF8", "a GIF image"),
    (b"\x1aE\xdf\xa3", "a Matroska or WebM video"),
)
"""First bytes -> what a file is."""
_BRANDS: Final = {b"avif": "an AVIF image", b"heic": "a HEIC image", b"mif1": "a HEIC image", b"M4A ": "an M4A sound"}
"""Brands of files in the container of MP4."""
_RIFF: Final = {b"WAVE": "a WAV sound", b"WEBP": "a WebP image", b"AVI ": "an AVI video"}


class MediaFault(ValueError):
    """An item that cannot be used. The message follows the item's name: "is cut off; replace the file"."""


def describe(error: object) -> str:
    """One line of what a library says of a file."""
    text = " ".join(str(error).split()).partition("<_io")[0]
    text = text.encode("ascii", "backslashreplace").decode().rstrip(" '\":")
    return text[:_MAX_REASON] or type(error).__name__


def what_else(data: bytes) -> str:
    """Kind of a file that is not in one of the formats that are read."""
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "an MP4 video")
    if data[:4] == b"RIFF" and data[8:12] in _RIFF:
        return _RIFF[data[8:12]]
    head = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n")
    kind = next((what for sign, what in _KINDS if head.startswith(sign)), None)
    if kind is not None:
        return kind
    if head[:1] == b"<":
        return "an SVG drawing" if b"<svg" in data[:4096] else "a web page or XML"
    return "of an unknown format"
