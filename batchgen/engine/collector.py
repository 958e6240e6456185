"""Keeps Python's garbage collector out of the way: it runs when asked to, such as while the device has work."""

from __future__ import annotations

import gc
from types import TracebackType
from typing import ClassVar, Final, Self

__all__ = ["QuietCollector"]

_EVERY: Final = 64
"""Steps between two collections of the youngest objects."""
_OLDER: Final = 16
"""Collections of a generation between two that take the next older one along."""


class QuietCollector:
    """While it is entered, no collection starts by itself, and what was alive at its start is not looked at.

    A collection that starts by itself does so in the middle of a step, or of reading rows, and a full one goes through
    every object that the imports made, again and again. Here `tick` collects young objects, once in many ticks, at a
    moment of the caller's choice; and older ones, made since the start, more rarely still.

    Entering costs a collection of young objects alone: garbage that is older waits until the end. What the caller
    had frozen or switched off itself stays so.
    """

    _freezing: ClassVar[int] = 0
    """How many of those entered will unfreeze what is frozen: 0 or 1."""

    def __init__(self, every: int = _EVERY) -> None:
        """`every`: ticks from one collection to the next."""
        self._every = every
        self._ticks = 0
        self._enabled = False
        self._freezes = False

    def __enter__(self) -> Self:
        """Stop automatic collections and set everything alive aside."""
        self._enabled, self._freezes = gc.isenabled(), not gc.get_freeze_count()
        gc.disable()
        gc.collect(1)
        if self._freezes:
            QuietCollector._freezing += 1
            gc.freeze()
        return self

    def set_aside(self) -> None:
        """Look no more at what is alive now, either; at no cost. For after a start that made much that stays.

        Where the caller had frozen something himself that is all that stays so, and this does nothing.
        """
        if QuietCollector._freezing:
            gc.freeze()

    def tick(self) -> None:
        """A good moment, such as when a step has been handed to the device: collect, if it is time."""
        self._ticks += 1
        if self._ticks % self._every:
            return
        rounds = self._ticks // self._every
        gc.collect(0 if rounds % _OLDER else 1 if rounds % (_OLDER * _OLDER) else 2)

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """All as it was."""
        if self._freezes:
            QuietCollector._freezing -= 1
            gc.unfreeze()
        if self._enabled:
            gc.enable()
