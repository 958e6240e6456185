"""Sounds: length from the header, samples as mono float32 at the model's rate, as by transformers' `load_audio`.

Files are decoded by soundfile and resampled by soxr, both extras that are imported where they are used. A long sound is
decoded in pieces, so that it takes little more memory than its samples at the model's rate.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.errors import UsageError
from batchgen.media.faults import MediaFault, describe, what_else
from batchgen.media.parts import check_parts, riff_chunks

MIN_RATE, MAX_RATE = 1_000, 768_000
"""Sampling rates in Hz that are read."""
_FORMATS: Final = frozenset({"WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3"})
_NAMES: Final = "WAV, FLAC, MP3 or OGG"
_BLOCK: Final = 1 << 18
"""Most samples decoded at once, of all channels together."""
_FULL_SCALE: Final = {"int16": 1 << 15, "int32": 1 << 31}

_CUT: Final = "is cut off: its {0} promises {1:,} bytes, but {2:,} follow; replace the file"
_UNKNOWN: Final = frozenset(
    {0x7FFFF000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2_000_000_000, (1 << 63) - 1, (1 << 64) - 1}
)
"""Sizes that programs write which do not know the size, since they write to a pipe."""

_lock = Lock()
_depth = 0
_original: int | None = None

Samples = npt.NDArray[np.float32]


class SoundHeader(NamedTuple):
    """Length and rate in a sound's header."""

    frames: int
    rate: int
    """Hz"""

    def length(self, rate: int) -> int:
        """Number of samples at another rate."""
        return math.ceil(self.frames * rate / self.rate)


def sound_header(data: bytes, max_seconds: float) -> SoundHeader:
    """The length of an encoded sound, from its header.

    Raises:
        MediaFault: it is not a sound, is damaged, or longer than `max_seconds`.
    """
    with _quiet(), _opened(data) as file:
        header = SoundHeader(int(file.frames), int(file.samplerate))
    check_sound(header, max_seconds)
    return header


def check_sound(header: SoundHeader, max_seconds: float) -> None:
    """Refuse a sound by its length and rate.

    Raises:
        MediaFault: it is empty, too long, or has an absurd rate.
    """
    frames, rate = header
    if not MIN_RATE <= rate <= MAX_RATE:
        raise MediaFault(f"has a sampling rate of {rate} Hz; it must be between {MIN_RATE} and {MAX_RATE}: convert it")
    if frames < 1:
        raise MediaFault("has no samples; leave it out")
    if frames >= 1 << 62:
        raise MediaFault("does not say how long it is; convert it")
    if frames > max_seconds * rate:
        remedy = "cut it, or raise --max-audio-seconds"
        raise MediaFault(f"lasts {frames / rate:,.1f} s; at most {max_seconds:g} s are allowed: {remedy}")


def decode_sound(data: bytes, rate: int) -> Samples:
    """[samples] float32 of an encoded sound, its channels averaged, at `rate` in Hz.

    Raises:
        MediaFault: the sound is damaged or cut off.
    """
    with _quiet(), _opened(data) as file:
        header = SoundHeader(int(file.frames), int(file.samplerate))
        try:
            return resampled(_blocks(file), header, rate)
        except (MediaFault, UsageError):
            raise
        except Exception as error:
            raise MediaFault(f"is a damaged {file.format} sound ({describe(error)}); replace the file") from None


