"""The compiled kernels as other processors get them: their own tests on a library built for narrower registers, or for
wider ones than AVX2's without their instructions (`wide/` does AVX-512's by halves and by lanes)."""

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
"""Without what takes longest to compile where an instruction is many."""


def has(extension: str) -> bool:
    """Whether this processor has an extension."""
    about = Path("/proc/cpuinfo")
    return about.is_file() and extension in about.read_text(encoding="utf-8").split()


def compilers_name() -> str:
    """What the compiler says it is."""
    return subprocess.run([*find_compiler(), "--version"], capture_output=True, text=True, check=True).stdout


def run_tests(*flags: str, methods: list[str], names: tuple[str, ...] = TESTS) -> None:
    """Run the kernels' tests on a library built with `flags`, which multiplies bfloat16 by `methods`."""
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
def test_without(extension: str) -> None:
    if not has(extension):
        pytest.skip(f"this processor has no {extension} to do without")
    run_tests(f"-mno-{extension}", methods=["widened", "bfp"] if extension == "avx512f" else ["widened"])


@pytest.mark.skipif(not loaded(), reason=str(missing()))
def test_with_wider() -> None:
    if not (has("avx2") and has("fma")):
        pytest.skip("for a processor that has AVX2")
    if "clang" in compilers_name():
        pytest.skip("for GCC, which takes vectors apart that are wider than registers")
    own = ("-mno-avx512f",) if has("avx512f") else ()  # which none of it is to use
    run_tests(*own, *WIDE, *QUICK, methods=["widened", "dot", "int8", "bfp"])


@pytest.mark.skipif(not loaded(), reason=str(missing()))
def test_with_dots_of_integers() -> None:
    if has("avx512f") or has("avx_vnni") or not has("avx2"):
        pytest.skip("for a processor that has AVX2 and no more")
    run_tests(DOTS, methods=["widened", "bfp"], names=("test_bfp.py",))
