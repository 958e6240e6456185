"""Building the compiled library: its name, its cache folder, and errors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from batchgen.kernels.cpu import build
from batchgen.kernels.cpu.build import CompilerMissing, built_library, cache_folder, find_compiler
from batchgen.kernels.cpu.library import COMPILING, loaded, missing

here = pytest.mark.skipif(not loaded(), reason=missing() or "")

USE_SOURCES = "from pathlib import Path; from batchgen.kernels.cpu import build; build._SOURCES = Path({!r}); "
"""Code that makes a process build the sources of another folder."""
PRINT_LOADED = "import torch; from batchgen.kernels.cpu.library import loaded; print(loaded(), loaded())"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and nothing in the temporary folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))
    return tmp_path / "cache" / "batchgen" / "kernels"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One small source file instead of the kernels."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "one.cpp").write_text('#include "two.h"\nextern "C" int one() { return TWO - 1; }\n')
    (folder / "two.h").write_text("#define TWO 2\n")
    monkeypatch.setattr(build, "_SOURCES", folder)
    return folder


def compiler_script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def run(environment: dict[str, str], code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )


@here
def test_the_library_is_built_once(cache: Path, sources: Path) -> None:
    built: list[str] = []
    library = built_library(lambda: nullcontext(built.append("built")))
    assert library.parent == cache == cache_folder()
    assert library == built_library(lambda: nullcontext(built.append("again")))
    assert built == ["built"]
    assert [p.name for p in cache.iterdir()] == [library.name]  # no temporary files remain


@here
def test_the_name_depends_on_sources_flags_compiler_and_processor(
    cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [built_library().name]
    (sources / "two.h").write_text("#define TWO 3\n")
    names.append(built_library().name)
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-DOTHER"))
    names.append(built_library().name)
    monkeypatch.setattr(build, "_processor", lambda: "another")
    names.append(built_library().name)
    monkeypatch.setenv("CXX", f"{find_compiler()[0]} -DWITH_WORDS")
    names.append(built_library().name)
    assert len(set(names)) == 5


@here
def test_old_libraries_are_removed(cache: Path, sources: Path) -> None:
    cache.mkdir(parents=True, mode=0o700)
    for age in range(12):
        old = cache / f"batchgen-{age}.so"
        old.touch()
        os.utime(old, (1e9 - age, 1e9 - age))
        (cache / f"batchgen-{age}-speed.json").touch()
    (cache / "notes.txt").touch()
    library = built_library()
    kept = {library.name, *(f"batchgen-{age}{end}" for age in range(7) for end in (".so", "-speed.json")), "notes.txt"}
    assert {p.name for p in cache.iterdir()} == kept


@here
def test_a_clock_that_was_set_back_does_not_cost_the_new_library(cache: Path, sources: Path) -> None:
    cache.mkdir(parents=True, mode=0o700)
    for age in range(12):
        later = cache / f"batchgen-{age}.so"
        later.touch()
        os.utime(later, (4e9 + age, 4e9 + age))
    assert built_library().is_file()


@here
def test_the_temporary_folder_replaces_a_cache_that_cannot_be_written(
    cache: Path, sources: Path, tmp_path: Path
) -> None:
    cache.parent.parent.mkdir()
    cache.parent.write_text("no folder")
    library = built_library()
    assert library.parent == tmp_path / "temporary" / f"batchgen-kernels-{os.getuid()}"
    assert built_library(lambda: pytest.fail("built again")) == library
    shutil.rmtree(tmp_path / "temporary")
    (tmp_path / "temporary").write_text("none either")
    with pytest.raises(CompilerMissing, match="XDG_CACHE_HOME"):
        built_library()


@here
def test_folders_that_others_can_write_to_are_not_used(
    cache: Path, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise another user could put code there just before it is loaded."""
    name = built_library().name
    cache.chmod(0o770)
    folder = tmp_path / "temporary" / f"batchgen-kernels-{os.getuid()}"
    assert built_library() == folder / name
    folder.symlink_to(folder.rename(tmp_path / "elsewhere"))
    with pytest.raises(CompilerMissing, match="no folder"):
        built_library()
    cache.chmod(0o700)
    assert built_library(lambda: pytest.fail("built again")) == cache / name
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # the folders are another user's
    with pytest.raises(CompilerMissing, match="no folder"):
        built_library()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo 'one.cpp:1: error: no AVX today' >&2; exit 1", "one.cpp:1: error: no AVX today"),
        ("exit 1", "it printed no message"),
        ("echo odd >&2; exit 3", "odd"),
    ],
)
def test_a_compiler_that_fails(
    cache: Path, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, reason: str
) -> None:
    monkeypatch.setenv("CXX", compiler_script(tmp_path / "cc", body))
    with pytest.raises(CompilerMissing, match=f"failed: {reason}"):
        built_library()
    assert list(cache.iterdir()) == []


def test_a_compiler_that_cannot_run_or_never_ends(
    cache: Path, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_SECONDS", 0.2)
    monkeypatch.setenv("CXX", compiler_script(tmp_path / "slow", "exec sleep 60"))
    with pytest.raises(CompilerMissing, match=r"did not finish within 0\.2 s"):
        built_library()
    (tmp_path / "text").write_bytes(b"\x7fELF no program")
    (tmp_path / "text").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "text"))
    with pytest.raises(CompilerMissing, match="cannot be run"):
        built_library()
    monkeypatch.setenv("CXX", "/nonexistent/c++ -O3")
    with pytest.raises(CompilerMissing, match="CXX names /nonexistent/c"):
        built_library()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(CompilerMissing, match="no C\\+\\+ compiler was found"):
        built_library()


def test_a_process_without_a_compiler_reports_it_once(tmp_path: Path) -> None:
    done = run({"CXX": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path)}, PRINT_LOADED)
    assert done.stdout == "False False\n"
    assert done.stderr == (
        "CPU kernels were not compiled, PyTorch's are used instead: CXX names /nonexistent, but there is no such "
        "program; install it or unset CXX\n"
    )


@here
def test_a_damaged_library_is_built_again(cache: Path, sources: Path) -> None:
    """Also if two processes find it damaged at the same time."""
    built = built_library()
    built.write_bytes(built.read_bytes()[:100])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", USE_SOURCES.format(str(sources)) + PRINT_LOADED],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate() for process in processes]
    assert [out for out, _ in outputs] == [b"True True\n"] * 2
    assert any(err == f"{COMPILING}\n".encode() for _, err in outputs)
    assert [p.name for p in built.parent.iterdir()] == [built.name]
    assert built.stat().st_size > 100


NOEXEC = """
import ctypes, torch
def refuse(path):
    raise OSError(f"{path}: failed to map segment from shared object")
ctypes.CDLL = refuse
"""


@here
@pytest.mark.parametrize(
    ("body", "before", "reason"),
    [
        ('extern "C" int nowhere(); extern "C" int one() { return nowhere(); }', "", "undefined symbol: nowhere"),
        pytest.param('extern "C" int one() { return 1; }', NOEXEC, "failed to map segment", marks=pytest.mark.slow),
    ],
    ids=["undefined symbol", "noexec"],
)
def test_a_library_that_another_build_would_not_mend_is_not_built_again(
    tmp_path: Path, body: str, before: str, reason: str
) -> None:
    code = "from batchgen.kernels.cpu.library import missing; print(missing())"
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "one.cpp").write_text(body + "\n")
    done = run({"XDG_CACHE_HOME": str(tmp_path / "cache")}, before + USE_SOURCES.format(str(sources)) + code)
    assert reason in done.stdout
    assert len(done.stderr.splitlines()) == 2
