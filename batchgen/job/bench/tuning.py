"""Which of an engine's settings is the fastest on a workload: found by trying."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from batchgen.job.bench.process import BenchEngine, EngineFailed, EngineGone
from batchgen.job.bench.workloads import BenchRow

__all__ = ["best_setting", "distinct_settings"]

_PROBE_TOKENS = 16
"""Tokens generated per row while settings are tried."""
_AGAIN_WITHIN = 2.0
"""Settings that took up to this much more time than the fastest have a second try: the first may have warmed up."""
_OF_BATCHES = 8
"""Neighbours in length, of which the middle stands for all."""
_FINALISTS_WITHIN = 1.15
"""Settings that took up to this much more time than the fastest are tried again with all of their output."""


def best_setting(
    engine: BenchEngine, rows: Sequence[BenchRow], known: Mapping[str, int] | None = None
) -> Mapping[str, int]:
    """The setting with the least time per row: each is tried with part of the output, those that are not far slower
    once more, then the near ones with all of it.

    A setting's `batch` says how many rows it computes at once, those of like lengths: it is tried on some batches of
    all lengths. Others are tried on all rows. Where rows differ in what they generate, every trial generates all of
    it, for what a batch wastes shows in its end, and those that are not far slower are tried once more on all rows:
    how much batches waste differs from one to the next.
    A setting that fails, as for want of memory, is not the best one. One that is `known` to be the best is not tried,
    if it is still among those worth trying.

    Raises:
        EngineFailed: every setting failed, or the engine is gone.
    """
    if known is not None and known in engine.settings:
        return known
    even = len({row.max_new for row in rows}) == 1
    settings = distinct_settings([s for s in engine.settings if not (even and "prompt_first" in s)], len(rows))
    if len(settings) == 1:
        return settings[0]
    failed: list[EngineFailed] = []

    def tried(rows: Sequence[BenchRow], setting: Mapping[str, int], *, some: bool = True) -> float:
        try:
            return _seconds_per_row(engine, _some_batches(rows, setting) if some else rows, setting)
        except EngineGone:
            raise
        except EngineFailed as problem:
            failed.append(problem)
            return math.inf

    short = [replace(row, max_new=min(row.max_new, _PROBE_TOKENS)) for row in rows] if even else list(rows)
    seconds = [tried(short, setting) for setting in settings]
    if not any(map(math.isfinite, seconds)):
        raise failed[-1]
    again = [setting for setting, taken in zip(settings, seconds, strict=True) if taken <= min(seconds) * _AGAIN_WITHIN]
    if not even and any("batch" in setting for setting in again):
        return again[0] if len(again) == 1 else min(again, key=lambda setting: tried(rows, setting, some=False))
    seconds = [
        min(taken, tried(short, setting)) if setting in again else taken
        for setting, taken in zip(settings, seconds, strict=True)
    ]
    near = [s for s, taken in zip(settings, seconds, strict=True) if taken <= min(seconds) * _FINALISTS_WITHIN]
    if len(near) == 1 or short == list(rows):
        return settings[seconds.index(min(seconds))]
    return min(near, key=lambda setting: _seconds_per_row(engine, rows, setting))


def distinct_settings(settings: Sequence[Mapping[str, int]], rows: int) -> list[Mapping[str, int]]:
    """Those that differ on this many rows: a batch larger than the first that holds all rows is the same again."""
    found: dict[tuple[tuple[str, int], ...], Mapping[str, int]] = {}
    for setting in settings:
        capped = {key: min(value, rows) if key == "batch" else value for key, value in setting.items()}
        found.setdefault(tuple(sorted(capped.items())), setting)
    return list(found.values())


def _seconds_per_row(engine: BenchEngine, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> float:
    return engine.generate(rows, setting).seconds / len(rows)


def _some_batches(rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Sequence[BenchRow]:
    """Of every `_OF_BATCHES` batches or fewer the one in their middle, or two of an even number; all rows without
    batches. The longest come first, as engines with batches take them.
    """
    if "batch" not in setting:
        return rows
    size, prompt_first = setting["batch"], "prompt_first" in setting
    lengths = [(-row.max_new, -len(row.ids)) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: lengths[i][::-1] if prompt_first else lengths[i])
    batches = [order[begin : begin + size] for begin in range(0, len(order), size)]
    runs = -(-len(batches) // _OF_BATCHES)
    tried = []
    for i in range(runs):
        run = batches[len(batches) * i // runs : len(batches) * (i + 1) // runs]
        tried += run[(len(run) - 1) // 2 : len(run) // 2 + 1]
    return [rows[i] for batch in tried for i in batch]
