"""The compiled library as a `ctypes` object, loaded once per process. Its functions run without the GIL."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from batchgen.kernels.cpu.build import CompilerMissing, built_library

DTYPES: Final[dict[torch.dtype, int]] = {torch.float32: 0, torch.bfloat16: 1}
"""Supported dtypes and their codes in C++."""

_PERMANENT: Final = (
    "undefined symbol",  # torch has loaded another OpenMP than the compiler's
    "failed to map segment",  # the file system is mounted with noexec
)
"""Loader errors that a rebuild would not fix."""


@cache
def _library() -> ctypes.CDLL | str:
    """The library, or the reason why it is missing."""
    try:
        return _load()
    except (CompilerMissing, OSError) as problem:
        reason = " ".join(str(problem).split())
        _report(f"CPU kernels were not compiled, PyTorch's are used instead: {reason}")
        return reason


def _load() -> ctypes.CDLL:
    def on_build() -> None:
        _report("compiling CPU kernels for this processor (once)")

    # torch has loaded its OpenMP runtime, which provides the symbols that the library needs.
    try:
        return ctypes.CDLL(str(built_library(on_build)))
    except OSError as problem:
        if any(sign in str(problem) for sign in _PERMANENT):
            raise
        return ctypes.CDLL(str(built_library(on_build, again=True)))  # a damaged file


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def loaded() -> bool:
    """Whether the library could be loaded. Compiles it if necessary."""
    return not isinstance(_library(), str)


def missing() -> str | None:
    """The reason why there is no library; None if it is loaded."""
    found = _library()
    return found if isinstance(found, str) else None


def library() -> Any:
    """The library, used as `library().bg_matmul(...)`.

    Raises:
        RuntimeError: there is no library; the message gives the reason.
    """
    found = _library()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def library_file() -> Path:
    """Path of the library's file.

    Raises:
        RuntimeError: there is no library; the message gives the reason.
    """
    return Path(library()._name)


def address(tensor: Tensor | None) -> int | None:
    """Address of a tensor's data; None (a null pointer) for None."""
    return None if tensor is None else tensor.data_ptr()
