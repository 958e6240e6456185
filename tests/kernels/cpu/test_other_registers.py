"""The kernels built for other processors compute right: for narrower registers, and with emulated instructions where
the processor has no wider ones (`wide/` emulates AVX-512 on AVX2, `dots/` AVX-VNNI)."""

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
    "test_ops.py",
    "attention/test_attention.py::test_any_step",
    "attention/test_attention.py::test_head_sizes",
    "cpu/test_attention_bfp.py::test_any_step",
    "cpu/test_products.py::test_random_products",
    "cpu/test_sampling.py::test_every_kind_of_row_equals_the_reference",
)
COMPILED = "(not test_operation or compiled-2) and not triton"
"""Those of these tests that run compiled kernels."""
WIDE = (f"-I{HERE / 'wide'}", "-D__AVX512F__=1", "-D__AVX512DQ__=1", "-D__AVX512BF16__=1", "-D__AVX512VNNI__=1")
DOTS = f"-I{HERE / 'dots'}"


def has(extension: str) -> bool:
    """Whether this processor has an extension."""
    about = Path("/proc/cpuinfo")
    return about.is_file() and extension in about.read_text(encoding="utf-8").split()


def run_tests(folder: Path, *flags: str, methods: list[str]) -> None:
    """Run tests of the kernels on a library built with `flags`, whose bfloat16 products have `methods`."""
    compiler = folder / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {shlex.join(find_compiler())} "$@" {shlex.join(flags)} -O1\n')
    compiler.chmod(0o755)
    own = {"CXX": str(compiler), "XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(HERE.parents[2])}

    def python(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], env={**os.environ, **own}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    asked = "import torch; from batchgen.kernels.cpu.matmul import methods; print(*methods(torch.bfloat16))"
    assert python("-c", asked).split() == methods
    tests = [str(HERE.parent / name) for name in TESTS]
    assert "passed" in python("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", COMPILED, *tests)


pytestmark = pytest.mark.skipif(not loaded(), reason=str(missing()))


@pytest.mark.slow
@pytest.mark.parametrize("extension", ["avx512f", "avx"])
def test_without_an_extension(extension: str, tmp_path: Path) -> None:
    if not has(extension):
        pytest.skip(f"this processor has no {extension} to disable")
    run_tests(tmp_path, f"-mno-{extension}", methods=["widened", "bfp"] if extension == "avx512f" else ["widened"])


@pytest.mark.skipif(has("avx512f") or not (has("avx2") and has("fma")), reason="for a processor with AVX2 at most")
def test_with_emulated_avx512(tmp_path: Path) -> None:
    about = subprocess.run([*find_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    if "clang" in about:
        pytest.skip("for GCC, which splits vectors that are wider than registers")
    run_tests(tmp_path, *WIDE, methods=["widened", "dot", "int8", "bfp"])


@pytest.mark.skipif(has("avx512f") or has("avx_vnni") or not has("avx2"), reason="for a processor with AVX2 at most")
def test_with_emulated_avx_vnni(tmp_path: Path) -> None:
    run_tests(tmp_path, DOTS, methods=["widened", "bfp"])
