"""A process and its environment: its processors, and settings that libraries read at import (OpenMP, Arrow)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final


def processors() -> int:
    """Number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processors_by_core() -> list[int]:
    """The processors that this process may run on; those of one core are neighbours."""

    def core(processor: int) -> tuple[int, int, int]:
        folder = Path(f"/sys/devices/system/cpu/cpu{processor}/topology")
        try:
            package, number = (int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
        except (OSError, ValueError):
            return 0, processor, processor
        return package, number, processor

    return sorted(os.sched_getaffinity(0), key=core)


_SPIN_COUNT: Final = "GOMP_SPINCOUNT"
_SHORT_SPIN: Final = "5000"
"""Iterations of the spin loop, a fraction of a millisecond; GNU's default is 300,000."""


@contextmanager
def short_openmp_spins() -> Iterator[None]:
    """Context in which to import torch, so that idle threads of GNU OpenMP sleep after a short spin.

    By default they spin much longer, which takes processor time from other threads on a busy machine.

    OpenMP reads the setting when it is loaded: if torch is already imported, nothing changes. `OMP_WAIT_POLICY` or
    `GOMP_SPINCOUNT` set by the user take precedence. Child processes do not inherit the setting.
    """
    if _SPIN_COUNT in os.environ or "OMP_WAIT_POLICY" in os.environ:
        yield
        return
    os.environ[_SPIN_COUNT] = _SHORT_SPIN
    try:
        yield
    finally:
        del os.environ[_SPIN_COUNT]


_POOL: Final = "ARROW_DEFAULT_MEMORY_POOL"


@contextmanager
def arrow_system_memory() -> Iterator[None]:
    """Context in which to import pyarrow, so that it allocates buffers with the C library instead of mimalloc.

    mimalloc requests huge pages, which the kernel must zero and which increase memory use for a table's many columns.

    Arrow reads the setting when it is loaded: if pyarrow is already imported, nothing changes. A pool set by the user
    takes precedence. Child processes do not inherit the setting.
    """
    if _POOL in os.environ:
        yield
        return
    os.environ[_POOL] = "system"
    try:
        yield
    finally:
        del os.environ[_POOL]
