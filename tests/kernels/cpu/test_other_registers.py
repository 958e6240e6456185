"""The kernels built for other processors compute right: those of a wheel, and with emulated instructions where the
processor has no wider ones (`wide/` emulates AVX-512 on AVX2, `dots/` AVX-VNNI)."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.kernels.cpu import build
from batchgen.kernels.cpu.build import build_ready, find_compiler, variants
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


def compiled_with(folder: Path, *flags: str) -> dict[str, str]:
    """Environment of processes whose library is built with further flags."""
    compiler = folder / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {shlex.join(find_compiler())} "$@" {shlex.join(flags)} -O1\n')
    compiler.chmod(0o755)
    return {"CXX": str(compiler), "XDG_CACHE_HOME": str(folder)}


def run_tests(environment: dict[str, str], methods: list[str], before: str = "") -> None:
    """Run tests of the kernels on a library whose bfloat16 products have `methods`, after the code `before`."""
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[2]), **environment}

    def python(code: str, *words: str) -> str:
        command = [sys.executable, "-c", before + code, *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    asked = "import torch; from batchgen.kernels.cpu.matmul import methods; print(*methods(torch.bfloat16))"
    assert python(asked).split() == methods
    tests = [str(HERE.parent / name) for name in TESTS]
    pytest_words = ("-q", "-x", "-p", "no:cacheprovider", "-k", COMPILED, *tests)
    assert "passed" in python("import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))", *pytest_words)


pytestmark = pytest.mark.skipif(not loaded(), reason=str(missing()))


USE_VARIANT = """
from pathlib import Path
from batchgen.kernels.cpu import build
build.READY, build.variants = Path({!r}), lambda narrower=False: [{!r}]
from batchgen.kernels.cpu.library import library_file, loaded
import torch
assert loaded() and library_file().parent == build.READY
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "methods"),
    [
        ("x86-64", ["widened"]),
        ("x86-64-v3", ["widened", "bfp"]),
        ("x86-64-v4", ["widened"]),
        ("x86-64-v4-vnni", ["widened", "int8", "bfp"]),
        ("x86-64-v4-bf16", ["widened", "dot", "int8", "bfp"]),
    ],
)
def test_the_variants_of_a_wheel(
    variant: str, methods: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variant not in variants(narrower=True):
        pytest.skip("this processor lacks its instructions")
    monkeypatch.setattr(build, "READY", tmp_path)
    build_ready([variant])
    run_tests({"CXX": ""}, methods, USE_VARIANT.format(str(tmp_path), variant))


@pytest.mark.skipif(has("avx512f") or not (has("avx2") and has("fma")), reason="for a processor with AVX2 at most")
def test_with_emulated_avx512(tmp_path: Path) -> None:
    about = subprocess.run([*find_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    if "clang" in about:
        pytest.skip("for GCC, which splits vectors that are wider than registers")
    run_tests(compiled_with(tmp_path, *WIDE), ["widened", "dot", "int8", "bfp"])


@pytest.mark.skipif(has("avx512f") or has("avx_vnni") or not has("avx2"), reason="for a processor with AVX2 at most")
def test_with_emulated_avx_vnni(tmp_path: Path) -> None:
    run_tests(compiled_with(tmp_path, DOTS), ["widened", "bfp"])
