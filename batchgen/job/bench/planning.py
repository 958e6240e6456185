"""`batchgen bench plan`: how long the planner takes for a large job, and what it holds meanwhile. No model is involved.

The prompts of a shape are drawn block by block into a scratch file of token ids, as a job's tokeniser leaves them, and
planned from its memory map.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batchgen.data.spool import TokenSpool
from batchgen.errors import UsageError
from batchgen.job.bench.machine import commit_name, cpu_name
from batchgen.plan.estimate import find_dedup, plan_counts
from batchgen.plan.scheduler import Scheduler, SchedulerConfig
from batchgen.plan.sort import sort_prompts
from batchgen.plan.tree import tree_of_sorted

__all__ = ["PLAN_SHAPES", "PlanFigure", "PlanSize", "draw_prompts", "measure_planning", "run_plan_bench"]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_VOCABULARY = 32_000
_BLOCK = 1 << 22
"""Ids drawn at once."""
_LEVELS = 10
"""Of the deep tree."""
_NEW = 64
"""Most tokens generated after a prompt."""
_PAGE = 16
_SEQUENCES = 256


@dataclass(frozen=True, slots=True)
class PlanSize:
    """Prompts and the ids of each."""

    rows: int = 1_000_000
    tokens: int = 500

    @staticmethod
    def parse(text: str) -> PlanSize:
        """Read `ROWSxTOKENS`.

        Raises:
            UsageError: it is not of that form.
        """
        found = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text)
        if not found:
            raise UsageError(f"--plan-size must be ROWSxTOKENS, as 1000000x500; got {text!r}")
        return PlanSize(int(found[1]), int(found[2]))


@dataclass(frozen=True, slots=True)
class PlanFigure:
    """One shape, planned."""

    workload: str
    shape: str
    rows: int
    tokens: int
    distinct_tokens: int
    """The prompt tokens that a run computes."""
    nodes: int
    kv_peak_pages: int
    page_waste: float
    seconds: float
    """Of all phases together."""
    phases: dict[str, float]
    cpu_seconds: float
    processors: int
    """Processors that this process may run on."""
    ids_bytes: int
    """Token ids, mapped from disk."""
    scratch_bytes: int | None
    """Most memory that planning took beside them; None where the system does not tell (no Linux)."""
    cpu: str
    commit: str | None

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def run_plan_bench(size: PlanSize, emit: Callable[[str], None], folder: Path | None = None) -> list[PlanFigure]:
    """Plan every shape at this size, one JSON line each to `emit`. The ids stand in `folder` (or the system's own).

    Each is planned in a process of its own, so that memory left over from drawing the ids does not hide what it takes.
    """
    figures = []
    for shape in PLAN_SHAPES:
        with (
            tempfile.TemporaryDirectory(prefix="batchgen-plan-", dir=folder) as scratch,
            TokenSpool(Path(scratch) / "tokens.spool") as spool,
            ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process,
        ):
            for block in draw_prompts(shape, size):
                spool.append(block)
            spool.map()  # all written
            figures.append(process.submit(_measure_file, shape, size, spool.path).result())
        emit(figures[-1].to_json())
    return figures


def _measure_file(shape: str, size: PlanSize, path: Path) -> PlanFigure:
    return measure_planning(shape, size, np.memmap(path, np.int32, mode="r").view(np.ndarray))


def measure_planning(shape: str, size: PlanSize, tokens: Int32s) -> PlanFigure:
    """Plan prompts of equal length, given flat ids [rows * tokens]."""
    offsets = np.arange(size.rows + 1, dtype=np.int64) * size.tokens
    samples, limits = np.ones(size.rows, np.int32), np.full(size.rows, _NEW, np.int32)
    phases: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        phases[name] = time.perf_counter() - began

    cpu = time.process_time()
    with _AnonymousPeak() as memory:
        with phase("sort"):
            order, shared = sort_prompts(tokens, offsets)
        with phase("tree"):
            tree = tree_of_sorted(offsets, order, shared)
        with phase("dedup"):
            find_dedup(tree.node_of_request, np.zeros(size.rows, np.int32), samples > 0, limits)
        with phase("counts"):
            counts = plan_counts(tree, samples, limits, _PAGE, _SEQUENCES)
        with phase("scheduler"):
            pages = counts.kv_peak_pages + 2
            Scheduler(tree, samples, limits, SchedulerConfig(pages, _PAGE, _SEQUENCES, 2048))
    return PlanFigure(
        workload="plan",
        shape=shape,
        rows=size.rows,
        tokens=tree.prompt_tokens,
        distinct_tokens=tree.distinct_tokens,
        nodes=len(tree),
        kv_peak_pages=counts.kv_peak_pages,
        page_waste=round(counts.page_waste, 6),
        seconds=round(sum(phases.values()), 3),
        phases={name: round(seconds, 3) for name, seconds in phases.items()},
        cpu_seconds=round(time.process_time() - cpu, 3),
        processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        ids_bytes=tokens.nbytes,
        scratch_bytes=memory.bytes,
        cpu=cpu_name(),
        commit=commit_name(),
    )


class _AnonymousPeak:
    """Watches how much memory of its own (no mapped file) the process takes beyond what it had. Linux only."""

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _AnonymousPeak:
        self._before = _anonymous_bytes()
        self._peak = self._before
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        if self._before is not None and self._peak is not None:
            self.bytes = self._peak - self._before

    def _watch(self) -> None:
        while True:
            now = _anonymous_bytes()
            if now is not None and self._peak is not None:
                self._peak = max(self._peak, now)
            if self._end.wait(0.01):
                return


def _anonymous_bytes() -> int | None:
    """Resident memory less what is mapped from files."""
    try:
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except OSError:
        return None
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def draw_prompts(shape: str, size: PlanSize) -> Iterator[Int32s]:
    """The flat ids of a shape's prompts, block by block; the same for the same shape and size."""
    draw = PLAN_SHAPES[shape]
    step = max(1, _BLOCK // size.tokens)
    position = np.arange(size.tokens, dtype=np.uint64)
    for begin in range(0, size.rows, step):
        rows = np.arange(begin, min(begin + step, size.rows), dtype=np.uint64)
        yield draw(rows, position, size).reshape(-1)


def _roots(rows: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64], size: PlanSize) -> Int32s:
    """A thousandth as many roots of four fifths of the length, with ends that differ."""
    roots = np.uint64(max(1, size.rows // 1000))
    source = np.where(position < size.tokens * 4 // 5, (_hash(rows) % roots)[:, None], rows[:, None] + roots)
    return _ids(source, position)


def _deep(rows: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64], size: PlanSize) -> Int32s:
    """Leaves of a tree of ten levels; rows of all branches stand mixed."""
    width = np.uint64(max(2, round(size.rows ** (1 / _LEVELS))))
    level = np.minimum(position * np.uint64(_LEVELS) // np.uint64(size.tokens), np.uint64(_LEVELS - 1))
    leaf = _hash(rows) % width ** np.uint64(_LEVELS)
    above = leaf[:, None] // (width ** (np.uint64(_LEVELS - 1) - level))[None, :]
    return _ids(above, position)


def _identical(rows: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64], size: PlanSize) -> Int32s:
    """One prompt over and over."""
    return _ids(np.zeros((len(rows), 1), np.uint64), position)


def _unshared(rows: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64], size: PlanSize) -> Int32s:
    """Nothing shared but by chance."""
    return _ids(rows[:, None], position)


def _near(rows: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64], size: PlanSize) -> Int32s:
    """One prompt with two ids changed, anywhere."""
    ids = _identical(rows, position, size)
    for change in range(2):
        drawn = _hash(rows * np.uint64(2) + np.uint64(change))
        places = (drawn % np.uint64(size.tokens)).astype(np.int64)
        ids[np.arange(len(rows)), places] = (drawn >> np.uint64(32)) % np.uint64(_VOCABULARY)
    return ids


PLAN_SHAPES: dict[str, Callable[[npt.NDArray[np.uint64], npt.NDArray[np.uint64], PlanSize], Int32s]] = {
    "common-roots": _roots,
    "deep-tree": _deep,
    "identical": _identical,
    "unshared": _unshared,
    "near-duplicates": _near,
}
"""In the order in which they are measured; each from row numbers [R] and positions [T] to ids [R, T]."""


def _ids(source: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64]) -> Int32s:
    """[R, T] an id for each pair of what a segment is named by and a position."""
    mixed = _hash(source) + (position * np.uint64(0x9E3779B97F4A7C15))[None, :]
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(33)) % np.uint64(_VOCABULARY)).astype(np.int32)


def _hash(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    mixed = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    return mixed ^ (mixed >> np.uint64(32))
