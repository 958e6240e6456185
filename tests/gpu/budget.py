"""The stages, in the order in which they run, and each one's part of the time.

Correct before fast: whatever proves comes before whatever measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DEFAULT_STAGES", "STAGES", "Stage", "schedule", "stage_named"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage's time, in seconds."""

    name: str
    share: float
    """Of the 450 seconds that the whole command may begin cases in."""
    least: float = 0.0
    """With less than this left it is not begun."""
    proves: bool = False
    """Whether not running it leaves something unproven, which is a failure."""


STAGES = (
    Stage("parity", 110.0, proves=True),
    Stage("flash", 20.0, proves=True),
    Stage("engine", 55.0, least=15.0, proves=True),
    Stage("determinism", 25.0, least=8.0, proves=True),
    Stage("syncs", 15.0, least=5.0, proves=True),
    Stage("memory", 35.0, least=10.0, proves=True),
    Stage("bench", 40.0, least=5.0),
    Stage("workloads", 120.0, least=20.0),
    Stage("profile", 30.0, least=10.0),
    Stage("tune", 200.0),
)
DEFAULT_STAGES = tuple(stage.name for stage in STAGES if stage.name != "tune")


def stage_named(name: str) -> Stage:
    """The stage of this name."""
    return next(stage for stage in STAGES if stage.name == name)


def schedule(chosen: Sequence[str], time_limit: float) -> dict[str, float]:
    """When each chosen stage must begin no more cases, in seconds from the start of the run.

    The chosen stages share the limit by their parts; what one leaves over is the next one's.
    """
    stages = [stage for stage in STAGES if stage.name in chosen]
    whole = sum(stage.share for stage in stages)
    ends: dict[str, float] = {}
    spent = 0.0
    for stage in stages:
        spent += stage.share
        ends[stage.name] = time_limit * spent / whole
    return ends
