"""The stages in the order in which they run, and their shares of the time. Checks come before measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage, what it shows, and its time."""

    name: str
    shows: str
    share: float
    """Seconds out of the default limit of 450."""
    modules: tuple[str, ...]
    """Modules in `stages` that have its cases."""
    least: float = 0.0
    """Seconds that must be left to begin the stage."""
    required: bool = False
    """Whether it is a failure if the stage or a case does not run."""
    kernels: bool = False
    """Whether it calls kernels, which need only torch and Triton; else it runs whole jobs."""
    parallel: bool = False
    """Whether its cases are divided among several processes."""


_SHOWS = {
    "parity": "every kernel, called through `batchgen.kernels.ops`, is as accurate as PyTorch against float64",
    "flash": "the same attention cases through the vllm-flash-attn backend, if its library is installed",
    "engine": "whole jobs with every kind of row: the GPU against the CPU, bfloat16 against transformers",
    "determinism": "the same bits in every batch",
    "syncs": "steady decode steps in which the host never waits for the device",
    "memory": "the automatic pool, long and short rows in one pool, steps that do not fit",
    "bench": "microbenchmarks at real shapes, compared with floors from the device's measured rates",
    "workloads": "whole jobs at real shapes: floors, other engines, row options, start-up, forms of weights",
    "profile": "the time of a decode step by kernel",
    "tune": "only if named: tile candidates of the attention kernels, printed as a fragment for `chips.toml`",
}


def _check(name: str, share: float, *modules: str) -> Stage:
    return Stage(name, _SHOWS[name], share, modules, required=True, kernels=True, parallel=True)


_MORE_MODULES = {"engine": ("media",), "workloads": ("forms",)}


def _jobs(name: str, share: float, least: float, *, required: bool = False) -> Stage:
    modules = (name, *_MORE_MODULES.get(name, ()))
    return Stage(name, _SHOWS[name], share, modules, least, required)


STAGES = (
    _check("parity", 110.0, "parity_attention", "parity_ops", "parity_sampling", "parity_stored"),
    _check("flash", 20.0, "parity_attention"),
    _jobs("engine", 55.0, 15.0, required=True),
    _jobs("determinism", 25.0, 8.0, required=True),
    _jobs("syncs", 15.0, 5.0, required=True),
    _jobs("memory", 35.0, 10.0, required=True),
    Stage("bench", _SHOWS["bench"], 40.0, ("bench_attention", "bench_ops"), kernels=True),
    _jobs("workloads", 120.0, 20.0),
    _jobs("profile", 30.0, 10.0),
    Stage("tune", _SHOWS["tune"], 200.0, (), kernels=True),
)
DEFAULT_STAGES = tuple(stage.name for stage in STAGES if stage.name != "tune")


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


_START = 90.0
"""Seconds until a machine runs the first command, transfers included."""
_LONGEST = 600.0
"""Most seconds of a command."""
_PARTS = (("checks", True), ("figures", False))
"""Commands, and whether they have the stages that must pass, which come first."""


def commands(seconds: float) -> list[str]:
    """The commands that check and measure a machine that is at hand for so many seconds, its start included."""
    stages = [stage for stage in STAGES if stage.name in DEFAULT_STAGES]
    factor = max(0.0, seconds - _START) / sum(stage.share for stage in stages)
    lines = []
    for name, required in _PARTS:
        own = [stage for stage in stages if stage.required == required]
        limit = min(_LONGEST, factor * sum(stage.share for stage in own))
        names = ",".join(stage.name for stage in own)
        lines.append(f"python3 -m tests.gpu --stages {names} --time-limit {limit:.0f} --out $OUT/{name}.json")
    return lines


def no_time(stage: Stage, left: float) -> str:
    """Why a stage is skipped with `left` seconds of its time; empty if it is not."""
    if left >= stage.least:
        return ""
    return f"skipped: {max(0.0, left):.0f} s left of its time, it needs {stage.least:.0f} s"
