"""Images: every format and mode as Pillow itself decodes it, and the size is known before."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps, TiffImagePlugin

from batchgen.media import parts
from batchgen.media.faults import MediaFault
from batchgen.media.images import array_pixels, decode_image, image_size, upright_pixels
from tests.cases import each
from tests.media.samples import IMAGE_FORMATS, SIZE, pixels, saved

ENOUGH = 1 << 20


def as_the_library(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The pixels as transformers loads them: upright, converted to RGB by Pillow."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


def read(data: bytes) -> None:
    """As the store does: first the header, then the pixels."""
    image_size(data, ENOUGH)
    decode_image(data)


def assert_decoded(data: bytes, expected: np.ndarray[Any, Any]) -> None:
    found = decode_image(data)
    assert found.mode == "RGB"
    assert found.size == image_size(data, ENOUGH)
    np.testing.assert_array_equal(np.asarray(found), expected)


@each(
    "form, mode",
    [(form, mode) for form, modes in IMAGE_FORMATS.items() for mode in modes if mode not in ("I;16", "LAB")],
)
def test_every_format_and_mode(form: str, mode: str) -> None:
    data = saved(pixels(mode), form)
    assert_decoded(data, as_the_library(data))


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_16_bit_grey_keeps_its_high_byte(form: str) -> None:
    image = pixels("I;16")
    high = (np.asarray(image) >> 8).astype(np.uint8)
    assert_decoded(saved(image, form), np.repeat(high[:, :, None], 3, 2))


def test_16_bit_colour_keeps_its_high_bytes() -> None:
    values = np.random.default_rng(0).integers(0, 1 << 16, (7, 13, 3), np.uint16)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", 13, 7, 16, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    assert_decoded(data, (values >> 8).astype(np.uint8))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_alpha_is_dropped() -> None:
    image = pixels("RGBA")
    assert_decoded(saved(image, "PNG"), np.asarray(image)[:, :, :3])
    assert_decoded(saved(pixels("P"), "PNG", transparency=bytes(range(16))), np.asarray(pixels("P").convert("RGB")))


@each("orientation", range(10))
@each("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_images_are_turned_upright(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(pixels(), form, exif=exif)
    expected = as_the_library(data)
    assert expected.shape[:2] == (SIZE if orientation in (5, 6, 7, 8) else SIZE[::-1])
    assert_decoded(data, expected)


def test_orientation_that_follows_the_pixels_of_a_png() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(pixels(), "PNG")
    data = data[:-12] + chunk(b"eXIf", exif.tobytes()[6:]) + data[-12:]
    assert_decoded(data, as_the_library(data))
    assert image_size(data, ENOUGH) == SIZE[::-1]


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_exif_that_cannot_be_read_turns_nothing(form: str) -> None:
    exif = b"Exif\0\0II*\0\xff\xff\xff\xff\x01\x02"
    data = saved(pixels(), form, exif=exif)
    assert decode_image(data).size == image_size(data, ENOUGH) == SIZE


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_picture_of_several_counts(form: str) -> None:
    first = pixels("P") if form == "GIF" else pixels()
    data = saved(first, form, save_all=True, append_images=[pixels(seed=1), pixels(seed=2)])
    assert_decoded(data, as_the_library(data))


@pytest.mark.parametrize("form", IMAGE_FORMATS)
def test_the_size_is_known_without_the_pixels(form: str) -> None:
    """A file that ends after its header has a size, and no picture."""
    data = saved(pixels("P" if form == "GIF" else "RGB", (300, 200)), form)
    if form != "WEBP":  # needs all its bytes
        data = data[: len(data) * 3 // 4]
    assert image_size(data, ENOUGH) == (300, 200)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_a_file_that_is_cut_off_is_refused(form: str) -> None:
    data = saved(pixels("P" if form == "GIF" else "RGB", (300, 200)), form)
    for part in (1, 8, 30, len(data) // 3, len(data) * 2 // 3, len(data) - 100):
        with pytest.raises(MediaFault, match=r"is a damaged|is of an unknown format"):
            read(data[:part])


def test_limits_hold_before_the_pixels_are_decoded() -> None:
    data = saved(pixels(), "PNG")
    assert image_size(data, 91) == SIZE
    with pytest.raises(MediaFault, match=r"has 13 x 7 pixels; at most 90 are allowed: .*--max-image-pixels"):
        image_size(data, 90)


def test_a_decompression_bomb_is_refused_by_its_header() -> None:
    for width, height in ((60_000, 60_000), (10_000, 10_000), (2**31 - 1, 2**31 - 1)):
        header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
        bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000)))
        with pytest.raises(MediaFault, match="pixels"):
            image_size(bomb, ENOUGH)


def test_a_jpeg_image_of_many_scans_is_refused() -> None:
    data = saved(pixels(), "JPEG", progressive=True)
    start = data.rindex(b"\xff\xda")
    scan = data[start:-2]
    few = data[:-2] + 3 * scan + data[-2:]
    assert_decoded(few, as_the_library(few))
    with pytest.raises(MediaFault, match=r"of 10\d scans; at most 100 are allowed"):
        image_size(data[:-2] + 99 * scan + data[-2:], ENOUGH)


def accepted_parts(data: bytes, form: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The least limit of parts with which a file is accepted."""
    limit = 0
    while True:
        monkeypatch.setattr(parts, "MAX_SEGMENTS" if form == "JPEG" else "MAX_PARTS", limit)
        with suppress(MediaFault):
            assert image_size(data, ENOUGH) == SIZE
            assert_decoded(data, as_the_library(data))
            return limit
        with pytest.raises(MediaFault, match=rf"is a {form} file of more than {limit} parts; convert it"):
            image_size(data, ENOUGH)
        limit += 1


