"""The compiled library as a Python object: functions by name, called without the interpreter's lock."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from batchgen.kernels.cpu.build import CompilerMissing, built_library

__all__ = ["DTYPES", "address", "library", "library_file", "loaded", "missing"]

DTYPES: Final[dict[torch.dtype, int]] = {torch.float32: 0, torch.bfloat16: 1}
"""What the kernels compute in, with its code in C++."""


_LASTING: Final = (
    "undefined symbol",  # another OpenMP than the compiler's
    "failed to map segment",  # a file system that is mounted to run nothing
)
"""Of a library that would not load if it were built again."""


@cache
def _library() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    try:
        return _load()
    except (CompilerMissing, OSError) as problem:
        reason = " ".join(str(problem).split())
        _tell(f"no compiled CPU kernels, PyTorch's compute: {reason}")
        return reason


def _load() -> ctypes.CDLL:
    def on_build() -> None:
        _tell("compiling CPU kernels for this processor, which is done once")

    # Torch's OpenMP runtime is in the process already, under the names that the library looks for.
    try:
        return ctypes.CDLL(str(built_library(on_build)))
    except OSError as problem:
        if any(sign in str(problem) for sign in _LASTING):
            raise
        return ctypes.CDLL(str(built_library(on_build, again=True)))  # a damaged file


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def loaded() -> bool:
    """Whether there is a library; compiles it if need be."""
    return not isinstance(_library(), str)


def missing() -> str | None:
    """Why there is no library; None where there is one."""
    found = _library()
    return found if isinstance(found, str) else None


def library() -> Any:
    """The library: `library().bg_matmul(...)`.

    Raises:
        RuntimeError: there is none, and why.
    """
    found = _library()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def library_file() -> Path:
    """The library's file.

    Raises:
        RuntimeError: there is none, and why.
    """
    return Path(library()._name)


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers begin; None (a null pointer) for None."""
    return None if tensor is None else tensor.data_ptr()
