from __future__ import annotations

import lzma
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard

from batchgen.kernels.flash.check import check_library, flash_refusal
from batchgen.kernels.flash.library import FlashLibrary, FlashUnavailable, find_flash, versions_for
from batchgen.kernels.types import LayerKV
from tests.kernels.flash.fake_flash import Fakes, fakes

CPU = torch.device("cpu")
HOPPER, AMPERE = (3, 2), (2,)
NAMES = {2: "_vllm_fa2_C.abi3.so", 3: "_vllm_fa3_C.abi3.so"}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    with fakes(monkeypatch) as made:
        yield made


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, first on the path."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


def install(site: Path, package: str, version: str = "") -> Path:
    """Install a package that is empty except for a module that must not be imported; returns the library's folder."""
    folder = site / package
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('imported')")
    if version:
        info = site / f"{package}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return folder / "vllm_flash_attn" if package == "vllm" else folder


def take(library: FlashLibrary) -> FlashLibrary:
    return library


def accept(library: FlashLibrary) -> FlashLibrary:
    return check_library(library, LayerKV(3, 16, 16), 9, torch.bfloat16, 16, CPU)


# Where the library is found


def test_a_missing_library_is_reported_for_every_source() -> None:
    with pytest.raises(
        FlashUnavailable, match=r"^vLLM is not installed; the package vllm_flash_attn is not installed$"
    ):
        find_flash(HOPPER, None, take)


def test_sources_in_order(fake: Fakes, site: Path, tmp_path: Path) -> None:
    """The separate package, a given path before it, and installed vLLM before both, which is not imported."""
    fake.write(install(site, "vllm_flash_attn", "2.7.0") / NAMES[2], 2)
    assert str(find_flash(AMPERE, None, take)) == "flash-attn 2 of vllm_flash_attn 2.7.0"
    given = fake.write(tmp_path / NAMES[3], 3)
    assert find_flash(HOPPER, str(given), take).source == str(given)
    assert find_flash(HOPPER, str(given), take).source == str(given)
    assert fake.loaded[1:] == [given], "registered operations are not loaded again"


def test_installed_vllm_comes_first_and_is_not_imported(fake: Fakes, site: Path, tmp_path: Path) -> None:
    fake.write(install(site, "vllm", "0.21.0") / NAMES[3], 3)
    library = find_flash(HOPPER, str(fake.write(tmp_path / NAMES[3], 3)), take)
    assert str(library) == "flash-attn 3 of vLLM 0.21.0"
    assert fake.loaded == [site / "vllm/vllm_flash_attn" / NAMES[3]]
    assert "vllm" not in sys.modules


def test_a_folder_yields_the_version_for_the_chip(fake: Fakes, tmp_path: Path) -> None:
    fake.write(tmp_path / NAMES[2], 2)
    fake.write(tmp_path / NAMES[3], 3)
    assert find_flash(HOPPER, str(tmp_path), take).version == 3
    assert find_flash(AMPERE, str(tmp_path), take).version == 2


@pytest.mark.parametrize("suffix", [".xz", ".zst"])
def test_a_compressed_library_is_unpacked_and_the_copy_removed(fake: Fakes, suffix: str, tmp_path: Path) -> None:
    plain = fake.write(tmp_path / "plain", 3).read_bytes()
    packed = tmp_path / (NAMES[3] + suffix)
    packed.write_bytes(lzma.compress(plain) if suffix == ".xz" else zstandard.compress(plain))
    library = find_flash(HOPPER, str(packed), take)
    assert library.version == 3
    assert fake.loaded[0].name == NAMES[3]
    assert not fake.loaded[0].exists()


def test_a_second_file_with_the_same_operations_is_rejected(fake: Fakes, site: Path, tmp_path: Path) -> None:
    fake.write(install(site, "vllm") / NAMES[3], 3, fault="base 2")
    given = fake.write(tmp_path / NAMES[3], 3)
    with pytest.raises(FlashUnavailable, match=f"{given} cannot be loaded: .*site.* is loaded already and registers"):
        find_flash(HOPPER, str(given), accept)


# Errors of loading


def reason(path: Path, versions: tuple[int, ...] = HOPPER) -> str:
    """Why a path has no usable library, without the messages about missing packages."""
    with pytest.raises(FlashUnavailable) as refused:
        find_flash(versions, str(path), accept)
    about = [part for part in str(refused.value).split("; ") if "not installed" not in part]
    return "; ".join(about).replace(str(path), "PATH")


@pytest.mark.parametrize(
    ("name", "content", "versions", "message"),
    [
        ("no.so", None, HOPPER, "PATH: there is no such file or folder"),
        ("", None, HOPPER, "PATH: contains no _vllm_fa3_C*.so nor _vllm_fa2_C*.so"),
        ("flash.so", "", AMPERE, "PATH: is not named _vllm_fa2_C*.so"),
        (NAMES[3], {"version": 3}, AMPERE, "PATH: is not named _vllm_fa2_C*.so"),
        (NAMES[3], "not json", HOPPER, "PATH cannot be loaded: PATH: invalid ELF header"),
        (
            NAMES[3],
            {"version": 0},
            HOPPER,
            "PATH cannot be loaded: it registers no operation _vllm_fa3_C::fwd",
        ),
        (NAMES[3] + ".xz", "\xfd7zXZ" + "\0" * 99, HOPPER, "PATH cannot be loaded: it cannot be unpacked: "),
        (NAMES[3] + ".zst", "\xfd7zXZ" + "\0" * 99, HOPPER, "PATH cannot be loaded: it cannot be unpacked: "),
        (
            NAMES[3],
            {"version": 3, "wants": ", Tensor? fine, int strange"},
            HOPPER,
            "_vllm_fa3_C.fwd.default needs strange, which batchgen does not know",
        ),
    ],
)
def test_reasons(
    fake: Fakes,
    name: str,
    content: str | dict[str, Any] | None,
    versions: tuple[int, ...],
    message: str,
    tmp_path: Path,
) -> None:
    if isinstance(content, dict):
        fake.write(tmp_path / name, **content)
    elif content is not None:
        (tmp_path / name).write_text(content, "latin-1")
    given = reason(tmp_path / name, versions)
    assert given.endswith(message) or (name.endswith(("xz", "zst")) and given.startswith(message))


