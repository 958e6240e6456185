"""Digests of weight files: every bit counts, those of unchanged files are kept, and damage to what is kept is seen."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from batchgen.errors import ModelError
from batchgen.models.check import CheckedModel, check_model
from batchgen.models.checkpoint.file_hashes import FileHashes, FileStamp, hash_file
from tests.models.adapters import KINDS, save_adapter
from tests.models.tiny import save_tiny

LARGE = (16 << 20) + 3
"""Bytes of a file whose digest is kept."""
SETTLED = 2.1
"""Seconds after which the digest of a file that was written is kept."""
TICK = 0.03
"""Seconds after which a change of a file has another time than the one before."""


def stamp(file: Path) -> FileStamp:
    return FileStamp.of(file.stat())


def digest(file: Path) -> str:
    return hash_file(file, stamp(file))


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def flip(file: Path, at: int, bit: int = 0) -> None:
    """Flip one bit and keep the modification time, as damage on a disk does."""
    status = file.stat()
    with file.open("r+b") as stream:
        stream.seek(at)
        (byte,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte ^ (1 << bit)]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("sharded"), max_shard_size="100KB")


def test_every_bit_of_a_weight_file_counts(tiny: Path, tmp_path: Path) -> None:
    """In the header's length, the header, its padding, at both ends of every tensor and between them."""
    file = Path(shutil.copy(tiny / "model.safetensors", tmp_path))
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    tensors = check_model(tiny).folder.tensors.values()
    ends = {at for info in tensors for at in (info.start, info.start + info.nbytes // 3, info.start + info.nbytes - 1)}
    places = sorted({*range(8), 8, header // 2, header - 2, header - 1, *ends, *range(0, file.stat().st_size, 9973)})
    found = {sha256(file)}
    for number, at in enumerate(places):
        flip(file, at, number % 8)
        found.add(digest(file))
        assert sha256(file) in found
        flip(file, at, number % 8)
    assert len(found) == len(places) + 1
    assert digest(file) == sha256(tiny / "model.safetensors")


def found_in(checked: CheckedModel) -> dict[str, str]:
    return {file.name: made for file, made in checked.hashes().done.result(timeout=20).items()}


def test_the_digests_of_all_shards_and_adapters(sharded: Path, tiny: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tiny, tmp_path / "adapter", **KINDS["two"])
    found = found_in(check_model(sharded, lora=[("fr", str(adapter))]))
    files = [*sharded.glob("*.safetensors"), adapter / "adapter_model.safetensors"]
    assert len(files) > 3
    assert found == {file.name: sha256(file) for file in files}


def test_links_are_followed_as_in_the_cache_of_the_hub(tiny: Path, tmp_path: Path) -> None:
    folder, blobs = tmp_path / "snapshots" / "1", tmp_path / "blobs"
    blobs.mkdir()
    folder.mkdir(parents=True)
    for number, file in enumerate(tiny.iterdir()):
        (folder / file.name).symlink_to(shutil.copy(file, blobs / str(number)))
    first = found_in(check_model(folder))
    assert first == found_in(check_model(tiny))
    linked = folder / "model.safetensors"
    other = Path(shutil.copy(tiny / "model.safetensors", blobs / "other"))
    flip(other, other.stat().st_size - 1)
    linked.unlink()
    linked.symlink_to(other)
    assert found_in(check_model(folder)) == {"model.safetensors": sha256(other)} != first


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "batchgen" / "weights"


@pytest.fixture(scope="module")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that was written long enough ago for its digest to be kept."""
    file = tmp_path_factory.mktemp("large") / "model.safetensors"
    file.write_bytes(os.urandom(LARGE))
    time.sleep(SETTLED)
    return file


@pytest.fixture
def large(large_file: Path, cache: Path) -> Path:
    """The same, hashed once, with its digest in `cache`."""
    assert digest(large_file) == sha256(large_file)
    assert len(list(cache.iterdir())) == 1
    return large_file


def bytes_read(action: Callable[[], object]) -> int:
    def total() -> int:
        line = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
        return int(line.split()[1])

    before = total()
    action()
    return total() - before


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts reads through /proc")
def test_an_unchanged_file_is_read_once(large: Path, tmp_path: Path) -> None:
    """Under any name, and by a job whose files include it."""
    assert bytes_read(lambda: digest(large)) < 100_000
    (tmp_path / "link").symlink_to(large)
    assert bytes_read(lambda: digest(tmp_path / "link")) < 100_000
    hashes = FileHashes({large: stamp(large)}, [large])
    assert bytes_read(lambda: hashes.done.result(timeout=20)) < 100_000


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda entry: entry.write_bytes(b""),
    "cut": lambda entry: entry.write_bytes(entry.read_bytes()[:-20]),
    "longer": lambda entry: entry.write_bytes(entry.read_bytes() + b"x"),
    "zeros": lambda entry: entry.write_bytes(bytes(len(entry.read_bytes()))),
    "not text": lambda entry: entry.write_bytes(b"\xff\xfe" * 90),
    "another file's": lambda entry: entry.write_bytes(entry.read_bytes().replace(b" 1", b" 2", 1)),
    "a folder": lambda entry: (entry.unlink(), entry.mkdir()),
    "a link": lambda entry: entry.rename(entry.with_name("x")) and entry.symlink_to("x"),
    "a pipe": lambda entry: (entry.unlink(), os.mkfifo(entry)),
    "no folder": lambda entry: (shutil.rmtree(entry.parent), entry.parent.write_bytes(b"")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_cache_means_hash_again(large: Path, cache: Path, damage: Callable[[Path], object]) -> None:
    (entry,) = cache.iterdir()
    damage(entry)
    assert digest(large) == sha256(large)


def test_a_flipped_bit_of_the_cache_means_hash_again(large: Path, cache: Path) -> None:
    (entry,) = cache.iterdir()
    right = sha256(large)
    for at in range(0, entry.stat().st_size, 7):
        flip(entry, at, at % 8)
        assert digest(large) == right


CHANGES: dict[str, Callable[[Path], object]] = {
    "one bit": lambda file: flip(file, LARGE // 2),
    "another file under the name": lambda file: flip(Path(shutil.copy2(file, f"{file}.new")).replace(file), 5),
    "the size": lambda file: os.truncate(file, LARGE - 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_file_is_read_again(large_file: Path, cache: Path, change: Callable[[Path], object]) -> None:
    """Also if its size and modification time stay."""
    before = digest(large_file)
    kept = Path(shutil.copy2(large_file, large_file.with_name("kept")))
    try:
        change(large_file)
        assert before != digest(large_file) == sha256(large_file)
    finally:
        kept.replace(large_file)


def test_the_digest_of_a_file_that_may_still_change_is_not_kept(cache: Path, tmp_path: Path) -> None:
    """A second change may come within one tick of the file system's clock, so that no time tells them apart."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(LARGE))
    assert digest(file) == sha256(file)
    assert not cache.exists()


def test_a_file_that_changes_between_the_checks_and_the_end_of_the_load_is_named(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "model")
    for name in ("model.safetensors", "config.json"):
        time.sleep(TICK)
        hashes = check_model(folder).hashes()
        hashes.done.result(timeout=20)
        hashes.check_unchanged()
        flip(folder / name, 3)
        flip(folder / name, 3)
        with pytest.raises(ModelError, match=f"{name} changed while the model was read"):
            hashes.check_unchanged()
    time.sleep(TICK)
    checked, file = check_model(folder), folder / "model.safetensors"
    flip(file, file.stat().st_size - 1)
    with pytest.raises(ModelError, match=r"model\.safetensors changed while the model was read"):
        checked.hashes().done.result(timeout=20)


def test_an_unreadable_file_is_named(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "model")
    checked, hashes = check_model(folder), check_model(folder).hashes()
    hashes.done.result(timeout=20)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"Cannot read .*model\.safetensors: No such file"):
        hashes.check_unchanged()
    with pytest.raises(ModelError, match=r"Cannot read .*model\.safetensors: No such file"):
        checked.hashes().done.result(timeout=20)


def test_equal_checkpoints_are_equal_and_others_differ(tiny: Path, tmp_path: Path) -> None:
    again = save_tiny("llama", tmp_path / "again")
    assert found_in(check_model(again)) == found_in(check_model(tiny))
    for name, options in {"dtype": {"dtype": torch.bfloat16}, "seed": {"seed": 1}}.items():
        assert found_in(check_model(save_tiny("llama", tmp_path / name, **options))) != found_in(check_model(tiny))
    changed = check_model(save_tiny("llama", tmp_path / "config", rms_norm_eps=1e-5)).folder
    assert changed.config_digest != check_model(tiny).folder.config_digest
