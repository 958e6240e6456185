"""A step's compiled kernels on threads of their own, while Python reads the step before and plans the next.

What is called within `record` does not run: it is noted down, and `Background.begin` runs all of it in order by
`src/background.cpp`. The thread that waits for it helps. While that was busy with something else one thread less has
computed, so that no two ever wanted the same core.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import Structure, addressof, c_int64, c_void_p
from functools import cache
from typing import Final

from torch import Tensor

from batchgen.kernels.cpu.library import library
from batchgen.kernels.cpu.structs import Feed
from batchgen.kernels.device import Array, Download, as_array

__all__ = [
    "COPY",
    "DECODE",
    "FEED",
    "PRODUCT",
    "SAMPLE",
    "Background",
    "Recording",
    "background",
    "feed",
    "record",
    "recording",
]

COPY, DECODE, PRODUCT, SAMPLE, FEED = range(5)
"""Kinds of operations, as in background.h: `PageCopies`; `Decoder` and `DecoderStep`; `Matmul`; `Sample`; `Feed`."""


class _Operation(Structure):
    """`Operation` of background.h."""

    _fields_ = (("kind", c_int64), ("first", c_void_p), ("second", c_void_p))


class Recording:
    """Kernels to run one after the other, each on what those before it have made."""

    def __init__(self, threads: int) -> None:
        """`threads`: how many will compute, 2 or more, that of the caller included."""
        assert threads > 1
        self.threads = threads
        self._operations: list[_Operation] = []
        self._kept: list[object] = []

    def __len__(self) -> int:
        return len(self._operations)

    def add(self, kind: int, first: Structure, second: Structure | None, *kept: object) -> None:
        """Note a kernel down.

        Args:
            kind: one of `COPY`, `DECODE`, `PRODUCT`, `SAMPLE` and `FEED`.
            first: its argument, not to be changed any more.
            second: likewise.
            kept: what the arguments point to.
        """
        self._operations.append(_Operation(kind, addressof(first), None if second is None else addressof(second)))
        self._kept.append((first, second, kept))

    def array(self) -> object:
        """The operations, side by side; what they point to lives as long as this object."""
        return (_Operation * len(self))(*self._operations)


class _Current(threading.local):
    recording: Recording | None = None


_current: Final = _Current()


def recording() -> Recording | None:
    """What this Python thread's kernels are noted down in; None where they run."""
    return _current.recording


@contextmanager
def record(threads: int) -> Iterator[Recording]:
    """Note kernels down for so many threads in place of running them. Nothing may look at their results within."""
    assert _current.recording is None
    _current.recording = found = Recording(threads)
    try:
        yield found
    finally:
        _current.recording = None


def feed(ids: Tensor, source: Tensor, drawn: Tensor) -> None:
    """Note down that ids [T] become those at `source` [T] of `drawn` [R], where that is not negative; all int64."""
    noted = recording()
    assert noted is not None
    assert all(tensor.is_contiguous() for tensor in (ids, source, drawn))
    call = Feed(ids.data_ptr(), source.data_ptr(), drawn.data_ptr(), len(ids))
    noted.add(FEED, call, None, ids, source, drawn)


class Background:
    """Runs recordings one by one. Whatever computes on memory that a recording writes has to `join` before."""

    def __init__(self) -> None:
        kernels = library()
        kernels.bg_background_new.restype = c_void_p
        for name in ("begin", "join", "delete"):
            getattr(kernels, f"bg_background_{name}").restype = None
        self._kernels = kernels
        self._handle = c_void_p(kernels.bg_background_new())
        self._lock = threading.Lock()
        self._under_way: tuple[Recording, object] | None = None
        self._begun = 0

    def begin(self, noted: Recording, results: Sequence[Tensor]) -> Download:
        """Run a recording behind the one before, and help that to its end. The caller's thread computes nothing of this
        one before it waits.

        Args:
            noted: holds all memory that its kernels work on.
            results: what is to be read of it.

        Returns:
            The results, without a copy.
        """
        array = noted.array()
        with self._lock:
            self._kernels.bg_background_begin(self._handle, array, c_int64(len(noted)), c_int64(noted.threads))
            self._under_way = noted, array  # in place of the one before, which is done now
            self._begun += 1
            return _Results(self, self._begun, results)

    def join(self, turn: int | None = None) -> None:
        """Help what is under way to its end; nothing, where it is not the recording that was begun as number `turn`."""
        with self._lock:
            if turn is None or turn == self._begun:
                self._join()

    def done(self, turn: int) -> bool:
        """Whether somebody has waited for the recording that was begun as number `turn`."""
        with self._lock:
            return turn < self._begun or self._under_way is None

    def _join(self) -> None:
        if self._under_way is not None:
            self._kernels.bg_background_join(self._handle)
            self._under_way = None

    def close(self) -> None:
        """Join, and end the threads."""
        with self._lock:
            self._join()
            self._kernels.bg_background_delete(self._handle)


class _Results:
    """Results of a recording."""

    __slots__ = ("_background", "_tensors", "_turn")

    def __init__(self, background: Background, turn: int, tensors: Sequence[Tensor]) -> None:
        self._background, self._turn, self._tensors = background, turn, tensors

    def ready(self) -> bool:
        """Whether somebody has waited for them."""
        return self._background.done(self._turn)

    def wait(self) -> list[Array]:
        """Help to compute them."""
        self._background.join(self._turn)
        return [as_array(tensor) for tensor in self._tensors]


@cache
def background() -> Background:
    """The process's: jobs that run side by side share processors and working memory."""
    made = Background()
    atexit.register(made.join)  # what it works on goes with the interpreter
    return made
