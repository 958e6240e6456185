"""`Peers`: the engines of the other ranks, which run the same jobs, and what rank 0 sends them.

Every rank has the whole engine with its scheduler and sampler and computes the same plan, so that between two steps
nothing but what rank 0 alone knows has to be sent: whether to stop, which items cannot be read, sizes that were
measured. It goes through pipes, in the order in which the engines ask for it, so that rank 0 never waits.
"""

from __future__ import annotations

import atexit
import signal
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Thread, current_thread, main_thread
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from batchgen.config.engine_config import EngineConfig
from batchgen.engine.machine import visible_gpus
from batchgen.engine.parallel.process_ranks import HOST, ProcessRanks, c10d, lost
from batchgen.errors import DeviceError, ErrorInfo, UsageError
from batchgen.kernels.ranks import ALONE, Ranks
from batchgen.models.base import ModelSpec, Numbers
from batchgen.request.table.request_table import RequestTable
from batchgen.text.helper_process import HelperProcess

_MODULE: Final = "batchgen.engine.follower"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    """Load the model."""

    config: EngineConfig
    numbers: Numbers
    rank: int
    port: int
    """Where rank 0 listens."""


@dataclass(frozen=True, slots=True)
class Start:
    """Run a job, with arguments of `Engine.start`."""

    table: RequestTable
    done: npt.NDArray[np.bool_] | None
    scaled: bool | None
    streams: bool
    """Whether rows have events."""
    set_aside: Mapping[int, ErrorInfo]
    alone: Sequence[int]


@dataclass(frozen=True, slots=True)
class Alone:
    """Run one row that the job has held."""

    row: int


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Run `Engine.warm_up`."""


@dataclass(frozen=True, slots=True)
class Value:
    """What rank 0 knows."""

    value: Any


class Peers(ABC):
    """The other ranks' engines, as seen by that of one rank."""

    @abstractmethod
    def agree(self, value: Callable[[], T]) -> T:
        """Rank 0's value, on all ranks; on others the function is not called."""

    def tell(self, message: object) -> None:
        """Have the other ranks' engines do something; said by rank 0."""
        return

    def together(self) -> AbstractContextManager[None]:
        """What all ranks do together: it is not interrupted, and if it fails, the other ranks wait for ever."""
        return nullcontext()


class NoPeers(Peers):
    """There are no other ranks."""

    def agree(self, value: Callable[[], T]) -> T:
        """The value."""
        return value()


NO_PEERS: Final = NoPeers()


def ranks_of(config: EngineConfig) -> Ranks:
    """Rank 0 of those that the options ask for; it is connected by `Followers`."""
    ranks = ALONE if config.tensor_parallel == 1 else ProcessRanks(0, config.tensor_parallel)
    ranks.in_order = config.deterministic
    return ranks


def peers_of(config: EngineConfig, spec: ModelSpec) -> Peers:
    """The engines of the other ranks of a model, started.

    Raises:
        UsageError: there are fewer GPUs than ranks.
        DeviceError: a process has ended.
    """
    ranks = spec.ranks
    return Followers(config, spec.numbers, ranks, spec.device) if isinstance(ranks, ProcessRanks) else NO_PEERS


