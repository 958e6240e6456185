"""`DeferredGC`: runs Python's garbage collector only at chosen moments, such as while the device has work."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from types import TracebackType
from typing import ClassVar, Final, Self

_EVERY: Final = 64
"""Ticks per collection of the youngest generation."""
_OLDER: Final = 16
"""Collections of a generation per collection of the next older one."""


def trim_heap() -> None:
    """Give freed memory back to the system, where the C library keeps it and has `malloc_trim`.

    Planning frees columns of megabytes, which glibc otherwise keeps between those that stay.
    """
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


class DeferredGC:
    """Context manager that turns off automatic garbage collection and freezes the objects that are alive at its start.

    An automatic collection would run in the middle of a step or while rows are read, and a full one would visit all
    objects of the imported modules. Instead, `tick` collects young objects once in many ticks, and older ones, created
    since the start, less often.

    Entering collects young objects only; older garbage is collected at the end. If the caller has frozen objects or
    turned the collector off, that state is kept.
    """

    _freezing: ClassVar[int] = 0
    """Number of entered instances that will unfreeze objects: 0 or 1."""

    def __init__(self, every: int = _EVERY) -> None:
        """`every`: ticks per collection."""
        self._every = every
        self._ticks = 0
        self._enabled = False
        self._freezes = False

    def __enter__(self) -> Self:
        """Stop automatic collections and freeze all live objects."""
        self._enabled = gc.isenabled()
        self._freezes = not DeferredGC._freezing and not gc.get_freeze_count()
        gc.disable()
        gc.collect(1)
        if self._freezes:
            DeferredGC._freezing += 1
            gc.freeze()
        return self

    def freeze_all(self) -> None:
        """Also freeze the objects that are alive now. Call it after a start that created many long-lived objects.

        Does nothing if the caller had frozen objects before.
        """
        if DeferredGC._freezing:
            gc.freeze()

    def tick(self) -> None:
        """Collect if it is due. Call it at a good moment, such as after a step was issued."""
        self._ticks += 1
        if self._ticks % self._every:
            return
        rounds = self._ticks // self._every
        gc.collect(0 if rounds % _OLDER else 1 if rounds % (_OLDER * _OLDER) else 2)

    def collect(self) -> None:
        """Collect all objects created since the start, now that much has become garbage, and return its memory."""
        gc.collect()
        trim_heap()

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unfreeze the objects and restore automatic collections."""
        if self._freezes:
            DeferredGC._freezing -= 1
            gc.unfreeze()
        if self._enabled:
            gc.enable()
