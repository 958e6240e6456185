"""Fuzzer of media: an input is an image or sound file, which a row gives as bytes.

It is refused by one line, or decoded to the size that its header has promised; nothing is printed by any library.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from random import Random

import numpy as np

from batchgen.config.engine_config import EngineConfig
from batchgen.errors import ErrorCode, RowError
from batchgen.media.root import MediaRoot
from batchgen.media.store import MediaLimits, MediaStore
from batchgen.request.fields.media import MediaItem, MediaKind
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.mutations import mutate_bytes
from tests.fuzz.parsing import check_error, require

_RATE = 16000
_NUMBERS = (0, 1, 2, 3, 6, 8, 16, 32, 255, 256, 0x0112, 4096, 65535, 1 << 24, 1 << 31, (1 << 32) - 1)
_WORDS = (
    *(number.to_bytes(size, order) for number in _NUMBERS for size in (2, 4) for order in ("little", "big")
      if number < 1 << 8 * size),
    b"IHDR", b"IDAT", b"IEND", b"PLTE", b"tRNS", b"eXIf", b"iCCP", b"acTL", b"fcTL", b"zTXt", b"iTXt", b"VP8 ", b"VP8L",
    b"VP8X", b"ANIM", b"ANMF", b"ALPH", b"EXIF", b"XMP ", b"Exif\0\0", b"MPF\0", b"Adobe", b"JFIF\0", b"\xff\xc0",
    b"\xff\xc2", b"\xff\xc4", b"\xff\xda", b"\xff\xd9", b"\xff\xdd", b"\xff\xe1", b"\xff\xe2", b"II*\0", b"MM\0*",
    b"GIF89a", b"\x21\xf9\x04", b"\x21\xfe", b"\x2c", b"\x3b", b"BM", b"RIFF", b"RF64", b"WAVE", b"fmt ", b"data",
    b"fact", b"LIST", b"ds64", b"fLaC", b"OggS", b"OpusHead", b"OpusTags", b"\x01vorbis", b"\x05vorbis", b"ID3\x04\0",
    b"TAG", b"Xing", b"Info", b"LAME", b"VBRI", b"\xff\xfb\x90\0", b"%!PS-Adobe-3.0 EPSF-3.0", b"<svg", b"%PDF-1.7",
)  # fmt: skip


@cache
def _samples() -> tuple[bytes, ...]:
    """A small file of each format, mode and encoding."""
    from PIL import Image

    from tests.media.samples import IMAGE_FORMATS, SOUND_FORMATS, pixels, recorded, saved

    exif = Image.Exif()
    exif[0x0112] = 6
    images = [saved(pixels(mode), form) for form, modes in IMAGE_FORMATS.items() for mode in modes]
    images += [saved(pixels(size=(40, 30)), form, exif=exif) for form in ("JPEG", "PNG", "WEBP", "TIFF")]
    images += [saved(pixels(size=(40, 30)), "JPEG", progressive=True), saved(pixels(), "WEBP", lossless=True)]
    images += [saved(pixels(), "TIFF", compression=name) for name in ("tiff_lzw", "tiff_deflate", "jpeg", "packbits")]
    images += [saved(pixels(), form, save_all=True, append_images=[pixels(seed=1)]) for form in ("GIF", "PNG", "WEBP")]
    rates = {"opus": 48000, "mp3": 44100}
    sounds = [recorded(name, rates.get(name, 8000), channels, 600) for name in SOUND_FORMATS for channels in (1, 2)]
    return (*images, *sounds)


@contextmanager
def _nothing_printed() -> Iterator[None]:
    """Require that nothing is written to the two standard streams, by C libraries either."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(1), os.dup(2)
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield
        finally:
            for number, descriptor in enumerate(kept, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
        file.seek(0)
        require(not (text := file.read(500)), "nothing is printed about a file:", text)


def _check(data: bytes) -> Hashable:
    config = EngineConfig()
    limits = MediaLimits(config.max_image_pixels, config.max_audio_seconds, config.max_media_items)
    outcomes: list[Hashable] = []
    kinds: tuple[MediaKind, ...] = ("image", "audio")
    for kind in kinds:
        store = MediaStore(MediaRoot(None), limits, _RATE)
        try:
            with _nothing_printed():
                header = store.add(MediaItem(kind, data, f"{kind}_data"))
                found = store.decode(header)
        except RowError as error:
            check_error(error.info)
            require(error.info.code == ErrorCode.MEDIA_ERROR, "a file is refused as such:", error.info)
            outcomes.append(error.info.message[:60])
            continue
        if kind == "image":
            require((found.mode, found.size) == ("RGB", header.size), "an image has the size of its header:", header)
        else:
            require(
                found.shape == header.size and np.isfinite(found).all(),
                "a sound has the length of its header, in finite numbers:",
                header,
            )
        outcomes.append(header.size)
    return tuple(outcomes)


def _make(rng: Random) -> bytes:
    data = rng.choice(_samples())
    return data[: rng.randrange(len(data))] if rng.random() < 0.1 else data


def _mutate(data: bytes, rng: Random) -> bytes:
    # Most of what a decoder believes is at the beginning.
    at = rng.choice((len(data), 200, 60))
    return mutate_bytes(data[:at], rng, _WORDS) + data[at:]


FUZZERS = (Fuzzer("media-files", _check, _make, _mutate),)
