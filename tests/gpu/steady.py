"""Steady decode steps of a job: rows that all decode together, with hooks between chosen steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from batchgen.engine.engine import Engine
from batchgen.engine.loop import LoopState
from batchgen.engine.running import Running
from batchgen.kernels.device import Device, Download, Lane
from batchgen.request.completion import Completion

Row = dict[str, Any]
_NOTHING: Mapping[str, bool] = {}


def steady_rows(count: int, prompt: int, new_tokens: int, vocab: int, fields: Row) -> list[Row]:
    """`count` rows with different prompts of one length, none of which ends before `new_tokens`."""
    common = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 0, **fields}
    return [
        {"input_ids": [4 + (i * 7919 + j * 104729) % (vocab - 4) for j in range(prompt)], "seed": i, **common}
        for i in range(count)
    ]


def run_steps(engine: Engine, rows: Sequence[Row], hooks: dict[int, Callable[[], object]], last: int) -> int:
    """Decode `rows` together and call hooks between steps.

    Args:
        engine: the engine that runs them.
        rows: rows of one length, so that they all decode together once their prompts are computed.
        hooks: decode step, counted from 0, -> function to call before the step is planned.
        last: the decode step before which the job is stopped.

    Returns:
        Number of decode steps that were run.

    Raises:
        AssertionError: the rows ended before step `last`.
    """
    watch = _StopCondition(hooks, last)
    start = engine.start

    def started(*args: Any, **options: Any) -> _StoppableRun:
        watch.running = start(*args, **options)
        watch.rows = len(rows)
        return _StoppableRun(watch.running, watch)

    engine.start = started  # type: ignore[assignment,method-assign]
    try:
        for done in engine.generate(rows):
            assert done.error is None, done.error
    finally:
        del engine.start  # type: ignore[method-assign]
    assert watch.steps >= last, f"the rows ended after {watch.steps} of {last} steps"
    return watch.steps


class _StopCondition:
    """Stop condition of the loop: calls the hooks of each decode step, and is true at the last one."""

    def __init__(self, hooks: dict[int, Callable[[], object]], last: int) -> None:
        self._hooks = hooks
        self._last = last
        self._at: int | None = None
        self.running: Running | None = None
        self.rows = 0

    @property
    def steps(self) -> int:
        """Number of decode steps so far."""
        assert self.running is not None
        return 0 if self._at is None else self.running.loop.state.steps - self._at

    def __call__(self) -> bool:
        assert self.running is not None
        stats = self.running.scheduler.stats
        if self._at is None:
            # Each row's first token comes with its prompt; from the next step on all rows only decode.
            if stats.decode_tokens < self.rows:
                return False
            self._at = self.running.loop.state.steps
        step = self.steps
        if step in self._hooks:
            self._hooks.pop(step)()
        return step >= self._last


class _StoppableRun:
    """Replaces a `Running`, with a loop that ends at the stop condition."""

    def __init__(self, running: Running, stop: Callable[[], bool]) -> None:
        self._running = running
        self._stop = stop

    @property
    def loop(self) -> _StoppableRun:
        return self

    @property
    def state(self) -> LoopState:
        return self._running.loop.state

    def run(self, stop: Callable[[], bool]) -> Iterator[list[Completion]]:
        return self._running.loop.run(lambda: stop() or self._stop())


class TimedDevice:
    """A device that measures how long the host waits for it, and how many steps the host is ahead.

    Args:
        device: the engine's device.
        overrides: attributes to replace, such as `asynchronous`.
    """

    def __init__(self, device: Device, overrides: Mapping[str, bool] = _NOTHING) -> None:
        self._device = device
        self._overrides = overrides
        self.begun = 0
        """Number of downloads of tokens."""
        self.waited = 0.0
        """Seconds that the host waited."""
        self.lateness: list[int] = []
        """For each wait for tokens, the number of later downloads in flight; 0: the host waits without work queued."""

    def __getattr__(self, name: str) -> Any:
        return self._overrides[name] if name in self._overrides else getattr(self._device, name)

    def download(self, *tensors: Any, lane: Lane = "tokens") -> Download:
        """See `Device.download`."""
        self.begun += lane == "tokens"
        return _TimedDownload(
            self, self._device.download(*tensors, lane=lane), self.begun if lane == "tokens" else None
        )


class _TimedDownload:
    """A download whose wait is timed; `number`: its index among downloads of tokens, None for others."""

    def __init__(self, device: TimedDevice, download: Download, number: int | None) -> None:
        self._device = device
        self._download = download
        self._number = number

    def ready(self) -> bool:
        return self._download.ready()

    def wait(self) -> list[Any]:
        if self._number is not None:
            self._device.lateness.append(self._device.begun - self._number)
        begin = time.perf_counter()
        try:
            return self._download.wait()
        finally:
            self._device.waited += time.perf_counter() - begin
