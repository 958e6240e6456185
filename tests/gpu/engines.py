"""Runs engines on workloads, each in a separate process, or in this process in a toy run."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

from batchgen.bench.process import PEERS, BenchEngine, EngineProcess, EngineSource, Generated, LoadSpec
from batchgen.bench.workloads import Workload
from tests.gpu.device import Gpu
from tests.gpu.outcomes import Absent

WARM_UP, PROBE = 1 / 64, 1 / 16
"""Parts of a workload that are run first: to compile and capture, and to estimate how much of it fits into the time."""
SLACK = 0.8
"""Share of the remaining time to plan for."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Throughput of one engine on a part of a workload."""

    tokens_per_second: float
    seconds: float
    factor: float
    """The part that was run; 1: all of it."""
    counted: Mapping[str, int]


def start(gpu: Gpu, source: EngineSource, spec: LoadSpec, lifetime: float) -> AbstractContextManager[BenchEngine]:
    """An engine with its model loaded; its process is killed after `lifetime` seconds.

    Raises:
        EngineFailed: it does not load, or not in time.
    """
    return _in_process(source, spec) if gpu.toy else EngineProcess(source, spec, max(1.0, lifetime))


def peer(name: str) -> EngineSource:
    """The source of another engine, if its package is importable.

    Raises:
        Absent: it is not importable.
    """
    missing = [module for module in PEERS[name].modules if find_spec(module) is None]
    if missing:
        raise Absent(f"{name}: {missing[0]} is not importable")
    return EngineSource(name)


def part_of(workload: Workload, factor: float, least_rows: int = 256) -> tuple[Workload, float]:
    """A smaller workload with about `factor` of the output, and the exact share.

    Reduces the children of the last level first, to no fewer than `least_rows` samples, which keep a device busy; then
    the output lengths.
    """
    leaves = workload.levels[-1].children
    others = workload.samples * math.prod(level.children for level in workload.levels[:-1])
    children = min(leaves, max(1, round(leaves * factor), -(-least_rows // others)))
    output_factor = min(1.0, factor * leaves / children)
    low, high = (max(1, round(tokens * output_factor)) for tokens in workload.output)
    levels = (*workload.levels[:-1], replace(workload.levels[-1], children=children))
    share = children / leaves * (low + high) / sum(workload.output)
    return replace(workload, levels=levels, output=(low, high)), share


def rate(engine: BenchEngine, workload: Workload, factor: float, setting: Mapping[str, int], vocab: int) -> Rate:
    """Run about `factor` of a workload.

    Raises:
        EngineFailed: the engine failed.
        AssertionError: it generated fewer tokens than requested.
    """
    part, made = part_of(workload, factor)
    rows = part.rows(vocab)
    found = engine.generate(rows, setting)
    requested = sum(row.max_new * row.samples for row in rows)
    assert found.tokens == requested, f"{engine.name} generated {found.tokens} of {requested} tokens"
    return Rate(found.tokens / found.seconds, found.seconds, made, found.counted)


def best_within(
    engine: BenchEngine, workload: Workload, setting: Mapping[str, int], vocab: int, seconds: float
) -> Rate:
    """Warm up, then run as much of a workload as fits into `seconds`, at most all of it."""
    end = time.monotonic() + seconds
    rate(engine, workload, WARM_UP, setting, vocab)
    probe = rate(engine, workload, PROBE, setting, vocab)
    left = SLACK * (end - time.monotonic())
    factor = min(1.0, probe.factor * left / probe.seconds)
    return rate(engine, workload, factor, setting, vocab) if factor > probe.factor else probe


@contextmanager
def _in_process(source: EngineSource, spec: LoadSpec) -> Iterator[BenchEngine]:
    yield _InProcessEngine(source, spec)


class _InProcessEngine:
    """An engine in this process, with the interface of `EngineProcess`."""

    def __init__(self, source: EngineSource, spec: LoadSpec) -> None:
        module = importlib.import_module(f"batchgen.bench.engines.{source.script}")
        self._engine = module.Engine({"engine": source.name, **asdict(spec)})
        self.name, self.version = source.name, self._engine.version
        self.dtype: str = self._engine.dtype
        self.device: str = self._engine.device
        self.threads: int = self._engine.threads
        self.settings: list[dict[str, int]] = list(self._engine.settings)

    def generate(self, rows: Sequence[Any], setting: Mapping[str, int]) -> Generated:
        sent = [asdict(row) for row in rows]
        self._engine.prepare(sent, dict(setting))
        begin = time.perf_counter()
        outputs, counted = self._engine.generate(sent, dict(setting))
        return Generated(outputs, time.perf_counter() - begin, 0.0, counted)
