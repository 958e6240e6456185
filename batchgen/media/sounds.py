"""Sounds: length from the header, samples as mono float32 at the model's rate, as by transformers' `load_audio`.

Files are decoded by soundfile and resampled by soxr, both extras that are imported where they are used. A long sound is
decoded in pieces, so that it takes little more memory than its samples at the model's rate.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.errors import UsageError
from batchgen.media.faults import MediaFault, describe, what_else
from batchgen.media.quiet import quiet_libraries
from batchgen.media.sound_files import sound_format, with_true_size

MIN_RATE, MAX_RATE = 1_000, 768_000
"""Sampling rates in Hz that are read."""
_FORMATS: Final = frozenset({"WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3"})
_NAMES: Final = "WAV, FLAC, MP3 or OGG"
_BLOCK: Final = 1 << 18
"""Most samples decoded at once, of all channels together."""
_FULL_SCALE: Final = {"int16": 1 << 15, "int32": 1 << 31}

Samples = npt.NDArray[np.float32]


class SoundHeader(NamedTuple):
    """What a sound's header says."""

    frames: int
    rate: int
    """Hz"""

    def length(self, rate: int) -> int:
        """Number of samples at another rate."""
        return math.ceil(self.frames * rate / self.rate)


def sound_header(data: bytes, max_seconds: float) -> SoundHeader:
    """The length of an encoded sound, from its header.

    Raises:
        MediaFault: it is no sound, damaged, or longer than `max_seconds`.
    """
    with quiet_libraries(), _opened(data) as file:
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
    with quiet_libraries(), _opened(data) as file:
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
        yield block[:, 0] if block.shape[1] == 1 else block.T.mean(axis=0)


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
    if values.ndim == 2:
        values = values.mean(axis=int(values.shape[0] > values.shape[1]), dtype=np.float32)
    _check_finite(values)
    return np.ascontiguousarray(values)


def resampled(blocks: Iterable[Samples], header: SoundHeader, rate: int) -> Samples:
    """[header.length(rate)] float32: the blocks of a sound at another rate.

    Raises:
        MediaFault: a sample is not finite.
    """
    out = np.zeros(header.length(rate), np.float32)
    at = left = 0
    left = header.frames
    stream = None if rate == header.rate else _resampler(header.rate, rate)
    for block in blocks:
        _check_finite(block)
        left -= len(block)
        made = block if stream is None else stream.resample_chunk(np.ascontiguousarray(block), last=not left)
        made = made[: len(out) - at]
        out[at : at + len(made)] = made
        at += len(made)
    return out


def _resampler(source: int, target: int) -> Any:
    try:
        import soxr
    except ImportError:
        raise _missing("soxr") from None
    return soxr.ResampleStream(source, target, 1, dtype="float32", quality="soxr_hq")


def _check_finite(samples: Samples) -> None:
    if not np.isfinite(samples).all():
        raise MediaFault("has samples that are not finite numbers; replace the file")


def _missing(library: str) -> UsageError:
    return UsageError(f"sounds need the library {library}; pip install 'batchgen[media]'")


class _SafeBytes(io.BytesIO):
    """Bytes of a file in whose callbacks nothing raises: what they raised would be printed."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        try:
            return super().seek(offset, whence)
        except (ValueError, OverflowError):
            return self.tell()


def _opened(data: bytes) -> Any:
    try:
        import soundfile
    except (ImportError, OSError):  # or without the C library
        raise _missing("soundfile") from None
    found = sound_format(data)
    if found is None:
        raise MediaFault(f"is {what_else(data)}, not {_NAMES}; convert it")
    data = with_true_size(data, found)
    try:
        file = soundfile.SoundFile(_SafeBytes(data))
    except Exception as error:
        reason = str(getattr(error, "error_string", "")) or describe(error)
        raise MediaFault(f"is a damaged {found} sound ({describe(ValueError(reason))}); replace the file") from None
    if file.format not in _FORMATS or not file.channels:
        kind = file.format
        file.close()
        raise MediaFault(f"is a {kind} sound, not {_NAMES}; convert it")
    return file
