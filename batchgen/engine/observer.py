"""`StepObserver`: what follows the steps of a job, such as its images and sounds, or the record of what is in work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from batchgen.errors import ErrorInfo
from batchgen.plan.step_plan import StepPlan


class StepObserver:
    """Follows the steps of a loop, in which each method is called at its place. Here none of them does anything."""

    def begin(self) -> None:
        """The first step is about to be planned."""

    def failed(self) -> Iterable[tuple[int, ErrorInfo]]:
        """Requests that cannot be computed, found since the last call, before a step is planned."""
        return ()

    def before(self, plan: StepPlan) -> float:
        """A step is about to be issued; returns the seconds that this took of the time to compute."""
        return 0.0

    def started(self, number: int, row: int) -> None:
        """Sample `number`, of the row with this index, is about to start."""

    def error_of(self, request: int) -> ErrorInfo | None:
        """Why a request that has ended has no result; None: it has."""
        return None

    def ended(self, request: int, numbers: Sequence[int], samples: int = 1) -> None:
        """Samples of a request have ended, and their completions are made.

        `numbers`: those that had started; `samples`: how many ended, with those that never started.
        """

    def close(self) -> None:
        """No sample is running, and none will be."""
