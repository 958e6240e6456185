"""Where pyarrow takes its memory from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["system_memory"]

_POOL: Final = "ARROW_DEFAULT_MEMORY_POOL"


@contextmanager
def system_memory() -> Iterator[None]:
    """Import pyarrow within, so that its buffers come from the C library rather than from an allocator of its own.

    That one (mimalloc) asks for huge pages, of which each of a table's columns soon has its own: the kernel fills them
    with zeros for longer than a small job's results take to be gathered, and large ones hold more memory for it.

    The library reads its setting once, when it is loaded: where it is imported already nothing changes. A choice of the
    user's own stands. Processes that are started later are told nothing.
    """
    if _POOL in os.environ:
        yield
        return
    os.environ[_POOL] = "system"
    try:
        yield
    finally:
        del os.environ[_POOL]
