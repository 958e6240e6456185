"""Performance goals on an H200, predictions made before measuring, and the rates that floors are computed with.

Rates are output tokens per second. Slowdowns are per cent of the rate of greedy rows. Smaller is better for slowdowns,
seconds and milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.gpu.floors import H100, H200, DeviceRates
from tests.gpu.report import Measure


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal, moonshot and prediction of one figure: a line of the table."""

    workload: str
    model: str
    figure: str
    goal: float
    moonshot: float
    predicted: float
    """Value expected before the measurement."""
    unit: str
    less_is_better: bool = False
    device: str = "H200"

    def met(self, value: float) -> bool:
        """Whether a measured value reaches the goal."""
        return value <= self.goal if self.less_is_better else value >= self.goal


_RATE, _TIMES, _SHARE, _SLOWER = "tokens/s", "x", "%", "% slower"

GOALS = (
    Goal("w-nano", "0.6b", "output_tokens_per_second", 22e3, 29e3, 18e3, _RATE),
    Goal("w-nano", "1b", "output_tokens_per_second", 36e3, 50e3, 32e3, _RATE),
    Goal("w-nano", "8b", "output_tokens_per_second", 7.5e3, 9.2e3, 7e3, _RATE),
    Goal("w-prefix", "0.6b", "output_tokens_per_second", 78e3, 125e3, 60e3, _RATE),
    Goal("w-prefix", "8b", "output_tokens_per_second", 20e3, 24.5e3, 17e3, _RATE),
    Goal("w-prefix", "0.6b", "times_flat", 3.0, 6.0, 4.0, _TIMES),
    Goal("w-prefix", "8b", "times_unshared", 7.0, 10.0, 7.0, _TIMES),
    Goal("w-tree", "1b", "output_tokens_per_second", 100e3, 150e3, 75e3, _RATE),
    Goal("w-nano", "0.6b", "times_transformers-continuous", 3.0, 8.0, 4.0, _TIMES),
    Goal("w-prefix", "0.6b", "times_transformers-continuous", 10.0, 30.0, 12.0, _TIMES),
    Goal("decode", "8b", "device_busy_share", 97.0, 99.0, 97.0, _SHARE),
    Goal("decode", "0.6b", "device_busy_share", 92.0, 97.0, 90.0, _SHARE),
    Goal("slowdown", "0.6b", "logprobs", 5.0, 2.0, 6.0, _SLOWER, less_is_better=True),
    Goal("slowdown", "0.6b", "states", 8.0, 3.0, 6.0, _SLOWER, less_is_better=True),
    Goal("slowdown", "0.6b", "constrained", 15.0, 5.0, 15.0, _SLOWER, less_is_better=True),
    Goal("slowdown", "0.6b", "sampled", 8.0, 3.0, 5.0, _SLOWER, less_is_better=True),
    Goal("kernel", "", "paged_decode_bandwidth", 75.0, 88.0, 72.0, _SHARE),
    Goal("start", "0.6b", "seconds", 15.0, 6.0, 20.0, "s", less_is_better=True),
)


def with_goal(measure: Measure) -> Measure:
    """The measure with its goal, moonshot and prediction filled in, if `GOALS` has them."""
    for goal in GOALS:
        if (goal.workload, goal.model, goal.figure) == (measure.workload, measure.model, measure.figure):
            return replace(measure, goal=goal.goal, moonshot=goal.moonshot, predicted=goal.predicted)
    return measure


def device_rates(name: str) -> DeviceRates | None:
    """Rates of the device of a name, for the floors of whole jobs; None if they are unknown."""
    return next((rates for rates in (H100, H200) if rates.name in name), None)
