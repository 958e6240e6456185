"""The kernels' tests on libraries built for other processors: for narrower registers, and with emulated instructions
(`wide/` emulates AVX-512 on AVX2, `dots/` AVX-VNNI)."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.kernels.cpu.build import find_compiler
from batchgen.kernels.cpu.library import loaded, missing

HERE = Path(__file__).parent
TESTS = (
    "test_attention.py",
    "test_bfp.py",
    "test_elementwise.py",
    "test_int8.py",
    "test_lora.py",
    "test_matmul.py",
    "test_sampling.py",
)
WIDE = (f"-I{HERE / 'wide'}", "-D__AVX512F__=1", "-D__AVX512DQ__=1", "-D__AVX512BF16__=1", "-D__AVX512VNNI__=1")
DOTS = f"-I{HERE / 'dots'}"
QUICK = ("-fno-tree-pre", "-fno-gcse", "-fno-thread-jumps")
"""Disables the passes that take longest to compile emulated instructions."""


def has(extension: str) -> bool:
    """Whether this processor has an extension."""
    about = Path("/proc/cpuinfo")
    return about.is_file() and extension in about.read_text(encoding="utf-8").split()


def compiler_version() -> str:
    """Output of the compiler's `--version`."""
    return subprocess.run([*find_compiler(), "--version"], capture_output=True, text=True, check=True).stdout


def run_tests(*flags: str, methods: list[str], names: tuple[str, ...] = TESTS) -> None:
    """Run the kernels' tests on a library built with `flags`, whose bfloat16 products have `methods`."""
    command = shlex.join([*find_compiler(), *flags])

    def python(*words: str) -> str:
        environment = {**os.environ, "CXX": command, "PYTHONPATH": str(HERE.parents[2])}
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    asked = "import torch; from batchgen.kernels.cpu.matmul import methods; print(*methods(torch.bfloat16))"
    assert python("-c", asked).split() == methods
    tests = [str(HERE / name) for name in names]
    assert "passed" in python("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests)


@pytest.mark.skipif(not loaded(), reason=str(missing()))
@pytest.mark.parametrize("extension", ["avx512f", "avx"])
def test_without_an_extension(extension: str) -> None:
    if not has(extension):
        pytest.skip(f"this processor has no {extension} to disable")
    run_tests(f"-mno-{extension}", methods=["widened", "bfp"] if extension == "avx512f" else ["widened"])


@pytest.mark.skipif(not loaded(), reason=str(missing()))
def test_with_emulated_avx512() -> None:
    if not (has("avx2") and has("fma")):
        pytest.skip("for a processor that has AVX2")
    if "clang" in compiler_version():
        pytest.skip("for GCC, which splits vectors that are wider than registers")
    own = ("-mno-avx512f",) if has("avx512f") else ()  # so that only emulated instructions are used
    run_tests(*own, *WIDE, *QUICK, methods=["widened", "dot", "int8", "bfp"])


@pytest.mark.skipif(not loaded(), reason=str(missing()))
def test_with_emulated_avx_vnni() -> None:
    if has("avx512f") or has("avx_vnni") or not has("avx2"):
        pytest.skip("for a processor that has AVX2 and no more")
    run_tests(DOTS, methods=["widened", "bfp"], names=("test_bfp.py",))