def _jpeg(more: bytes) -> bytes:
    data = saved(pixels(), "JPEG")
    return data[:2] + more + data[2:]


def _png(*more: bytes, late: bool = False) -> bytes:
    data = saved(pixels(), "PNG")
    at = data.index(b"IEND" if late else b"IDAT") - 4
    return data[:at] + b"".join(more) + data[at:]


def _gif(more: bytes) -> bytes:
    data = saved(pixels("P"), "GIF")
    at = 13 + (3 << (data[10] & 7) + 1)
    return data[:at] + more + data[at:]


def _tiff(*numbers: int, exif: int = 0) -> bytes:
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags[65000] = numbers
    if exif:
        tags[34665] = {40000 + tag: 1 for tag in range(exif)}
    return saved(pixels(), "TIFF", tiffinfo=tags)


def _webp(frames: int, **options: Any) -> bytes:
    more = [pixels(seed=seed) for seed in range(1, frames)]
    return saved(pixels(), "WEBP", save_all=True, append_images=more, lossless=True, **options)


COMMENT = b"\xff\xfe\0\4ab"
TEXT = chunk(b"tEXt", b"a\0b")
PARTS: list[tuple[str, bytes, bytes, int]] = [
    ("JPEG", _jpeg(b""), _jpeg(3 * COMMENT), 3),
    ("JPEG", _jpeg(COMMENT), _jpeg(b"\xff\xff\xff" + COMMENT), 3),
    ("PNG", _png(), _png(TEXT, TEXT), 2),
    ("PNG", _png(), _png(TEXT, TEXT, late=True), 2),
    ("GIF", _gif(b""), _gif(b"!\xfe\1a\0"), 2),
    ("GIF", _gif(b"!\xfe\1a\0"), _gif(b"!\xfe" + b"\1a" * 4 + b"\0"), 3),
    ("GIF", _gif(b""), _gif(b"\0\0\0"), 3),
    ("TIFF", _tiff(1, 2), _tiff(*range(7)), 5),
    ("TIFF", _tiff(1, 2, exif=1), _tiff(1, 2, exif=4), 3),
    ("WEBP", _webp(2), _webp(4), 4),
    ("WEBP", _webp(2), _webp(2, xmp=b"<x/>"), 1),
]


