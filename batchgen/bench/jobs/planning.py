"""`batchgen bench plan`: time and memory of planning a large job, without a model.

Random prompts are written block by block to a temporary file of token ids, as a job does after tokenising, and planned
from its memory map.
"""

from __future__ import annotations

import multiprocessing
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from batchgen.bench.machine import machine
from batchgen.data.spool import TokenSpool
from batchgen.errors import UsageError
from batchgen.plan.estimate import find_dedup, plan_counts
from batchgen.plan.scheduler import Scheduler, SchedulerConfig
from batchgen.plan.sort import sort_prompts
from batchgen.plan.tree import tree_of_sorted

Int32s = npt.NDArray[np.int32]
UInt64s = npt.NDArray[np.uint64]

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
        size = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text)
        if not size:
            raise UsageError(f"--plan-size must be ROWSxTOKENS, for example 1000000x500, got {text!r}")
        return PlanSize(int(size[1]), int(size[2]))


def plan_lines(size: PlanSize) -> Iterator[dict[str, Any]]:
    """Plan every shape at this size and return its JSON line.

    Each shape is planned in a separate process, so that memory freed after generating the ids does not distort the
    measured peak.
    """
    for shape in PLAN_SHAPES:
        with (
            tempfile.TemporaryDirectory(prefix="batchgen-plan-") as scratch,
            TokenSpool(Path(scratch) / "tokens.spool") as spool,
            ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process,
        ):
            for block in draw_prompts(shape, size):
                spool.append(block)
            spool.ids()  # flushes the file
            line = process.submit(_measure, shape, size, spool.path).result()
        yield line


def _measure(shape: str, size: PlanSize, path: Path) -> dict[str, Any]:
    """Time, memory and counts of planning the prompts of a shape, whose ids are in the file `path`.

    `distinct_tokens` is what a run computes, `seconds` the sum of the phases, `scratch_bytes` the peak of the memory in
    addition to the ids; None if the system does not report it (not Linux).
    """
    tokens = np.memmap(path, np.int32, mode="r").view(np.ndarray)
    offsets = np.arange(size.rows + 1, dtype=np.int64) * size.tokens
    samples, limits = np.ones(size.rows, np.int32), np.full(size.rows, _MAX_NEW_TOKENS, np.int32)
    phases: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        phases[name] = time.perf_counter() - began

    cpu = time.process_time()
    with _anonymous_memory() as memory:
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
    about = machine()
    return {
        "workload": "plan",
        "shape": shape,
        "rows": size.rows,
        "tokens": tree.prompt_tokens,
        "distinct_tokens": tree.distinct_tokens,
        "nodes": len(tree),
        "kv_peak_pages": counts.kv_peak_pages,
        "page_waste": round(counts.page_waste, 6),
        "seconds": round(sum(phases.values()), 3),
        "phases": {name: round(seconds, 3) for name, seconds in phases.items()},
        "cpu_seconds": round(time.process_time() - cpu, 3),
        "processors": about.pop("processors"),
        "ids_bytes": tokens.nbytes,
        "scratch_bytes": max(memory) - memory[0] if memory else None,
        **about,
    }


@contextmanager
def _anonymous_memory() -> Iterator[list[int]]:
    """Resident bytes without file mappings while the block runs, at short intervals; empty if not on Linux."""
    process, ended = psutil.Process(), threading.Event()
    samples: list[int] = []

    def sample() -> None:
        memory = process.memory_info()
        if hasattr(memory, "shared"):
            samples.append(memory.rss - memory.shared)

    def watch() -> None:
        while not ended.wait(0.01):
            sample()

    sample()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def draw_prompts(shape: str, size: PlanSize) -> Iterator[Int32s]:
    """Ids of a shape's prompts, flat, block by block; deterministic for a shape and size."""
    draw = PLAN_SHAPES[shape]
    step = max(1, _BLOCK // size.tokens)
    position = np.arange(size.tokens, dtype=np.uint64)
    for begin in range(0, size.rows, step):
        rows = np.arange(begin, min(begin + step, size.rows), dtype=np.uint64)
        yield draw(rows, position, size).reshape(-1)


def _common_roots(rows: UInt64s, position: UInt64s, size: PlanSize) -> Int32s:
    """Prompts with a common prefix of four fifths of their length for every 1,000 rows, then distinct ids."""
    roots = np.uint64(max(1, size.rows // 1000))
    source = np.where(position < size.tokens * 4 // 5, (_hash(rows) % roots)[:, None], rows[:, None] + roots)
    return _ids(source, position)


def _deep_tree(rows: UInt64s, position: UInt64s, size: PlanSize) -> Int32s:
    """Leaves of a tree of ten levels, in mixed order."""
    width = np.uint64(max(2, round(size.rows ** (1 / _TREE_LEVELS))))
    level = np.minimum(position * np.uint64(_TREE_LEVELS) // np.uint64(size.tokens), np.uint64(_TREE_LEVELS - 1))
    leaf = _hash(rows) % width ** np.uint64(_TREE_LEVELS)
    above = leaf[:, None] // (width ** (np.uint64(_TREE_LEVELS - 1) - level))[None, :]
    return _ids(above, position)


def _same(rows: UInt64s, position: UInt64s, size: PlanSize) -> Int32s:
    """The same prompt in every row."""
    return _ids(np.zeros((len(rows), 1), np.uint64), position)


def _near_duplicates(rows: UInt64s, position: UInt64s, size: PlanSize) -> Int32s:
    """The same prompt in every row, with two ids changed at random positions."""
    ids = _same(rows, position, size)
    for change in range(2):
        random = _hash(rows * np.uint64(2) + np.uint64(change))
        positions = (random % np.uint64(size.tokens)).astype(np.int64)
        ids[np.arange(len(rows)), positions] = (random >> np.uint64(32)) % np.uint64(_VOCABULARY)
    return ids


PLAN_SHAPES: dict[str, Callable[[UInt64s, UInt64s, PlanSize], Int32s]] = {
    "common-roots": _common_roots,
    "deep-tree": _deep_tree,
    "identical": _same,
    "unshared": lambda rows, position, _: _ids(rows[:, None], position),  # but by chance
    "near-duplicates": _near_duplicates,
}
"""Shape -> function from row numbers [R] and positions [T] to ids [R, T], in order of measurement."""


def _ids(source: UInt64s, position: UInt64s) -> Int32s:
    """[R, T] ids: the hash of each segment number in `source` and position."""
    mixed = _hash(source) + (position * np.uint64(0x9E3779B97F4A7C15))[None, :]
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(33)) % np.uint64(_VOCABULARY)).astype(np.int32)


def _hash(values: UInt64s) -> UInt64s:
    mixed = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    return mixed ^ (mixed >> np.uint64(32))
