"""`batchgen bench plan`: time and memory of planning a large job, without a model.

Random prompts are written block by block to a temporary file of token ids, as a job does after tokenising, and planned
from its memory map.
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

from batchgen.bench.machine import commit_name, cpu_name, processors
from batchgen.data.write.spool import TokenSpool
from batchgen.errors import UsageError
from batchgen.plan.estimate import find_dedup, plan_counts
from batchgen.plan.scheduler import Scheduler, SchedulerConfig
from batchgen.plan.sort import sort_prompts
from batchgen.plan.tree import tree_of_sorted

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_VOCABULARY = 32_000
_BLOCK = 1 << 22
"""Number of ids generated at a time."""
_TREE_LEVELS = 10
"""Number of levels of shape "deep-tree"."""
_MAX_NEW_TOKENS = 64
_PAGE_SIZE = 16
_MAX_NUM_SEQS = 256


@dataclass(frozen=True, slots=True)
class PlanSize:
    """Number of prompts and number of ids of each."""

    rows: int = 1_000_000
    tokens: int = 500

    @staticmethod
    def parse(text: str) -> PlanSize:
        """Read `ROWSxTOKENS`.

        Raises:
            UsageError: the text does not have that form.
        """
        found = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text)
        if not found:
            raise UsageError(f"--plan-size must be ROWSxTOKENS, for example 1000000x500, got {text!r}")
        return PlanSize(int(found[1]), int(found[2]))


@dataclass(frozen=True, slots=True)
class PlanFigure:
    """Time, memory and counts of planning one shape."""

    workload: str
    shape: str
    rows: int
    tokens: int
    distinct_tokens: int
    """Number of prompt tokens that a run computes."""
    nodes: int
    kv_peak_pages: int
    page_waste: float
    seconds: float
    """Sum of all phases."""
    phases: dict[str, float]
    cpu_seconds: float
    processors: int
    """Number of processors that this process may run on."""
    ids_bytes: int
    """Size of the token ids, which are memory-mapped."""
    scratch_bytes: int | None
    """Peak memory of planning in addition to the ids; None if the system does not report it (not Linux)."""
    cpu: str
    commit: str | None

    def to_json(self) -> str:
        """One JSON line."""
        return json.dumps(asdict(self))


def run_plan_bench(size: PlanSize, emit: Callable[[str], None]) -> list[PlanFigure]:
    """Plan every shape at this size and pass one JSON line for each to `emit`.

    Each shape is planned in a separate process, so that memory freed after generating the ids does not distort the
    measured peak.

    Args:
        size: number and length of the prompts.
        emit: called with each JSON line.
    """
    figures = []
    for shape in PLAN_SHAPES:
        with (
            tempfile.TemporaryDirectory(prefix="batchgen-plan-") as scratch,
            TokenSpool(Path(scratch) / "tokens.spool") as spool,
            ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process,
        ):
            for block in draw_prompts(shape, size):
                spool.append(block)
            spool.ids()  # flushes the file
            figures.append(process.submit(_measure_file, shape, size, spool.path).result())
        emit(figures[-1].to_json())
    return figures


def _measure_file(shape: str, size: PlanSize, path: Path) -> PlanFigure:
    return measure_planning(shape, size, np.memmap(path, np.int32, mode="r").view(np.ndarray))


def measure_planning(shape: str, size: PlanSize, tokens: Int32s) -> PlanFigure:
    """Measure planning of prompts of equal length.

    Args:
        shape: name of the shape.
        size: number and length of the prompts.
        tokens: [rows * tokens] ids.
    """
    offsets = np.arange(size.rows + 1, dtype=np.int64) * size.tokens
    samples, limits = np.ones(size.rows, np.int32), np.full(size.rows, _MAX_NEW_TOKENS, np.int32)
    phases: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        phases[name] = time.perf_counter() - began

    cpu = time.process_time()
    with _AnonymousMemoryPeak() as memory:
        with phase("sort"):
            order, shared = sort_prompts(tokens, offsets)
        with phase("tree"):
            tree = tree_of_sorted(offsets, order, shared)
        with phase("dedup"):
            find_dedup(tree.node_of_request, np.zeros(size.rows, np.int32), samples > 0, limits)
        with phase("counts"):
            counts = plan_counts(tree, samples, limits, _PAGE_SIZE, _MAX_NUM_SEQS)
        with phase("scheduler"):
            pages = counts.kv_peak_pages + 2
            Scheduler(tree, samples, limits, SchedulerConfig(pages, _PAGE_SIZE, _MAX_NUM_SEQS, 2048))
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
        processors=processors(),
        ids_bytes=tokens.nbytes,
        scratch_bytes=memory.bytes,
        cpu=cpu_name(),
        commit=commit_name(),
    )


class _AnonymousMemoryPeak:
    """Context manager that measures the peak increase of the process's anonymous memory. Linux only."""

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _AnonymousMemoryPeak:
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
    """Resident memory without file mappings, in bytes; None if the system does not report it."""
    try:
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except OSError:
        return None
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def draw_prompts(shape: str, size: PlanSize) -> Iterator[Int32s]:
    """Ids of a shape's prompts, flat, block by block; deterministic for a shape and size."""
    draw = PLAN_SHAPES[shape]
    step = max(1, _BLOCK // size.tokens)
    position = np.arange(size.tokens, dtype=np.uint64)
    for begin in range(0, size.rows, step):
        rows = np.arange(begin, min(begin + step, size.rows), dtype=np.uint64)
        yield draw(rows, position, size).reshape(-1)


def _common_roots(rows: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64], size: PlanSize) -> Int32s:
    """Prompts with a common prefix of four fifths of their length for every 1,000 rows, then distinct ids."""
    roots = np.uint64(max(1, size.rows // 1000))
    source = np.where(position < size.tokens * 4 // 5, (_hash(rows) % roots)[:, None], rows[:, None] + roots)
    return _ids(source, position)


def _deep_tree(rows: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64], size: PlanSize) -> Int32s:
    """Leaves of a tree of ten levels, in mixed order."""
    width = np.uint64(max(2, round(size.rows ** (1 / _TREE_LEVELS))))
    level = np.minimum(position * np.uint64(_TREE_LEVELS) // np.uint64(size.tokens), np.uint64(_TREE_LEVELS - 1))
    leaf = _hash(rows) % width ** np.uint64(_TREE_LEVELS)
    above = leaf[:, None] // (width ** (np.uint64(_TREE_LEVELS - 1) - level))[None, :]
    return _ids(above, position)


def _identical(rows: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64], size: PlanSize) -> Int32s:
    """The same prompt in every row."""
    return _ids(np.zeros((len(rows), 1), np.uint64), position)


def _unshared(rows: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64], size: PlanSize) -> Int32s:
    """Prompts that share nothing, except by chance."""
    return _ids(rows[:, None], position)


def _near_duplicates(rows: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64], size: PlanSize) -> Int32s:
    """The same prompt in every row, with two ids changed at random positions."""
    ids = _identical(rows, position, size)
    for change in range(2):
        random = _hash(rows * np.uint64(2) + np.uint64(change))
        positions = (random % np.uint64(size.tokens)).astype(np.int64)
        ids[np.arange(len(rows)), positions] = (random >> np.uint64(32)) % np.uint64(_VOCABULARY)
    return ids


PLAN_SHAPES: dict[str, Callable[[npt.NDArray[np.uint64], npt.NDArray[np.uint64], PlanSize], Int32s]] = {
    "common-roots": _common_roots,
    "deep-tree": _deep_tree,
    "identical": _identical,
    "unshared": _unshared,
    "near-duplicates": _near_duplicates,
}
"""Shape -> function from row numbers [R] and positions [T] to ids [R, T], in order of measurement."""


def _ids(source: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64]) -> Int32s:
    """[R, T] ids: the hash of each segment number in `source` and position."""
    mixed = _hash(source) + (position * np.uint64(0x9E3779B97F4A7C15))[None, :]
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(33)) % np.uint64(_VOCABULARY)).astype(np.int32)


def _hash(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    mixed = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    return mixed ^ (mixed >> np.uint64(32))