@pytest.mark.parametrize(("form", "data", "longer", "more"), PARTS, ids=[case[0] for case in PARTS])
def test_the_parts_of_a_file_have_a_limit(
    form: str, data: bytes, longer: bytes, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = accepted_parts(data, form, monkeypatch)
    assert accepted_parts(longer, form, monkeypatch) - least == more


def test_a_large_colour_profile_is_within_the_limit() -> None:
    assert image_size(saved(pixels(), "JPEG", icc_profile=bytes(200 * 60_000)), ENOUGH) == SIZE


OTHERS: list[tuple[bytes, str]] = [
    (b"", "unknown format"),
    (b"hello", "unknown format"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(x) run", "a PostScript file"),
    (b"%PDF-1.7\n", "a PDF document"),
    (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "an SVG drawing"),
    (b"\xef\xbb\xbf  <svg/>", "an SVG drawing"),
    (b"<!doctype html><html></html>", "a web page"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a Git LFS pointer"),
    (b"\0\0\0\x20ftypavif", "an AVIF image"),
    (b"\0\0\0\x20ftypheic", "a HEIC image"),
    (b"\0\0\0\x20ftypisom", "an MP4 video"),
    (b"RIFF\0\0\0\0WAVE", "a WAV sound"),
    (b"P6 2 2 255 aaaaaaaaaaaa", "unknown format"),
]


@pytest.mark.parametrize(("data", "what"), OTHERS)
def test_other_formats_are_named_and_not_opened(data: bytes, what: str) -> None:
    with pytest.raises(MediaFault, match=what):
        image_size(data, ENOUGH)


def test_a_postscript_file_is_not_run_behind_another_beginning() -> None:
    with pytest.raises(MediaFault, match="damaged"):
        image_size(b"II*\0%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", ENOUGH)


ARRAYS: list[tuple[Any, Any]] = [
    (lambda rgb: rgb, lambda rgb: rgb),
    (lambda rgb: rgb.transpose(2, 0, 1), lambda rgb: rgb),
    (lambda rgb: np.dstack([rgb, rgb[:, :, :1]]), lambda rgb: rgb),
    (lambda rgb: rgb[:, :, 0], lambda rgb: rgb[:, :, [0, 0, 0]]),
    (lambda rgb: rgb[:, :, :1], lambda rgb: rgb[:, :, [0, 0, 0]]),
    (lambda rgb: rgb[None, :, :, 0], lambda rgb: rgb[:, :, [0, 0, 0]]),
    (lambda rgb: rgb / np.float32(255), lambda rgb: rgb),
    (lambda rgb: rgb.astype(np.float64) / 255, lambda rgb: rgb),
    (lambda rgb: np.full((2, 2), 0.999), lambda rgb: np.full((2, 2, 3), 255, np.uint8)),
]


@pytest.mark.parametrize(("given", "expected"), ARRAYS)
def test_arrays(given: Callable[[Any], Any], expected: Callable[[Any], Any]) -> None:
    rgb = np.asarray(pixels())
    np.testing.assert_array_equal(array_pixels(given(rgb)), expected(rgb))


@pytest.mark.parametrize(
    ("array", "word"),
    [
        (np.zeros(5, np.uint8), "shape"),
        (np.zeros((5, 5, 2), np.uint8), "shape"),
        (np.zeros((5, 5, 5, 3), np.uint8), "shape"),
        (np.zeros((5, 5), np.int64), "int64"),
        (np.zeros((5, 5), np.uint16), "uint16"),
        (np.zeros((5, 5), bool), "bool"),
        (np.full((5, 5), 255.0), "outside"),
        (np.full((5, 5), -0.5), "outside"),
        (np.full((5, 5), np.nan), "outside"),
        (np.array([["a"]]), "<U1"),
    ],
)
def test_wrong_arrays(array: Any, word: str) -> None:
    with pytest.raises(MediaFault, match=word):
        array_pixels(array)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "P", "CMYK", "I;16"])
def test_images_of_pillow_are_as_their_files(mode: str) -> None:
    image = pixels(mode)
    form = "TIFF" if mode == "CMYK" else "PNG"
    np.testing.assert_array_equal(upright_pixels(image), np.asarray(decode_image(saved(image, form))))
    exif = Image.Exif()
    exif[0x0112] = 6
    opened = Image.open(io.BytesIO(saved(pixels(), "JPEG", exif=exif)))
    assert upright_pixels(opened).shape == (13, 7, 3)
