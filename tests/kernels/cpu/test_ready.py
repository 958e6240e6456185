"""The libraries that a wheel brings: which are built, which one a processor takes, and what happens without it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchgen.kernels.cpu import build
from batchgen.kernels.cpu.build import VARIANTS, CompilerMissing, build_ready, measurements, ready_library, variants
from batchgen.kernels.cpu.library import COMPILING, loaded, missing
from tests.e2e.rows import write_lines

ROOT = Path(__file__).parents[3]
here = pytest.mark.skipif(not loaded(), reason=missing() or "")

SSE = {"sse2", "ssse3", "sse4_1"}
HASWELL = SSE | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
SKYLAKE = HASWELL | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
ZEN4 = SKYLAKE | {"avx512_vnni", "avx512_bf16"}


@pytest.mark.parametrize(
    ("features", "best", "runs"),
    [
        (set(), None, None),
        (SSE, "x86-64", "x86-64"),
        (SSE | {"avx"}, None, "x86-64"),
        (HASWELL, "x86-64-v3", "x86-64-v3"),
        (HASWELL | {"avx_vnni"}, None, "x86-64-v3"),
        (SKYLAKE, "x86-64-v4", "x86-64-v4"),
        (SKYLAKE | {"avx512_vnni"}, "x86-64-v4-vnni", "x86-64-v4-vnni"),
        (ZEN4, "x86-64-v4-bf16", "x86-64-v4-bf16"),
        (ZEN4 | {"avx_vnni", "amx_tile", "avx512_fp16"}, "x86-64-v4-bf16", "x86-64-v4-bf16"),
    ],
)
def test_a_processor_takes_the_variant_that_leaves_nothing_unused(
    monkeypatch: pytest.MonkeyPatch, features: set[str], best: str | None, runs: str | None
) -> None:
    monkeypatch.setattr(build, "_features", lambda: frozenset(features))
    assert next(iter(variants()), None) == best
    assert next(iter(variants(narrower=True)), None) == runs


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one small source file and no library, on a processor with AVX2."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build, "_SOURCES", tmp_path / "src")
    monkeypatch.setattr(build, "READY", tmp_path / "ready")
    monkeypatch.setattr(build, "_features", lambda: frozenset(HASWELL))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


@here
def test_a_library_is_taken_while_the_sources_are_those_it_was_built_from(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ready_library() is None
    build_ready(["x86-64", "x86-64-v3"])
    library = ready_library()
    assert library is not None
    assert library.name.startswith("x86-64-v3-")
    assert len([*(package / "ready").iterdir()]) == 2
    monkeypatch.setenv("CXX", "c++")
    assert ready_library(narrower=True) is None, "who names a compiler wants its code"
    monkeypatch.delenv("CXX")
    (package / "src" / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    assert ready_library(narrower=True) is None
    build_ready(["x86-64"])
    assert ready_library() is None
    narrower = ready_library(narrower=True)
    assert [*(package / "ready").iterdir()] == [narrower], "those of the earlier sources are removed"


@here
def test_what_exists_is_not_compiled_again(package: Path) -> None:
    build_ready(["x86-64"])
    (file,) = (package / "ready").iterdir()
    before = file.stat().st_mtime_ns
    build_ready(["x86-64"])
    assert file.stat().st_mtime_ns == before


@here
def test_measurements_are_kept_for_each_processor_in_the_cache(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_ready(["x86-64-v3"])
    library = ready_library()
    assert library is not None
    first = measurements(library)
    assert first.parent == package / "cache" / "batchgen" / "kernels"
    monkeypatch.setattr(build, "_processor", lambda: "another")
    assert measurements(library) != first
    assert measurements(package / "batchgen-12.so") == package / "batchgen-12"


def test_without_a_compiler_nothing_is_built(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(package / "nothing"))
    with pytest.raises(CompilerMissing, match="no C\\+\\+ compiler was found"):
        build_ready(VARIANTS)


LOAD = """
import sys, torch
from pathlib import Path
from batchgen.kernels.cpu import build, library
build._SOURCES, build.READY = Path("src").absolute(), Path("ready").absolute()
build._features = lambda: build.VARIANTS["x86-64-v3"].needs | set(sys.argv[1:])
print(library.missing() or build.about(library.library_file()))
"""
NO_COMPILER = "no C++ compiler was found (c++, g++ or clang++); install one or set CXX"


@here
@pytest.mark.parametrize(
    ("brought", "features", "compiler", "found"),
    [
        ("whole", [], False, "for x86-64-v3"),
        ("whole", ["avx512f"], False, "for x86-64-v3"),
        ("whole", ["avx512f"], True, "by "),
        ("damaged", [], True, "by "),
        ("damaged", [], False, NO_COMPILER),
        ("none", [], False, NO_COMPILER),
    ],
)
def test_what_is_loaded(package: Path, brought: str, features: list[str], compiler: bool, found: str) -> None:
    build_ready(["x86-64-v3"] if brought != "none" else [])
    if brought == "damaged":
        (library,) = (package / "ready").iterdir()
        library.write_bytes(library.read_bytes()[:100])
    env = {**os.environ, "PYTHONPATH": str(ROOT)} | ({} if compiler else {"PATH": str(package)})
    words = [sys.executable, "-c", LOAD, *features]
    done = subprocess.run(words, env=env, cwd=package, capture_output=True, text=True, check=True)
    assert done.stdout.strip().startswith(found), done.stderr


def build_wheel(folder: Path, *, small: bool, **environment: str) -> zipfile.ZipFile:
    """The wheel of this project, or of a copy with one small source file in place of the kernels."""
    pytest.importorskip("hatchling")
    project = folder / "project"
    ignored = shutil.ignore_patterns("__pycache__", "ready", *(["src"] if small else []))
    shutil.copytree(ROOT / "batchgen", project / "batchgen", ignore=ignored, dirs_exist_ok=True)
    shutil.copytree(ROOT / "configs", project / "configs", ignore=ignored, dirs_exist_ok=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, project / name)
    if small:
        (project / "batchgen" / "kernels" / "cpu" / "src").mkdir(exist_ok=True)
        (project / "batchgen" / "kernels" / "cpu" / "src" / "one.cpp").write_text(
            'extern "C" int one() { return 1; }\n'
        )
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    subprocess.run(words, cwd=project, env=os.environ | environment, capture_output=True, check=True)
    (wheel,) = (folder / "dist").iterdir()
    return zipfile.ZipFile(wheel)


@here
@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="for Linux on x86-64")
def test_a_wheel_has_the_libraries_if_there_is_a_compiler(tmp_path: Path) -> None:
    for folder, compiler, tag in (
        (tmp_path / "with", {}, "py3-none-linux_x86_64"),
        (tmp_path / "without", {"CXX": "/nonexistent"}, "py3-none-any"),
    ):
        with build_wheel(folder, small=True, **compiler) as wheel:
            libraries = sorted(name for name in wheel.namelist() if name.endswith(".so"))
        assert (wheel.filename or "").endswith(f"-{tag}.whl")
        names = sorted(name.rpartition("/")[2].rpartition("-")[0] for name in libraries)
        assert names == ([] if compiler else sorted(VARIANTS))


@here
@pytest.mark.slow
def test_the_first_run_of_an_installed_wheel_compiles_nothing(tmp_path: Path) -> None:
    with build_wheel(tmp_path, small=False) as wheel:
        wheel.extractall(tmp_path / "installed")
    row = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0, "max_new_tokens": 12}
    write_lines(tmp_path / "in.jsonl", [row])
    texts, kernels = [], []
    for place, path in ((tmp_path / "installed", str(tmp_path)), (ROOT, os.environ["PATH"])):
        env = {**os.environ, "PYTHONPATH": str(place), "PATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        words = [sys.executable, "-m", "batchgen", "run", "in.jsonl", "--device", "cpu", "--overwrite"]
        done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert place == ROOT or COMPILING not in done.stderr
        table = pq.read_table(tmp_path / "in.out.parquet")
        texts.append(table["text"].to_pylist())
        kernels.append(json.loads(table.schema.metadata[b"batchgen.run"])["kernels"])
    assert kernels[0].startswith("compiled for ")
    assert texts[0] == texts[1]
