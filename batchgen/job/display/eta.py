"""Time left of a running job: the work that its plan has left, at the cost of the work that it has done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from math import hypot
from typing import Final, Self

import numpy as np
import torch

from batchgen.engine.running import Running
from batchgen.job.display.progress import TimeLeft
from batchgen.models.base import ModelSpec
from batchgen.plan.scheduler import Scheduler
from batchgen.plan.step_costs import Costs, Seconds, StepCosts
from batchgen.plan.work import Work, WorkLeft

_OBSERVE_SECONDS: Final = 0.1
"""Least seconds between two looks at the work done."""
_PLAN_EVERY: Final = 0.05
_PLAN_SECONDS: Final = 10.0
"""Time between two looks at the work left: this share of the run so far, but at most so many seconds."""
_PLAN_SHARE: Final = 0.002
"""Largest share of the run that looking at the work left may take, if it is looked at often enough then."""
_PLAN_LATEST: Final = 20.0
"""Seconds after which it is looked at, if that takes no more than `_MOST_SHARE` of them."""
_MOST_SHARE: Final = 0.01
"""Largest share of the run that an estimate may take in any case."""
_DRIFT: Final = 0.04
"""Standard deviation of a machine's speed in the rest of a run, relative to that so far."""
_DEVIATIONS: Final = 1.64
"""Standard deviations on either side of an estimate: nine of ten times lie between them."""


class EtaTracker:
    """Estimates the time left of a running job. Most of its ticks only read the clock.

    Args:
        scheduler: the job's scheduler, before its first step.
        prior: expected costs of work, as of `StepCosts`.
        earlier: work of rows that earlier runs have committed.
        clock: seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        prior: Sequence[float],
        earlier: Work,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._costs = StepCosts(prior)
        self._earlier = earlier
        self._began = clock()
        self._plan()
        self._done, self._at = scheduler.work_done, clock()
        """Work that was done at a time, both as last seen."""
        self._every = _OBSERVE_SECONDS
        """Seconds between two looks at the work done."""
        self._warm = False
        self._in_flight: Work | None = None
        """Work that was planned at the last tick, whose last step was in flight then."""
        self._left: TimeLeft | None = None

    @classmethod
    def of_job(cls, running: Running, spec: ModelSpec) -> Self:
        """The tracker of a job that runs a model, before its first step."""
        workload = running.workload
        # Copies of an equal row took no work.
        earlier = Work()
        if workload.done.any():
            done = workload.done & (workload.leader == np.arange(len(workload.done), dtype=np.int32))
            samples = workload.table.by_params([params.samples for params in workload.table.params], np.int32)
            earlier = running.scheduler.work_of(np.where(done, samples, np.int32(0)))
        return cls(running.scheduler, prior_costs(spec, Rates.guessed(spec, torch.get_num_threads())), earlier)

    @property
    def costs(self) -> Costs | None:
        """The costs of the job's work relative to those given; None until some steps have run."""
        return self._costs.fitted()

    def tick(self, in_flight: bool) -> TimeLeft | None:
        """Look at the work between two steps.

        Args:
            in_flight: whether the device may still compute the last step planned.

        Returns:
            The time left; None until some steps have run.
        """
        now = self._clock()
        if self._in_flight is not None:
            self._observe(self._in_flight, now)
            self._in_flight = None
        elif now >= self._at + self._every:
            done = self._scheduler.work_done
            if in_flight:
                self._in_flight = done
            else:
                self._observe(done, now)
        return self._left

    def _observe(self, done: Work, now: float) -> None:
        if self._warm:
            self._costs.observe(now - self._at, _minus(done, self._done))
        # The first steps also load kernels and touch memory for the first time.
        self._warm = self._warm or done.steps > 0
        self._done, self._at = done, now
        self._left = self._estimate(now)

    def _estimate(self, now: float) -> TimeLeft | None:
        if now >= self._plan_due:
            left = self._plan()
        else:
            began = self._clock()
            left = self._scheduler.work_left_since()
            self._every = max(_OBSERVE_SECONDS, (self._clock() - began) / _MOST_SHARE)
        in_flight = _minus(self._scheduler.work_done, self._done)
        expected, least, most = (self._costs.estimate(_plus(work, in_flight)) for work in left)
        past = self._costs.estimate(_plus(self._earlier, self._done))
        if expected is None or least is None or most is None or past is None:
            return None
        low, high = interval(expected, least.mean, most.mean, _DRIFT)
        share = past.mean / max(past.mean + expected.mean, 1e-9)
        return TimeLeft(expected.mean, low, high, share if self._left is None else max(share, self._left.work_done))

    def _plan(self) -> WorkLeft:
        """The work left after all steps planned so far, by a simulation of those to come."""
        began = self._clock()
        left = self._scheduler.work_left()
        now = self._clock()
        often = min(_PLAN_SECONDS, _PLAN_EVERY * (now - self._began))
        took = now - began
        self._plan_due = now + max(often, min(took / _PLAN_SHARE, max(_PLAN_LATEST, took / _MOST_SHARE)))
        return left


def _plus(a: Work, b: Work) -> Work:
    return Work(*(x + y for x, y in zip(a, b, strict=True)))


def _minus(a: Work, b: Work) -> Work:
    return Work(*(x - y for x, y in zip(a, b, strict=True)))


def interval(expected: Seconds, least: float, most: float, doubt: float) -> tuple[float, float]:
    """Seconds between which nine of ten times lie.

    Args:
        expected: of the expected work.
        least: of the least work that may reasonably be.
        most: of the most.
        doubt: standard deviation of the machine's speed, relative to it.
    """
    spread = _DEVIATIONS * hypot(expected.deviation, doubt * expected.mean)
    low = max(0.0, expected.mean - hypot(spread, expected.mean - least))
    return low, expected.mean + hypot(spread, most - expected.mean)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does in a second."""

    flops: float
    """Operations of matrix products."""
    bandwidth: float
    """Bytes read from its memory."""
    step: float
    """Seconds of a step that are spent on neither."""

    @staticmethod
    def guessed(spec: ModelSpec, threads: int) -> Rates:
        """Rough rates of the device that a model is on; `threads`: of a CPU."""
        half = spec.dtype.itemsize <= 2
        if spec.device.type == "cuda":
            return Rates(4e14 if half else 5e13, 2.5e12, 2e-3)
        return Rates((2.5e11 if half else 1e11) * threads, 1.5e10 * min(threads, 8), 2e-4)


def prior_costs(spec: ModelSpec, rates: Rates) -> tuple[float, ...]:
    """Rough seconds of the quantities of `StepCosts`, from the sizes of a model; they are learnt as steps run."""
    flops, bandwidth, step = astuple(rates)
    head = spec.vocab_size * spec.hidden_size
    body = max(1, spec.parameters - head)
    products = sum(spec.num_heads * (layer.key_dim + layer.value_dim) for layer in spec.kv_layers)
    return (
        step + spec.parameters * spec.dtype.itemsize / bandwidth,
        2.0 * body / flops,
        (2.0 * products + 1.0) / flops,  # above 0 for models without attention, too
        2.0 * head / flops + 1e-6,
        (2.0 * products + 1.0) / flops,
        (spec.kv_bytes_per_token + 1.0) / bandwidth,
    )
