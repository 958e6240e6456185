"""Where the time of a job's steps goes: two readings of a clock a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

__all__ = ["StepTimes"]


@dataclass(slots=True)
class StepTimes:
    """Seconds since the first step was planned.

    A device that works on its own takes its work in no time: there `compute` is that of handing it over, and `host`
    holds the waits for its results. Rows whose draws need the host (grammars) read the step before within `compute`.
    """

    compute: float = 0.0
    """In the model, its head and the draws."""
    host: float = 0.0
    """In between: plans, layout, reading, ends, and what the caller does with completions."""
    beside: float = 0.0
    """What was computed meanwhile, on a CPU, as seconds of all its threads."""
    _share: float = 0.0
    """Of the threads, how many compute now."""
    _since: float = field(default_factory=perf_counter)

    def begin(self) -> None:
        """The first step is planned now."""
        self._since = perf_counter()

    def enter(self) -> None:
        """The model is called."""
        now = perf_counter()
        self.host += now - self._since
        self.beside += self._share * (now - self._since)
        self._since, self._share = now, 0.0

    def leave(self, share: float = 0.0) -> None:
        """What the step draws is on its way. `share`: of a CPU's threads, those that go on with it."""
        now = perf_counter()
        self.compute += now - self._since
        self._since, self._share = now, share

    def milliseconds(self) -> dict[str, int]:
        """All three, in whole milliseconds, by name."""
        found = {"compute": self.compute, "host": self.host, "beside": self.beside}
        return {f"{name}_milliseconds": round(1e3 * seconds) for name, seconds in found.items()}
