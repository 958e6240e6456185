"""Engines at work on workloads: each in a process of its own, or, in a toy run, in this one."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from batchgen.job.bench.engines import peer_tools
from batchgen.job.bench.peers import PEERS, EngineSource
from batchgen.job.bench.process import BenchEngine, EngineProcess, Generated, LoadSpec
from batchgen.job.bench.workloads import Workload
from tests.gpu.lab import Lab
from tests.gpu.outcomes import Absent

__all__ = ["Rate", "best_within", "peer", "rate", "start"]

WARM_UP, PROBE = 1 / 64, 1 / 16
"""Parts of a workload that are run before it: to compile and capture, and to see how much of it there is time for."""
SLACK = 0.8


@dataclass(frozen=True, slots=True)
class Rate:
    """One engine on one part of a workload."""

    tokens_per_second: float
    seconds: float
    factor: float
    counted: Mapping[str, int]


def start(lab: Lab, source: EngineSource, spec: LoadSpec, lifetime: float) -> AbstractContextManager[BenchEngine]:
    """An engine with its model loaded, which is ended after `lifetime` seconds wherever it is.

    Raises:
        EngineFailed: it does not load, or not in time.
    """
    return _here(source, spec) if lab.toy else EngineProcess(source, spec, max(1.0, lifetime))


def peer(name: str) -> EngineSource:
    """A peer that this Python has.

    Raises:
        Absent: it has not.
    """
    if find_spec(PEERS[name]) is None:
        raise Absent(f"{name}: {PEERS[name]} is not importable")
    return EngineSource(name)


def rate(engine: BenchEngine, workload: Workload, factor: float, setting: Mapping[str, int], vocab: int) -> Rate:
    """Run about `factor` of a workload.

    Raises:
        EngineFailed: the engine failed, or generated less than was asked for.
    """
    part, made = workload.part(factor)
    rows = part.rows(vocab)
    found = engine.generate(rows, setting)
    asked = sum(row.max_new * row.samples for row in rows)
    assert found.tokens == asked, f"{engine.name} generated {found.tokens} of {asked} tokens"
    return Rate(found.tokens / found.seconds, found.seconds, made, found.counted)


def best_within(
    engine: BenchEngine, workload: Workload, setting: Mapping[str, int], vocab: int, seconds: float
) -> Rate:
    """Run as much of a workload as fits into the time, warmed up first; all of it at most."""
    end = time.monotonic() + seconds
    rate(engine, workload, WARM_UP, setting, vocab)
    probe = rate(engine, workload, PROBE, setting, vocab)
    left = SLACK * (end - time.monotonic())
    factor = min(1.0, probe.factor * left / probe.seconds)
    return rate(engine, workload, factor, setting, vocab) if factor > probe.factor else probe


@contextmanager
def _here(source: EngineSource, spec: LoadSpec) -> Iterator[BenchEngine]:
    yield _Here(source, spec)


class _Here:
    """The engine that a process would hold."""

    def __init__(self, source: EngineSource, spec: LoadSpec) -> None:
        sys.modules.setdefault("peer_tools", peer_tools)  # as the worker lends it to the scripts
        module = importlib.import_module(f"batchgen.job.bench.engines.{source.script}")
        self._engine = module.load(asdict(spec))
        told = self._engine.describe()
        self.name, self.version = source.name, self._engine.version
        self.dtype: str = told["dtype"]
        self.device: str = told["device"]
        self.threads: int = told["threads"]
        self.settings: list[dict[str, int]] = told["settings"]

    def generate(self, rows: Sequence[Any], setting: Mapping[str, int]) -> Generated:
        begin = time.perf_counter()
        outputs, counted = self._engine.generate([asdict(row) for row in rows], dict(setting))
        return Generated(outputs, time.perf_counter() - begin, 0.0, counted)