class Followers(Peers):
    """The processes of the ranks above 0, started and heard by rank 0. They end with the engine or this process."""

    def __init__(self, config: EngineConfig, numbers: Numbers, ranks: ProcessRanks, device: torch.device) -> None:
        """Start the processes, which load the model, and wait until they have checked the model.

        Raises:
            UsageError: there are fewer GPUs than ranks.
            DeviceError: a process has ended.
        """
        gpus = visible_gpus() if device.type == "cuda" else None
        if gpus is not None and len(gpus) < ranks.count:
            raise UsageError(f"`--tensor-parallel` {ranks.count}: this process may use {len(gpus)} GPUs")
        store = c10d.TCPStore(HOST, 0, ranks.count, is_master=True, wait_for_workers=False)
        self._ranks = ranks
        self._processes: list[HelperProcess] = []
        self._end = weakref.finalize(self, _close_all, self._processes)
        atexit.register(self._end)
        threads = torch.get_num_threads()
        named = tuple((name, "builtins:id") for name, _ in config.logit_processor)  # rank 0 alone calls the functions
        config = replace(config, cpu_threads=threads * ranks.count, logit_processor=named)
        for rank in range(1, ranks.count):
            variables = {"OMP_NUM_THREADS": str(threads)} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus[rank]}
            self._processes.append(HelperProcess(_MODULE, variables=variables))
            self._processes[-1].requests.send(Load(config, numbers, rank, store.port))
        ranks.why = partial(_why, self._processes)  # and no cycle, so that they end with the last use of the engine
        for rank, process in enumerate(self._processes, start=1):
            try:
                if said := process.results.recv():
                    raise DeviceError(f"rank {rank} of --tensor-parallel failed: {said}")
            except (EOFError, OSError) as problem:
                raise _why(self._processes, lost(problem)) from problem
        self._store = store
        ranks.join(store, device)
        if gpus is not None:
            Thread(target=_watch, args=(weakref.ref(self), [*self._processes]), daemon=True, name="ranks").start()

    def agree(self, value: Callable[[], T]) -> T:
        """The value, which the others receive."""
        known = value()
        self.tell(Value(known))
        return known

    def tell(self, message: object) -> None:
        """See `Peers.tell`.

        Raises:
            DeviceError: a process has ended.
        """
        if not self._processes:
            raise DeviceError("an error has ended the processes of --tensor-parallel; make a new engine")
        for process in self._processes:
            try:
                process.requests.send(message)
            except OSError as problem:
                raise _why(self._processes, lost(problem)) from problem

    @contextmanager
    def together(self) -> Iterator[None]:
        """See `Peers.together`: a first interrupt waits, and an error ends the processes."""
        waiting: list[int] = []

        def hold(number: int, _: object) -> None:
            waiting.append(number)
            if len(waiting) > 1:
                raise KeyboardInterrupt

        usual = current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        try:
            if usual:
                signal.signal(signal.SIGINT, hold)
            yield
        except BaseException as problem:
            if not isinstance(problem, UsageError):  # these come before anything is exchanged
                self._end()
            raise
        finally:
            if usual:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        if waiting:
            raise KeyboardInterrupt

    def aborted(self) -> None:
        """Let exchanges with a process that has ended fail."""
        self._ranks.abort()


_LAST_WORDS: Final = 2.0
"""Seconds for which a process that failed may say why."""


def _why(processes: Sequence[HelperProcess], problem: DeviceError) -> DeviceError:
    """The error of an exchange that failed, with how a process has ended, as far as is known.

    One that says why comes first, then one that was killed: the others end because of it.
    """
    ends: list[tuple[int, str]] = []
    for rank, process in enumerate(processes, start=1):
        said = ""
        with suppress(EOFError, OSError):
            if not wait([process.results], _LAST_WORDS):
                continue
            said = process.results.recv()
        if said:
            ends.append((0, f"rank {rank} of --tensor-parallel failed: {said}"))
        elif (code := process.exit_code()) < 0:
            ends.append(
                (1, f"rank {rank} of --tensor-parallel has ended by signal {-code} (9: mostly a lack of memory)")
            )
    return DeviceError(min(ends)[1]) if ends else problem


def _close_all(processes: list[HelperProcess]) -> None:
    for process in processes:
        process.close()
    processes.clear()


def _watch(followers: weakref.ref[Followers], processes: Sequence[HelperProcess]) -> None:
    """Wait for the first process that ends or fails: on a GPU the others would wait for it without end."""
    try:
        wait([process.results for process in processes])
    except (OSError, ValueError):  # they are closed
        return
    found = followers()
    if found is not None:
        found.aborted()


class Superseded(Exception):
    """Rank 0 has left a job, and has sent something else."""

    def __init__(self, message: object) -> None:
        super().__init__()
        self.message = message


class Leader(Peers):
    """Rank 0, as heard by another rank. When it ends, so does this process."""

    def __init__(self, receive: Callable[[], object]) -> None:
        self._receive = receive

    def agree(self, value: Callable[[], T]) -> T:
        """What rank 0 knows.

        Raises:
            Superseded: it has left the job.
        """
        message = self._receive()
        if not isinstance(message, Value):
            raise Superseded(message)
        known: T = message.value
        return known


def receive_from(messages: Connection, end: Callable[[], None]) -> Callable[[], object]:
    """A function that gives the next message; `end` is called by another thread when there will be none."""
    queue: SimpleQueue[object] = SimpleQueue()

    def read() -> None:
        try:
            while True:
                queue.put(messages.recv())
        finally:
            end()

    Thread(target=read, daemon=True, name="leader").start()
    return queue.get
