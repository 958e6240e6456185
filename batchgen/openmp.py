"""How long threads that compute on a CPU wait for each other before they give the processor away."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["brief_waits"]

_SPINS: Final = "GOMP_SPINCOUNT"
_BRIEFLY: Final = "5000"
"""Some 0.1 to 0.3 ms: as fast as 300,000 where nothing else runs, and nearly as fast as none at all elsewhere."""


@contextmanager
def brief_waits() -> Iterator[None]:
    """Import torch within, so that its OpenMP threads (GNU's) soon sleep when there is nothing for them to do.

    Left to themselves they look for work 300,000 times before they sleep. Where other processes compute as well, that
    is time on a processor which the thread that is waited for could have had.

    The library reads its setting once, when it is loaded: where torch is imported already nothing changes. A choice of
    the user's own, `OMP_WAIT_POLICY` or `GOMP_SPINCOUNT`, stands. Processes that are started later are told nothing.
    """
    if _SPINS in os.environ or "OMP_WAIT_POLICY" in os.environ:
        yield
        return
    os.environ[_SPINS] = _BRIEFLY
    try:
        yield
    finally:
        del os.environ[_SPINS]
