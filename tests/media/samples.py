"""Small pictures and sounds in every format that is read, made with the libraries themselves."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import soundfile
from PIL import Image

SIZE = (13, 7)
"""Width and height of the pictures."""


def pixels(mode: str = "RGB", size: tuple[int, int] = SIZE, seed: int = 0) -> Image.Image:
    """A picture of random pixels."""
    rng = np.random.default_rng(seed)
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 1 << 16, size[::-1], np.uint16))
    if mode == "P":
        return Image.fromarray(rng.integers(0, 256, (*size[::-1], 3), np.uint8)).quantize(16)
    if mode == "1":
        return Image.fromarray(rng.integers(0, 256, size[::-1], np.uint8)).convert("1")
    bands = len(Image.new(mode, (1, 1)).getbands())
    values = rng.integers(0, 256, (*size[::-1], bands), np.uint8)
    return Image.frombytes(mode, size, values.tobytes())


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    """The bytes of an image file."""
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


IMAGE_FORMATS: Mapping[str, tuple[str, ...]] = {
    "JPEG": ("RGB", "L", "CMYK"),
    "PNG": ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L", "1"),
    "TIFF": ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16", "LAB"),
    "BMP": ("RGB", "L", "P", "1"),
}
"""Format -> modes that it is written in."""

SOUND_FORMATS: Mapping[str, tuple[str, str]] = {
    "wav": ("WAV", "PCM_16"),
    "wav-float": ("WAV", "FLOAT"),
    "wav-8": ("WAV", "PCM_U8"),
    "wav-24": ("WAV", "PCM_24"),
    "wav-law": ("WAV", "ULAW"),
    "wav-adpcm": ("WAV", "MS_ADPCM"),
    "wavex": ("WAVEX", "PCM_16"),
    "rf64": ("RF64", "PCM_16"),
    "flac": ("FLAC", "PCM_16"),
    "flac-24": ("FLAC", "PCM_24"),
    "ogg": ("OGG", "VORBIS"),
    "opus": ("OGG", "OPUS"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
}
"""Name -> format and encoding of the library."""


def wave(frames: int = 4800, channels: int = 1, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[frames, channels] of a sound."""
    rng = np.random.default_rng(seed)
    time = np.arange(frames)[:, None] * rng.uniform(0.02, 0.4, channels)
    return (0.4 * np.sin(time) + 0.05 * rng.standard_normal((frames, channels))).astype(np.float32)


def recorded(name: str, rate: int = 16000, channels: int = 1, frames: int = 4800) -> bytes:
    """The bytes of a sound file."""
    form, encoding = SOUND_FORMATS[name]
    out = io.BytesIO()
    soundfile.write(out, wave(frames, channels), rate, format=form, subtype=encoding)
    return out.getvalue()
