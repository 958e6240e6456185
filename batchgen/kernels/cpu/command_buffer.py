"""Command buffers of compiled kernels, and the background thread that runs them while Python does other work.

Inside `record_commands`, kernels do not run: they are added to a `CommandBuffer`. `BackgroundThread.submit` then runs
its commands in order (`src/background.cpp`). The thread that waits for the results helps to compute them; until it
waits, one thread fewer computes, so two threads never compete for one core.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import Structure, addressof, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Final

from torch import Tensor

from batchgen.kernels.cpu.library import library
from batchgen.kernels.cpu.structs import FillSampledIds
from batchgen.kernels.device import Array, Download, as_array

COPY, DECODE, MATMUL, SAMPLE, FILL_SAMPLED_IDS = range(5)
"""Kinds of commands and their arguments, as in background.h: `PageCopies`; `Decoder` and `DecoderStep`; `Matmul`;
`Sample`; `FillSampledIds`."""


class CannotRecord(RuntimeError):
    """A kernel that cannot be recorded was called inside `record_commands`."""


class _Command(Structure):
    """`Command` of background.h."""

    _fields_ = (("kind", c_int64), ("first", c_void_p), ("second", c_void_p))


class CommandBuffer:
    """Recorded kernels, run one after the other; each may read the results of those before it."""

    def __init__(self, threads: int) -> None:
        """`threads`: number of threads that will compute, the caller's included; 2 or more."""
        assert threads > 1
        self.threads = threads
        self._commands: list[_Command] = []
        self._kept: list[object] = []

    def __len__(self) -> int:
        return len(self._commands)

    def add(self, kind: int, first: Structure, second: Structure | None, *kept: object) -> None:
        """Append a command.

        Args:
            kind: one of `COPY`, `DECODE`, `MATMUL`, `SAMPLE` and `FILL_SAMPLED_IDS`.
            first: its argument, which must not change afterwards.
            second: likewise.
            kept: objects that own the memory the arguments point to.
        """
        self._commands.append(_Command(kind, addressof(first), None if second is None else addressof(second)))
        self._kept.append((first, second, kept))

    def array(self) -> object:
        """The commands as a C array; the memory they point to lives as long as this object."""
        return (_Command * len(self))(*self._commands)


class _Current(threading.local):
    buffer: CommandBuffer | None = None


_current: Final = _Current()


def current_buffer() -> CommandBuffer | None:
    """Command buffer that this Python thread is recording into; None where kernels run at once."""
    return _current.buffer


@contextmanager
def record_commands(threads: int) -> Iterator[CommandBuffer]:
    """Record kernels for `threads` threads instead of running them. Do not read their results inside the context."""
    assert _current.buffer is None
    _current.buffer = buffer = CommandBuffer(threads)
    try:
        yield buffer
    finally:
        _current.buffer = None


def fill_sampled_ids(ids: Tensor, source: Tensor, sampled: Tensor) -> None:
    """Record: ids[t] = sampled[source[t]] where source[t] >= 0. `ids` and `source` [T], `sampled` [R], all int64."""
    buffer = current_buffer()
    assert buffer is not None
    assert all(tensor.is_contiguous() for tensor in (ids, source, sampled))
    call = FillSampledIds(ids.data_ptr(), source.data_ptr(), sampled.data_ptr(), len(ids))
    buffer.add(FILL_SAMPLED_IDS, call, None, ids, source, sampled)


class BackgroundThread:
    """Runs command buffers one by one. `join` before computing on memory that a submitted buffer writes."""

    def __init__(self) -> None:
        kernels = library()
        kernels.bg_background_new.restype = c_void_p
        for name in ("submit", "join", "delete"):
            getattr(kernels, f"bg_background_{name}").restype = None
        self._kernels = kernels
        self._handle = c_void_p(kernels.bg_background_new())
        self._lock = threading.Lock()
        self._running: tuple[CommandBuffer, object] | None = None
        self._submitted = 0

    def submit(self, buffer: CommandBuffer, results: Sequence[Tensor]) -> Download:
        """Run a command buffer after the previous one, and help to finish the previous one.

        The caller's thread computes nothing of this buffer before it waits for the results.

        Args:
            buffer: keeps alive all memory that its kernels use.
            results: tensors to read when it has run.

        Returns:
            The results, without a copy.
        """
        array = buffer.array()
        with self._lock:
            self._kernels.bg_background_submit(self._handle, array, c_int64(len(buffer)), c_int64(buffer.threads))
            self._running = buffer, array  # replaces the previous one, which has finished
            self._submitted += 1
            return _Results(self, self._submitted, results)

    def join(self, number: int | None = None) -> None:
        """Help to finish the running buffer; do nothing if it is not submission `number`."""
        with self._lock:
            if number is None or number == self._submitted:
                self._join()

    def done(self, number: int) -> bool:
        """Whether submission `number` has been waited for."""
        with self._lock:
            return number < self._submitted or self._running is None

    def _join(self) -> None:
        if self._running is not None:
            self._kernels.bg_background_join(self._handle)
            self._running = None

    def close(self) -> None:
        """Join, and end the threads."""
        with self._lock:
            self._join()
            self._kernels.bg_background_delete(self._handle)


class _Results:
    """Results of a submitted command buffer (the `Download` protocol)."""

    __slots__ = ("_number", "_tensors", "_thread")

    def __init__(self, thread: BackgroundThread, number: int, tensors: Sequence[Tensor]) -> None:
        self._thread, self._number, self._tensors = thread, number, tensors

    def ready(self) -> bool:
        """Whether a thread has waited for them."""
        return self._thread.done(self._number)

    def wait(self) -> list[Array]:
        """The results, as arrays; this thread helps to compute them."""
        self._thread.join(self._number)
        return [as_array(tensor) for tensor in self._tensors]


@cache
def background_thread() -> BackgroundThread:
    """The process's background thread: jobs in one process share processors and working memory."""
    made = BackgroundThread()
    atexit.register(made.join)  # the interpreter frees the memory that it works on
    return made


@dataclass(frozen=True, slots=True)
class CommandBuffers:
    """Support of a backend for steps that are recorded and run by a background thread."""

    thread: Callable[[], BackgroundThread] = background_thread
