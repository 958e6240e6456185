"""The stages in the order in which they run, and their shares of the time. Checks come before measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DEFAULT_STAGES", "STAGES", "Stage", "schedule", "stage_named"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage and its time."""

    name: str
    share: float
    """Seconds out of the default limit of 450."""
    least: float = 0.0
    """Seconds that must be left to begin the stage."""
    required: bool = False
    """Whether it is a failure if the stage does not run."""


STAGES = (
    Stage("parity", 110.0, required=True),
    Stage("flash", 20.0, required=True),
    Stage("engine", 55.0, least=15.0, required=True),
    Stage("determinism", 25.0, least=8.0, required=True),
    Stage("syncs", 15.0, least=5.0, required=True),
    Stage("memory", 35.0, least=10.0, required=True),
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
    """Seconds from the start of the run after which each chosen stage begins no more cases.

    The chosen stages divide the limit in proportion to their shares. Time that one does not use is left for the next.
    """
    stages = [stage for stage in STAGES if stage.name in chosen]
    whole = sum(stage.share for stage in stages)
    ends: dict[str, float] = {}
    spent = 0.0
    for stage in stages:
        spent += stage.share
        ends[stage.name] = time_limit * spent / whole
    return ends
