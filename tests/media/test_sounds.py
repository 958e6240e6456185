"""Sounds: every format as soundfile and soxr give it, and the length is known before."""

from __future__ import annotations

import io
import math
import struct
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr

from batchgen.media import parts
from batchgen.media.faults import MediaFault
from batchgen.media.sounds import SoundHeader, array_sound, check_sound, decode_sound, resampled, sound_header
from tests.cases import each
from tests.media.samples import SOUND_FORMATS, recorded, wave

RATE = 16000


def as_the_library(data: bytes, rate: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The samples as transformers' `load_audio` gives them with soundfile."""
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        source = file.samplerate
        samples = file.read(dtype="float32", always_2d=True).T
    mono = samples.mean(axis=0) if len(samples) > 1 else samples[0]
    return mono if source == rate else at_rate(mono, source, rate)


def at_rate(mono: Any, source: int, rate: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    length = math.ceil(len(mono) * rate / source)
    made = soxr.resample(mono, source, rate, quality="soxr_hq")
    return np.pad(made, (0, max(0, length - len(made))))[:length]


def read(data: bytes) -> None:
    """As the store does: first the header, then the samples."""
    sound_header(data, 10)
    decode_sound(data, RATE)


@each("channels", [1, 2])
@each("name", SOUND_FORMATS)
def test_every_format(name: str, channels: int) -> None:
    rate = 48000 if name in ("opus", "mp3") else 22050
    data = recorded(name, rate, channels)
    for target in (rate, RATE):
        found = decode_sound(data, target)
        assert found.dtype == np.float32
        assert len(found) == sound_header(data, 10).length(target)
        np.testing.assert_array_equal(found, as_the_library(data, target))


@each("rate", [8000, 11025, 16000, 24000, 44100, 96000])
@each("frames", [1, 2, 3, 100, 4801])
def test_every_rate_has_the_promised_length(rate: int, frames: int) -> None:
    data = recorded("wav", rate, frames=frames)
    found = decode_sound(data, RATE)
    assert len(found) == sound_header(data, 10).length(RATE) == math.ceil(frames * RATE / rate)
    np.testing.assert_array_equal(found, as_the_library(data, RATE))


def test_a_long_sound_is_decoded_in_pieces_to_the_same_samples() -> None:
    data = recorded("flac", 44100, channels=3, frames=300_000)
    np.testing.assert_array_equal(decode_sound(data, RATE), as_the_library(data, RATE))


@pytest.mark.parametrize("name", ["wav", "rf64", "flac", "ogg", "opus", "mp3"])
def test_a_file_that_is_cut_off_is_refused(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    data = recorded(name, 48000, frames=48000)
    for part in (1, 4, 12, 30, len(data) // 3, len(data) // 2, len(data) - 50 - 4096 * (name == "mp3")):
        with pytest.raises(MediaFault, match=r"is cut off|is a damaged|of an unknown format|no samples"):
            read(data[:part])
    assert capfd.readouterr() == ("", "")


PLACEHOLDERS = [
    (0x7FFFF024, 0x7FFFF000), (0x7FFFFFFF, 0x7FFFFFFF), (2_000_000_036, 2_000_000_000), (0xFFFFFFFF, 0xFFFFFFFF),
    (0x80000024, 0x80000000), (0, 0xFFFFFFFF),
]  # fmt: skip


@pytest.mark.parametrize(("whole", "size"), PLACEHOLDERS)
def test_a_wav_file_that_went_through_a_pipe_is_read_to_its_end(whole: int, size: int) -> None:
    """As the library reads it."""
    data = recorded("wav")
    at = data.index(b"data") + 4
    streamed = data[:4] + struct.pack("<I", whole) + data[8:at] + struct.pack("<I", size) + data[at + 4 :]
    assert sound_header(streamed, 60) == sound_header(data, 60)
    np.testing.assert_array_equal(decode_sound(streamed, 16000), decode_sound(data, 16000))
    assert soundfile.info(io.BytesIO(streamed)).frames == sound_header(data, 60).frames


@pytest.mark.parametrize("size", [0, (1 << 64) - 1, (1 << 63) - 1, 0xFFFFFFFF, None])
def test_an_rf64_file_without_sizes_is_read_to_its_end(size: int | None) -> None:
    data = recorded("rf64")
    at = data.index(b"ds64") + 8
    sizes = data[at : at + 24] if size is None else struct.pack("<3Q", size, size, size)
    streamed = data[:at] + sizes + data[at + 24 :]
    assert sound_header(streamed, 60) == sound_header(data, 60)
    np.testing.assert_array_equal(decode_sound(streamed, 16000), decode_sound(data, 16000))


def test_the_chunks_of_a_wav_file_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    data = recorded("wav")
    at = data.index(b"data")
    longer = data[:at] + 3 * b"note\1\0\0\0x\0" + data[at:]
    np.testing.assert_array_equal(decode_sound(longer, 16000), decode_sound(data, 16000))
    monkeypatch.setattr(parts, "MAX_PARTS", 3)
    assert sound_header(data, 60).frames
    with pytest.raises(MediaFault, match="is a WAV file of more than 3 parts; convert it"):
        sound_header(longer, 60)


def test_notes_behind_an_mp3_file_are_accepted(capfd: pytest.CaptureFixture[str]) -> None:
    data = recorded("mp3")
    np.testing.assert_array_equal(decode_sound(data + bytes(1000), RATE), decode_sound(data, RATE))
    assert capfd.readouterr() == ("", "")


def test_a_flac_file_that_does_not_tell_its_length_is_refused() -> None:
    data = bytearray(recorded("flac"))
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    with pytest.raises(MediaFault, match="does not say how long it is"):
        sound_header(bytes(data), 10)


def test_limits_hold_before_the_samples_are_decoded() -> None:
    data = recorded("flac", 16000, frames=16000)
    assert sound_header(data, 1.0) == (16000, 16000)
    with pytest.raises(MediaFault, match=r"lasts 1.0 s; at most 0.9 s are allowed: .*--max-audio-seconds"):
        sound_header(data, 0.9)


def wav(rate: int = 16000, channels: int = 1, data: bytes = bytes(64), kind: int = 1, bits: int = 16) -> bytes:
    header = struct.pack(
        "<HHIIHH", kind, channels, rate, rate * channels * bits // 8 % 2**32, channels * bits // 8, bits
    )
    body = b"WAVEfmt " + struct.pack("<I", len(header)) + header + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (wav(data=b""), "no samples"),
        (wav(rate=0), "damaged|rate"),
        (wav(rate=1), "between 1000 and 768000"),
        (wav(rate=2**30), "between 1000 and 768000"),
        (wav(channels=0), "damaged|not WAV"),
        (wav(channels=2000), "damaged|no samples"),
        (wav(kind=3, bits=32, data=struct.pack("<4f", 0, math.nan, 0, 0)), "not finite"),
        (wav(kind=3, bits=32, data=struct.pack("<4f", 0, math.inf, 0, 0)), "not finite"),
        (wav(rate=8000, kind=3, bits=32, data=struct.pack("<8f", *[3e38, -3e38] * 4)), "not finite"),
        (wav(channels=2, kind=3, bits=32, data=struct.pack("<4f", *[3e38] * 4)), "not finite"),
        (wav(channels=2, kind=3, bits=32, data=struct.pack("<2f", math.inf, -math.inf)), "not finite"),
        (b"FORM\0\0\0\0AIFF", "an AIFF sound, not WAV"),
        (b"\0\0\0\x20ftypM4A ", "an M4A sound"),
        (b"\x1aE\xdf\xa3", "a Matroska or WebM video"),
        (b"\x89PNG\r\n\x1a\n", "a PNG image"),
        (b"OggS" + bytes(100), "damaged"),
        (b"fLaC" + bytes(100), "damaged"),
        (b"ID3" + bytes(100), "damaged"),
        (b"\xff\xfb\x90\0" + bytes(100), "damaged|no samples|cut off"),
        (b"", "unknown format"),
        (b"hello", "unknown format"),
    ],
)
def test_other_files_are_refused(data: bytes, word: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MediaFault, match=word):
        read(data)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([0.5, -0.25], np.float64), [0.5, -0.25]),
        (np.array([0.5, -0.25], np.float16), [0.5, -0.25]),
        (np.array([16384, -32768], np.int16), [0.5, -1]),
        (np.array([1 << 30, -(1 << 31)], np.int32), [0.5, -1]),
        (np.array([[0.5, 0.5, 0.5], [0, 0.25, -0.5]]), [0.25, 0.375, 0]),
        (np.array([[0.5, 0.5, 0.5], [0, 0.25, -0.5]]).T, [0.25, 0.375, 0]),
        (np.array([[0.5, 0.25, 0]]), [0.5, 0.25, 0]),
        (np.zeros((0, 5)), []),
    ],
)
def test_arrays(array: Any, expected: list[float]) -> None:
    np.testing.assert_array_equal(array_sound(array), np.array(expected, np.float32))


@pytest.mark.parametrize(
    "array",
    [np.zeros((2, 2, 2)), np.zeros(3, np.int8), np.zeros(3, np.int64), np.array(["a"]), np.array([np.nan]),
     np.array([1e300]), np.zeros(3, bool), np.array(0.5)],
)  # fmt: skip
def test_wrong_arrays(array: Any) -> None:
    with pytest.raises(MediaFault, match=r"is an array of|not finite"):
        array_sound(array)


def test_arrays_are_resampled_as_files() -> None:
    mono = wave(4801)[:, 0]
    header = SoundHeader(4801, 44100)
    check_sound(header, 1)
    np.testing.assert_array_equal(resampled([mono], header, RATE), at_rate(mono, 44100, RATE))
    np.testing.assert_array_equal(resampled([mono[:1000], mono[1000:]], header, RATE), at_rate(mono, 44100, RATE))