def test_the_next_version_and_the_next_source_are_tried(fake: Fakes, site: Path, tmp_path: Path) -> None:
    folder = install(site, "vllm")
    fake.write(folder / NAMES[3], 3, fault="base 2")
    (folder / NAMES[2]).write_text("not json")
    given = fake.write(tmp_path / NAMES[2], 2)
    assert str(find_flash(HOPPER, str(given), accept)) == f"flash-attn 2 of {given}"


def test_capabilities() -> None:
    assert versions_for((9, 0)) == (3, 2)
    assert [versions_for(c) for c in ((8, 0), (8, 9), (10, 0), (12, 0))] == [(2,)] * 4
    with pytest.raises(FlashUnavailable, match=r"8\.0 or more, and this one has 7\.5"):
        versions_for((7, 5))


# The self-test


@pytest.mark.parametrize(
    ("version", "old", "dtype"),
    [(2, False, torch.float16), (2, True, torch.bfloat16), (3, False, torch.bfloat16), (3, True, torch.float16)],
)
def test_a_correct_library_passes(fake: Fakes, version: int, old: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    path = fake.write(tmp_path / NAMES[version], version, old=old)
    library = find_flash((version,), str(path), take)
    for layer, heads in ((LayerKV(3, 16, 16), 9), (LayerKV(1, 64, 64), 4), (LayerKV(2, 128, 128), 2)):
        assert check_library(library, layer, heads, dtype, 16, CPU) is library
    assert (fake.schedules > 0) == (version == 3)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("base 2", r"the log-sum-exp of prefill is off by [\d.]+, [\d.]+ is allowed"),
        ("transposed", r"prefill gives shapes \[59, 9, 16\] and \[59, 9\]"),
        ("nan", "the result of decode is off by inf"),
        ("window", "the result of prefill with a window is off by"),
        ("split", "the log-sum-exp of decode of few long rows is off by"),
        ("raises", "stopped: CUDA error: no kernel image is available for execution on the device; "),
    ],
)
def test_faults_are_found(fake: Fakes, version: int, fault: str, message: str, tmp_path: Path) -> None:
    path = fake.write(tmp_path / NAMES[version], version, fault=fault)
    with pytest.raises(FlashUnavailable, match=message):
        find_flash((version,), str(path), accept)


@pytest.mark.parametrize("fault", ["schedule", "used up"])  # the layers of a step share one schedule
def test_scheduling_that_fails_is_disabled(fake: Fakes, fault: str, tmp_path: Path) -> None:
    library = find_flash(HOPPER, str(fake.write(tmp_path / NAMES[3], 3, fault=fault)), accept)
    fake.forwards.clear()
    accept(library)
    assert fake.forwards
    assert all(call["scheduler_metadata"] is None for call in fake.forwards)


# Supported models


@pytest.mark.parametrize(
    ("version", "layer", "heads", "dtype", "page_size", "message"),
    [
        (3, LayerKV(2, 64, 64), 4, torch.float32, 16, "supports bfloat16 and float16, not float32 .see --dtype"),
        (2, LayerKV(2, 64, 64), 4, torch.float16, 8, "a multiple of 16, not 8 .see --page-size"),
        (2, LayerKV(2, 36, 36), 4, torch.float16, 16, "a multiple of 8, and this model's is 36"),
        (3, LayerKV(2, 512, 512), 4, torch.float16, 16, "up to 256, and this model's is 512"),
        (2, LayerKV(2, 192, 128), 4, torch.float16, 16, "does not support keys of size 192 with values of size 128"),
        (3, LayerKV(2, 96, 64), 4, torch.float16, 16, "does not support keys of size 96 with values of size 64"),
        (3, LayerKV(3, 64, 64), 4, torch.float16, 16, "a multiple of the kv heads, not 4 and 3"),
        (3, LayerKV(1, 64, 48, latent=True), 4, torch.float16, 16, "values that are part of the keys"),
    ],
)
def test_unsupported_models(
    version: int, layer: LayerKV, heads: int, dtype: torch.dtype, page_size: int, message: str
) -> None:
    refusal = flash_refusal(version, [LayerKV(1, 64, 64), layer], heads, dtype, page_size)
    assert refusal is not None
    assert re.search(message, refusal)


def test_supported_models() -> None:
    layers = [LayerKV(2, 64, 64), LayerKV(4, 256, 256), LayerKV(1, 192, 128), LayerKV(1, 64, 512)]
    assert flash_refusal(3, layers, 8, torch.bfloat16, 7) is None
    assert flash_refusal(2, layers[:2], 8, torch.float16, 32) is None
