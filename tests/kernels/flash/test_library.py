from __future__ import annotations

import lzma
import re
import sys
from collections.abc import Iterator
from pathlib import Path

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


def test_installed_vllm_comes_first_and_is_not_imported(fake: Fakes, site: Path, tmp_path: Path) -> None:
    fake.write(install(site, "vllm", "0.21.0") / NAMES[3], 3)
    fake.write(install(site, "vllm_flash_attn") / NAMES[3], 3)
    given = fake.write(tmp_path / NAMES[3], 3)
    library = find_flash(HOPPER, str(given), take)
    assert str(library) == "flash-attn 3 of vLLM 0.21.0"
    assert fake.loaded == [site / "vllm/vllm_flash_attn" / NAMES[3]]
    assert "vllm" not in sys.modules


def test_a_given_path_precedes_the_separate_package(fake: Fakes, site: Path, tmp_path: Path) -> None:
    fake.write(install(site, "vllm_flash_attn") / NAMES[2], 2)
    given = fake.write(tmp_path / NAMES[2], 2)
    assert find_flash(AMPERE, str(given), take).source == str(given)


def test_the_separate_package_is_last(fake: Fakes, site: Path) -> None:
    fake.write(install(site, "vllm_flash_attn", "2.7.0") / NAMES[2], 2)
    assert str(find_flash(AMPERE, None, take)) == "flash-attn 2 of vllm_flash_attn 2.7.0"


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


def test_registered_operations_are_not_loaded_again(fake: Fakes, tmp_path: Path) -> None:
    given = fake.write(tmp_path / NAMES[3], 3)
    find_flash(HOPPER, str(given), take)
    find_flash(HOPPER, str(given), take)
    assert len(fake.loaded) == 1


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


def test_a_missing_path(tmp_path: Path) -> None:
    assert reason(tmp_path / "no.so") == "PATH: there is no such file or folder"


def test_a_folder_without_libraries(tmp_path: Path) -> None:
    assert reason(tmp_path) == "PATH: contains no _vllm_fa3_C*.so nor _vllm_fa2_C*.so"


def test_a_file_of_another_name(tmp_path: Path) -> None:
    (tmp_path / "flash.so").touch()
    assert reason(tmp_path / "flash.so", AMPERE) == "PATH: is not named _vllm_fa2_C*.so"


def test_a_library_for_another_chip(fake: Fakes, tmp_path: Path) -> None:
    assert reason(fake.write(tmp_path / NAMES[3], 3), AMPERE) == "PATH: is not named _vllm_fa2_C*.so"


def test_a_library_that_does_not_load(fake: Fakes, tmp_path: Path) -> None:
    (tmp_path / NAMES[3]).write_text("not json")
    assert reason(tmp_path / NAMES[3]) == "PATH cannot be loaded: PATH: invalid ELF header"


def test_a_library_without_the_operation(fake: Fakes, tmp_path: Path) -> None:
    path = fake.write(tmp_path / NAMES[3], 0)
    assert reason(path) == "PATH cannot be loaded: it registers no operation _vllm_fa3_C::fwd"


@pytest.mark.parametrize("suffix", [".xz", ".zst"])
def test_a_compressed_library_that_is_broken(fake: Fakes, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / (NAMES[3] + suffix)
    path.write_bytes(b"\xfd7zXZ" + bytes(99))
    assert reason(path).startswith("PATH cannot be loaded: it cannot be unpacked: ")


def test_an_operation_with_unknown_arguments(fake: Fakes, tmp_path: Path) -> None:
    path = fake.write(tmp_path / NAMES[3], 3, wants=", Tensor? fine, int strange")
    assert reason(path).endswith("_vllm_fa3_C.fwd.default needs strange, which batchgen does not know")


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("version", [2, 3])
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


def test_failing_scheduling_is_disabled(fake: Fakes, tmp_path: Path) -> None:
    path = fake.write(tmp_path / NAMES[3], 3, fault="schedule")
    library = find_flash(HOPPER, str(path), accept)
    assert library._schedule is None
    assert all(call["scheduler_metadata"] is None for call in fake.forwards)


def test_scheduling_that_works_once_only_is_disabled(fake: Fakes, tmp_path: Path) -> None:
    path = fake.write(tmp_path / NAMES[3], 3, fault="used up")  # the layers of a step share one schedule
    assert find_flash(HOPPER, str(path), accept)._schedule is None


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
