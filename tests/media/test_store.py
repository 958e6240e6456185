"""`MediaStore`: an item is found in every way that a row may give it, and is one item whatever the way."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchgen.errors import ErrorCode, RowError, UsageError
from batchgen.media.root import MediaRoot
from batchgen.media.store import MediaLimits, MediaStore
from batchgen.request.fields.media import MediaField, MediaItem, MediaKind
from tests.media.samples import SIZE, pixels, recorded, saved, wave

PNG = saved(pixels(), "PNG")
WAV = recorded("wav", 8000)
FILES = {"a.png": PNG, "deep/b c.png": PNG, "a.wav": WAV, "empty.png": b"", "note.txt": b"hello", "AAAA": PNG}


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture
def store(tmp_path: Path) -> MediaStore:
    return new_store(tmp_path)


LIMITS = MediaLimits(image_pixels=1 << 20, audio_seconds=10, items=8)


def new_store(folder: Path, limits: MediaLimits = LIMITS) -> MediaStore:
    for name, data in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    return MediaStore(MediaRoot(str(folder)), limits, 16000)


def item(source: Any, kind: MediaKind = "image") -> MediaItem:
    """As a row gives it in `image_data` or `audio_data`."""
    found = MediaField(kind)(f"{kind}_data", source).items[0]
    assert isinstance(found, MediaItem)
    return found


def refused(store: MediaStore, source: Any, kind: MediaKind = "image") -> str:
    with pytest.raises(RowError) as caught:
        store.add(item(source, kind))
    info = caught.value.info
    assert (info.code, info.param) == (ErrorCode.MEDIA_ERROR, f"{kind}_data")
    assert info.message.startswith(f"`{kind}_data` ")
    return info.message


def ways(data: bytes, names: list[str], folder: Path) -> list[Any]:
    text = encoded(data)
    return [
        *names, *((folder / name).resolve().as_uri() for name in names), Path(names[0]),
        data, bytearray(data), text, text.rstrip("="), text.replace("+", "-").replace("/", "_"),
        "\n".join(text[i : i + 76] for i in range(0, len(text), 76)),
        f"data:image/png;base64,{text}", f"DATA:;BASE64,{text}",
        {"url": names[0]}, {"bytes": data, "path": "elsewhere.png"}, {"path": names[0], "bytes": None},
    ]  # fmt: skip


def test_the_same_bytes_are_one_item_in_every_form(store: MediaStore, tmp_path: Path) -> None:
    headers = {store.add(item(way)) for way in ways(PNG, ["a.png", "deep/b c.png", "./a.png"], tmp_path)}
    (header,) = headers
    assert (header.kind, header.size, len(store)) == ("image", SIZE, 1)
    np.testing.assert_array_equal(np.asarray(store.decode(header)), np.asarray(pixels()))
    sounds = {store.add(item(way, "audio")) for way in ways(WAV, ["a.wav"], tmp_path)}
    (sound,) = sounds
    assert (sound.kind, sound.size, len(store)) == ("audio", (9600,), 2)
    assert store.decode(sound).shape == (9600,)


def test_values_are_items_by_what_they_hold(store: MediaStore) -> None:
    image = pixels()
    rgb = np.asarray(image)
    headers = {store.add(item(way)) for way in (image, rgb, rgb.transpose(2, 0, 1), rgb / np.float32(255))}
    (header,) = headers
    assert header.size == SIZE
    np.testing.assert_array_equal(np.asarray(store.decode(header)), rgb)
    assert store.add(item(PNG)).digest != header.digest
    assert store.add(item(np.ascontiguousarray(rgb.reshape(13, 7, 3)))).digest != header.digest
    samples = wave()[:, 0]
    sounds = {store.add(item((way, 16000), "audio")) for way in (samples, samples.astype(np.float64), samples[:, None])}
    (sound,) = sounds
    assert sound.size == (4800,)
    np.testing.assert_array_equal(store.decode(sound), samples)
    assert store.add(item((samples, 8000), "audio")).size == (9600,)


def test_a_kind_is_part_of_an_item(store: MediaStore) -> None:
    first, second = store.add(item(PNG)), store.add(item(saved(pixels(seed=1), "PNG")))
    assert first.digest != second.digest
    assert "is a PNG image" in refused(store, PNG, "audio")
    assert "is a WAV sound" in refused(store, "a.wav")


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("missing.png", "no such file under --media-root"),
        ("../a.png", "without .."),
        ("/etc/passwd", "relative to --media-root"),
        ("file:///etc/passwd", "relative to --media-root"),
        ("file://host/a.png", "file:///FOLDER/NAME"),
        ("file:a.png?x", "file:///FOLDER/NAME"),
        ("http://localhost/a.png", "--allow-media-url"),
        ("HTTPS://localhost/a.png", "--allow-media-url"),
        ("ftp://localhost/a.png", "a URL begins with"),
        ("data:image/png,abc", "not base64"),
        ("data:image/png;base64,????", "not base64 throughout"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64,é", "not base64 throughout"),
        ("data:image/png", "not base64"),
        (encoded(PNG)[:60] + "?" + encoded(PNG)[60:], "not base64 throughout"),
        ("x" * 5000, "unknown format"),
        ("x y" * 5000, "unknown format"),
        ("empty.png", "is empty"),
        ("note.txt", "unknown format"),
        ("deep", "no such file"),
        (b"hello", "unknown format"),
        ({"format": "processor_output", "pixel_values": [[0.5]]}, "give the image itself"),
        ("data:image/svg+xml;base64," + encoded(b"<svg/>"), "an SVG drawing"),
    ],
)
def test_other_sources_are_refused(store: MediaStore, source: Any, word: str) -> None:
    assert word in refused(store, source)


def test_an_error_names_the_item_and_its_field(store: MediaStore) -> None:
    for source, word in (("missing.png", "no such file"), (b"hello", "unknown format")):
        found = MediaField("image")("image_data", [PNG, source]).items[1]
        assert isinstance(found, MediaItem)
        with pytest.raises(RowError, match=rf"^`image_data\[1\]` .*{word}") as caught:
            store.add(found)
        assert caught.value.info.param == "image_data"


def test_a_file_may_be_called_like_base64(store: MediaStore) -> None:
    assert store.add(item("AAAA")) == store.add(item(PNG))


def test_limits_of_a_row(tmp_path: Path) -> None:
    store = new_store(tmp_path, MediaLimits(image_pixels=90, audio_seconds=0.5, items=2))
    assert "--max-image-pixels" in refused(store, PNG)
    assert "--max-image-pixels" in refused(store, pixels())
    assert "--max-image-pixels" in refused(store, np.asarray(pixels()))
    assert "--max-audio-seconds" in refused(store, WAV, "audio")
    assert "--max-audio-seconds" in refused(store, (wave()[:, 0], 8000), "audio")
    small = saved(pixels(size=(2, 2)), "PNG")
    assert len(store.add_all([item(small), item(small)])) == 2
    with pytest.raises(RowError, match=r"one of 3 items of a prompt; at most 2 are allowed.*--max-media-items"):
        store.add_all([item(small)] * 3)


def test_a_file_that_changes_is_noticed(store: MediaStore, tmp_path: Path) -> None:
    header = store.add(item("a.png"))
    path = tmp_path / "a.png"
    path.write_bytes(saved(pixels(seed=1), "PNG"))
    with pytest.raises(RowError, match=r"`image_data` names 'a.png', which has changed since the job began"):
        store.decode(header)
    assert store.add(item("a.png")).digest != header.digest
    path.unlink()
    with pytest.raises(RowError, match="has changed"):
        store.decode(header)


def test_damage_behind_the_header_is_found_when_the_item_is_decoded(store: MediaStore) -> None:
    header = store.add(item(PNG[:-60]))
    with pytest.raises(RowError, match=r"`image_data` is a damaged PNG image \(.*\); replace the file") as caught:
        store.decode(header)
    assert caught.value.info.code == ErrorCode.MEDIA_ERROR


def test_threads_decode_the_same_items(store: MediaStore) -> None:
    images = [pixels(size=(40, 30), seed=seed) for seed in range(6)]
    headers = [store.add(item(saved(image, form))) for image in images for form in ("PNG", "TIFF", "BMP")]
    sound = store.add(item(WAV, "audio"))
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(store.decode, headers * 5)]
        sounds = [*pool.map(store.decode, [sound] * 8)]
    for number, image in enumerate(found):
        np.testing.assert_array_equal(np.asarray(image), np.asarray(images[number % len(headers) // 3]))
    assert all(np.array_equal(sounds[0], one) for one in sounds)


def test_no_named_file_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    folder.mkdir()
    store = MediaStore(MediaRoot(None), LIMITS, 16000, folder=folder)
    header = store.add(item(PNG))
    assert [*folder.iterdir()] == []
    assert store.decode(header).size == SIZE


@pytest.mark.parametrize(("library", "kind"), [("PIL", "image"), ("soundfile", "audio"), ("soxr", "audio")])
def test_a_missing_library_is_named(
    store: MediaStore, library: str, kind: MediaKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    name = {"PIL": "Pillow"}.get(library, library)
    with pytest.raises(UsageError, match=rf"need the library {name}; pip install 'batchgen\[media\]'"):
        store.decode(store.add(item(PNG if kind == "image" else WAV, kind)))


def test_the_libraries_are_imported_for_media_alone() -> None:
    code = "import sys, batchgen.media.store; print([n for n in ('PIL', 'soundfile', 'soxr') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.strip() == "[]"
