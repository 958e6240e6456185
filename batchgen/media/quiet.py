"""`quiet_libraries`: keeps decoders that are written in C from printing about damaged files.

The MP3 decoder inside libsndfile prints its warnings to C's `stderr`, and libsndfile offers no switch for them. While a
sound is decoded, that variable names a stream to nowhere. `sys.stderr` and the file descriptor stay as they are.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock

_lock = Lock()
_depth = 0
_original: int | None = None


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """While any thread is inside, what C code prints to `stderr` goes nowhere, where the system lets it be replaced."""
    global _depth, _original
    found = _streams()
    if found is None:
        yield
        return
    variable, nowhere = found
    with _lock:
        if not _depth:
            _original, variable.value = variable.value, nowhere
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if not _depth:
                variable.value = _original


@cache
def _streams() -> tuple[ctypes.c_void_p, int] | None:
    """The variable `stderr` of the C library and a stream to nowhere; None where the variable is a constant."""
    is_glibc = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
    if not is_glibc and sys.platform != "darwin":
        return None
    library = ctypes.CDLL(None)
    library.fopen.restype = ctypes.c_void_p
    nowhere = library.fopen(os.devnull.encode(), b"w")
    name = "stderr" if is_glibc else "__stderrp"
    return None if nowhere is None else (ctypes.c_void_p.in_dll(library, name), nowhere)
