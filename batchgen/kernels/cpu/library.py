"""The compiled library as a `ctypes` object, the package's or one compiled here, loaded once per process.

Its functions run without the GIL.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from batchgen.kernels.cpu.build import CompilerMissing, built_library, ready_library

DTYPES: Final[dict[torch.dtype, int]] = {torch.float32: 0, torch.bfloat16: 1}
"""Supported dtypes and their codes in C++."""

COMPILING: Final = "compiling CPU kernels for this processor, once; this takes about a minute on two cores"
"""What to tell the user when the compiler runs."""

_PERMANENT: Final = (
    "undefined symbol",  # torch has loaded another OpenMP than the compiler's
    "failed to map segment",  # the file system is mounted with noexec
)
"""Loader errors that a rebuild would not fix."""

_found: ctypes.CDLL | str | None = None


def load_library(building: Callable[[], AbstractContextManager[None]] | None = None) -> ctypes.CDLL | str:
    """Load the library once per process: the library, or the reason why it is missing.

    Args:
        building: gives the context in which the compiler runs, if it has to; by default one line on stderr.
    """
    global _found
    if _found is None:
        try:
            _found = _load(building or _announced)
        except (CompilerMissing, OSError) as problem:
            _found = " ".join(str(problem).split())
            _report(f"CPU kernels were not compiled, PyTorch's are used instead: {_found}")
    return _found


@contextmanager
def _announced() -> Iterator[None]:
    _report(COMPILING)
    yield


def _load(building: Callable[[], AbstractContextManager[None]]) -> ctypes.CDLL:
    # torch has loaded its OpenMP runtime, which provides the symbols that the library needs.
    if (ready := ready_library()) is not None:
        with suppress(OSError):  # the C library may be older than that of the wheel's builder
            return ctypes.CDLL(str(ready))
    try:
        return ctypes.CDLL(str(built_library(building)))
    except CompilerMissing:
        narrower = ready_library(narrower=True)
        if narrower in (None, ready):
            raise
        return ctypes.CDLL(str(narrower))
    except OSError as problem:
        if any(sign in str(problem) for sign in _PERMANENT):
            raise
        return ctypes.CDLL(str(built_library(building, again=True)))  # a damaged file


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def loaded() -> bool:
    """Whether the library could be loaded. Compiles it if necessary."""
    return not isinstance(load_library(), str)


def missing() -> str | None:
    """The reason why there is no library; None if it is loaded."""
    compiled = load_library()
    return compiled if isinstance(compiled, str) else None


@cache
def library() -> Any:
    """The library, used as `library().bg_matmul(...)`.

    Raises:
        RuntimeError: there is no library; the message gives the reason.
    """
    compiled = load_library()
    if isinstance(compiled, str):
        raise RuntimeError(compiled)
    return compiled


def library_file() -> Path:
    """Path of the library's file.

    Raises:
        RuntimeError: there is no library; the message gives the reason.
    """
    return Path(library()._name)


def address(tensor: Tensor | None) -> int | None:
    """Address of a tensor's data; None (a null pointer) for None."""
    return None if tensor is None else tensor.data_ptr()