def _blocks(file: Any) -> Iterator[Samples]:
    left, size = int(file.frames), max(1, _BLOCK // file.channels)
    while left:
        block = file.read(min(left, size), dtype="float32", always_2d=True)
        if not len(block):
            raise MediaFault(f"is cut off: {left} of {file.frames} samples are missing; replace the file")
        left -= len(block)
        yield block[:, 0] if block.shape[1] == 1 else _mono(block.T)


def _mono(channels: Samples) -> Samples:
    """[samples] of [channels, samples]; what is not finite is refused later, without a warning here."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean: Samples = channels.mean(axis=0, dtype=np.float32)
        return mean


def array_sound(array: npt.NDArray[Any]) -> Samples:
    """[samples] float32 of [samples], [samples, channels] or [channels, samples]; integers are scaled to -1 to 1.

    Raises:
        MediaFault: it has another shape or type, or samples that are not finite.
    """
    if array.ndim not in (1, 2) or array.dtype.kind not in "fi" or array.dtype.itemsize < 2:
        problem = f"is an array of {array.dtype} of shape {list(array.shape)}"
        raise MediaFault(f"{problem}; a sound has [samples] of floating point, int16 or int32")
    if array.dtype.kind == "i" and array.dtype.name not in _FULL_SCALE:
        raise MediaFault(f"is an array of {array.dtype}; give floating point, int16 or int32")
    with np.errstate(over="ignore"):  # infinities are refused
        values = array.astype(np.float32) / np.float32(_FULL_SCALE.get(array.dtype.name, 1))
    if values.ndim == 2 and values.size:
        values = _mono(values.T if values.shape[0] > values.shape[1] else values)
    _check_finite(values)
    return np.ascontiguousarray(values.reshape(-1))


def resampled(blocks: Iterable[Samples], header: SoundHeader, rate: int) -> Samples:
    """[header.length(rate)] float32: the blocks of a sound at another rate.

    Raises:
        MediaFault: a sample is not finite.
    """
    out = np.zeros(header.length(rate), np.float32)
    at, left = 0, header.frames
    stream = None
    if rate != header.rate:
        stream = _libraries()[1].ResampleStream(header.rate, rate, 1, dtype="float32", quality="soxr_hq")
    for block in blocks:
        left -= len(block)
        made = block if stream is None else stream.resample_chunk(np.ascontiguousarray(block), last=not left)
        made = made[: len(out) - at]
        out[at : at + len(made)] = made
        at += len(made)
    _check_finite(out)
    return out


def _libraries() -> tuple[Any, Any]:
    """Soundfile and soxr; `UsageError` if one of them is not installed."""
    name = "soundfile"
    try:
        import soundfile

        name = "soxr"
        import soxr
    except (ImportError, OSError):  # or without the C library
        raise UsageError(f"sounds need the library {name}; pip install 'batchgen[media]'") from None
    return soundfile, soxr


def _check_finite(samples: Samples) -> None:
    if not np.isfinite(samples).all():
        raise MediaFault("has samples that are not finite numbers; replace the file")


def _opened(data: bytes) -> Any:
    soundfile, _ = _libraries()
    form = sound_format(data)
    if form is None:
        raise MediaFault(f"is {what_else(data)}, not {_NAMES}; convert it")
    check_parts(data, form)
    if form == "OGG":
        _check_ogg(data)
    # Of a file that is cut off the library would take what is left.
    data = _whole_wav(data) if form == "WAV" else data
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except Exception as error:
        reason = describe(getattr(error, "error_string", "") or type(error).__name__)
        raise MediaFault(f"is a damaged {form} sound ({reason}); replace the file") from None
    if file.format not in _FORMATS or not file.channels:
        kind = file.format
        file.close()
        raise MediaFault(f"is a {kind} sound, not {_NAMES}; convert it")
    return file


def sound_format(data: bytes) -> str | None:
    """The format of an encoded sound by its first bytes; None if it is none that is read."""
    if data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE":
        return "WAV"
    if data[:4] == b"fLaC":
        return "FLAC"
    if data[:4] == b"OggS":
        return "OGG"
    is_layer_three = data[:1] == b"\xff" and len(data) > 1 and data[1] & 0xE6 == 0xE2 and data[1] & 0x18 != 0x08
    return "MP3" if is_layer_three or data[:3] == b"ID3" else None


def _whole_wav(data: bytes) -> bytes:
    """The file; one of the form RF64 that has no size gets it, which the library needs."""
    chunks = dict[bytes, int]()
    for at in riff_chunks(data):
        chunks.setdefault(data[at : at + 4], at)
    name, width = (b"ds64", 8) if data[:4] == b"RF64" else (b"data", 4)
    if b"data" not in chunks or name not in chunks:
        return data
    at, place = chunks[b"data"], chunks[name] + (16 if width == 8 else 4)
    size, left = int.from_bytes(data[place : place + width], "little"), len(data) - at - 8
    if size > left and size not in _UNKNOWN:
        raise MediaFault(_CUT.format("header", size, left))
    if width == 8 and (not size or size in _UNKNOWN):
        return data[:place] + left.to_bytes(width, "little") + data[place + width :]
    return data


def _check_ogg(data: bytes) -> None:
    """Compare the size of the last page with the bytes after its beginning."""
    at = data.rfind(b"OggS")
    table = data[at + 27 : at + 27 + data[at + 26]] if at + 26 < len(data) else b""
    size = 27 + len(table) + sum(table)
    if at + 26 >= len(data) or len(table) < data[at + 26] or size > len(data) - at:
        raise MediaFault(_CUT.format("last page", max(size, 28), len(data) - at))


@contextmanager
def _quiet() -> Iterator[None]:
    """While any thread is inside, what C code prints to `stderr` goes nowhere, where the system lets it be replaced.

    The MP3 decoder inside libsndfile prints its warnings there, and libsndfile offers no switch for them. `sys.stderr`
    and the file descriptor stay as they are.
    """
    global _depth, _original
    streams = _streams()
    if streams is None:
        yield
        return
    variable, nowhere = streams
    with _lock:
        if not _depth:
            _original, variable.value = variable.value, nowhere
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if not _depth:
                variable.value = _original


@cache
def _streams() -> tuple[ctypes.c_void_p, int] | None:
    """The variable `stderr` of the C library and a stream to nowhere; None where the variable is a constant."""
    is_glibc = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
    if not is_glibc and sys.platform != "darwin":
        return None
    library = ctypes.CDLL(None)
    library.fopen.restype = ctypes.c_void_p
    nowhere = library.fopen(os.devnull.encode(), b"w")
    name = "stderr" if is_glibc else "__stderrp"
    return None if nowhere is None else (ctypes.c_void_p.in_dll(library, name), nowhere)
