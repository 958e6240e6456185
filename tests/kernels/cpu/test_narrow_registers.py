"""The compiled kernels as processors with narrower registers get them: their own tests on a library built for those."""

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
TESTS = ("test_attention.py", "test_elementwise.py", "test_lora.py", "test_matmul.py", "test_sampling.py")


def has(extension: str) -> bool:
    """Whether this processor has an extension, and kernels built without it differ."""
    about = Path("/proc/cpuinfo")
    return about.is_file() and extension in about.read_text(encoding="utf-8").split()


@pytest.mark.skipif(not loaded(), reason=str(missing()))
@pytest.mark.parametrize("extension", ["avx512f", "avx"])
def test_without(extension: str) -> None:
    if not has(extension):
        pytest.skip(f"this processor has no {extension} to do without")
    environment = {**os.environ, "CXX": shlex.join([*find_compiler(), f"-mno-{extension}"])}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *(str(HERE / name) for name in TESTS),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout
