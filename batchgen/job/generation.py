"""What generates the rows of a job: an engine in this process, or several in others (`scale.replicas`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from batchgen.engine.engine import Engine
from batchgen.engine.loop import LoopState
from batchgen.engine.memory.kv_budget import device_memory
from batchgen.engine.running import Running
from batchgen.engine.workload import JobWorkload
from batchgen.job.display.eta import EtaTracker, Rates
from batchgen.job.display.progress import TimeLeft
from batchgen.job.summary import RunCounts
from batchgen.request.completion import Completion


class Generation(ABC):
    """The rows of a job that are being generated."""

    workload: JobWorkload
    _counts: RunCounts | None = None

    @abstractmethod
    def run(self, stop: Callable[[], bool]) -> Iterator[list[Completion]]:
        """All samples of one prompt at a time, in order of completion, until all are done or `stop` returns True."""

    @property
    @abstractmethod
    def state(self) -> LoopState:
        """Counters of the steps so far."""

    @abstractmethod
    def time_left(self) -> TimeLeft | None:
        """The time left; None if it is not known."""

    @property
    def counts(self) -> RunCounts:
        """What was counted, when it has run."""
        assert self._counts is not None
        return self._counts

    @property
    @abstractmethod
    def facts(self) -> Mapping[str, Any]:
        """How the rows were computed, for the footer, when it has run."""

    @property
    @abstractmethod
    def notes(self) -> Sequence[str]:
        """Remarks for the user, when it has run."""


class OneEngine(Generation):
    """The rows of a job that an engine in this process generates."""

    def __init__(self, engine: Engine, running: Running, eta: EtaTracker | None) -> None:
        """`running`: the job, before its first step. `eta`: estimates the time left; None: it is not wanted."""
        self.workload = running.workload
        self.running = running
        self._engine, self._now, self._eta = engine, running, eta

    def run(self, stop: Callable[[], bool]) -> Iterator[list[Completion]]:
        """All rows together, then each of those that run alone."""
        yield from self.running.loop.run(stop)
        self._counts, self._eta = replace(RunCounts.of(self.running), measured=self._measured()), None
        for row in self.workload.held:
            self._now = self.running.alone(row)
            yield from self._now.loop.run(stop)
            self._counts = self._counts.plus(RunCounts.of(self._now))

    def _measured(self) -> dict[str, Any]:
        """See `RunSummary.measured`."""
        costs, spec = None if self._eta is None else self._eta.costs, self._engine.model.spec
        if costs is None:
            return {}
        rates, lengths = Rates.guessed(spec, torch.get_num_threads()), self.running.scheduler.lengths
        dtype, memory = str(spec.dtype).removeprefix("torch."), device_memory(spec.device).total
        of = {"device": spec.device.type, "memory": memory, "parameters": spec.parameters, "dtype": dtype}
        return {**of, "rates": asdict(rates), "costs": asdict(costs), "lengths": asdict(lengths)}

    @property
    def state(self) -> LoopState:
        """Of the rows that run now."""
        return self._now.loop.state

    def time_left(self) -> TimeLeft | None:
        """Look at the work between two steps."""
        return None if self._eta is None else self._eta.tick(self.state.in_flight)

    @property
    def facts(self) -> Mapping[str, Any]:
        """Of the engine."""
        return self._engine.facts

    @property
    def notes(self) -> Sequence[str]:
        """Of the steps."""
        return self.running.loop.notes
