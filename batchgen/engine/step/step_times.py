"""`StepTimes`: compute and host time of a job's steps, from two clock readings per step."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter


@dataclass(slots=True)
class StepTimes:
    """Seconds of compute and host time since the first step was planned.

    On an asynchronous device, `compute` only includes queueing the work, and `host` includes waiting for results. Rows
    whose sampling needs the host (grammars) read the previous step within `compute`.
    """

    compute: float = 0.0
    """Time in the model, its head and sampling."""
    host: float = 0.0
    """Time between: planning, layout, reading, finishing sequences, and the caller's work with completions."""
    overlapped: float = 0.0
    """Compute time of CPU threads during `host`, as seconds of all threads."""
    _share: float = 0.0
    """Share of the threads that compute now."""
    _since: float = field(default_factory=perf_counter)

    def start(self) -> None:
        """Start timing, before the first step is planned."""
        self._since = perf_counter()

    def begin_compute(self) -> None:
        """Start compute time, before the model is called."""
        now = perf_counter()
        self.host += now - self._since
        self.overlapped += self._share * (now - self._since)
        self._since, self._share = now, 0.0

    def end_compute(self, share: float = 0.0) -> None:
        """End compute time, after the step was issued. `share`: share of the CPU threads that continue computing."""
        now = perf_counter()
        self.compute += now - self._since
        self._since, self._share = now, share

    def add_compute(self, seconds: float) -> None:
        """Count the last `seconds` as compute time, of work that is not a step's: that of an encoder."""
        self.compute += seconds
        self._since += seconds

    def milliseconds(self) -> dict[str, int]:
        """All times in whole milliseconds, by report key."""
        times = {"compute_ms": self.compute, "host_ms": self.host, "overlapped_compute_ms": self.overlapped}
        return {name: round(1e3 * seconds) for name, seconds in times.items()}
