"""Out-of-memory recovery: a step that does not fit into memory is run in parts.

An out-of-memory error does not tell which row caused it. So the step is split in two, recursively. Either everything
fits in smaller parts, and later steps start smaller; or single tokens do not fit even alone, and their rows end with an
error while the job continues.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import torch

from batchgen.errors import DeviceError, ErrorCode, ErrorInfo
from batchgen.plan.spans import Spans
from batchgen.plan.step_plan import StepPlan, split_decodes, split_plan
from batchgen.plan.tree import PrefixTree


def out_of_memory(problem: str) -> ErrorInfo:
    """The error of a row that does not fit into memory."""
    remedy = "lower --kv-memory, --max-num-seqs or --max-tokens-per-step, or shorten the row"
    return ErrorInfo(ErrorCode.OOM, f"out of memory for this row even alone ({problem}); {remedy}")


T = TypeVar("T")

_OOM_MESSAGES: Final = (
    "out of memory",  # CUDA's own calls, Triton's launches
    "not enough memory",  # PyTorch's allocator for CPUs
    "can't allocate memory",  # PyTorch's allocator for CPUs, older wording
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_MAX_FAILURES: Final = 3
"""Consecutive parts that fail alone, without a sampled token in between, before the job stops."""


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """A part of a step: some of its tokens and samples, in order."""

    plan: StepPlan
    result: T | None
    """None: it does not fit into memory, or it continues a chunk that does not fit"""
    problem: str = ""
    """Message of the device if it failed"""


class OOMSplitter:
    """Runs steps in parts that are as large as the device's memory allows.

    Args:
        release: called after a failure and before the next try, to free cached memory.
        spans: spans of positions that no part may cut.
    """

    def __init__(
        self, page_size: int, max_tokens: int, release: Callable[[], None], spans: Spans | None = None
    ) -> None:
        self.limit = max_tokens
        """Most flat tokens that are tried at once; halved after each step that only fit in parts."""
        self.retries = 0
        """Number of tries that ran out of memory."""
        self._page_size = page_size
        self._spans = spans
        self._release = release
        self._failures = 0
        self._sampled_any = False

    def run(self, plan: StepPlan, run: Callable[[StepPlan], T], *, decodes_first: bool = False) -> list[Part[T]]:
        """Run a step, in parts if necessary: these in the order in which they ran.

        Args:
            plan: the step.
            run: runs a plan and must not return None. After an error it is called again with parts of the plan: writing
                keys and values twice is harmless, all other effects must be undone.
            decodes_first: run the decode rows as a part in front of the chunks; else flat tokens and samples keep their
                order.

        Raises:
            DeviceError: several parts failed alone without a sampled token in between.
        """
        parts: list[Part[T]] = []
        waiting = [(plan, 0)]  # (part, its first flat token in the step)
        if decodes_first:
            decodes, chunks = split_decodes(plan)
            waiting = [(chunks, 0), (decodes, chunks.tokens)]
        skipped = range(0)  # flat tokens of a chunk whose start failed
        tries, failed = self.retries, 0
        while waiting:
            part, at = waiting.pop()
            if at in skipped:
                if at + part.tokens > skipped.stop:
                    waiting += self._cut(part, at, skipped.stop - at)
                else:
                    parts.append(Part(part, None, parts[-1].problem))
                continue
            if part.tokens > self.limit:
                waiting += self._cut(part, at, self.limit)
                continue
            result, problem = _try_run(part, run)
            if result is not None:
                parts.append(Part(part, result))
                continue
            self.retries += 1
            gc.collect(1)  # frames of the failed try may form cycles that hold its tensors
            self._release()
            halves = self._cut(part, at)
            waiting += halves
            if not halves:
                parts.append(Part(part, None, problem))
                failed += 1
                if part.prefills and part.prefills[0].store:
                    skipped = range(at, _chunk_end(plan, at))
        if self.retries > tries and not failed:
            self.limit = max(1 if self._spans is None else self._spans.longest, self.limit // 2)
        self._check_failures(parts, failed)
        return parts

    def _cut(self, part: StepPlan, at: int, tokens: int | None = None) -> list[tuple[StepPlan, int]]:
        """Both halves with their first flat token, the first half last; empty if the part cannot be split."""
        halves = split_plan(part, self._page_size, tokens, self._spans)
        if halves is None:
            return []
        first, second = halves
        return [(second, at + part.tokens - second.tokens), (first, at)]

    def check_blocked(self, rows: int, problem: str) -> None:
        """Check `rows` requests that depend on a position that could not be computed.

        Raises:
            DeviceError: there are several, and no token was sampled before.
        """
        if not self._sampled_any and rows >= _MAX_FAILURES:
            raise _device_error(rows, problem)

    def _check_failures(self, parts: list[Part[T]], failed: int) -> None:
        """Raise if too many parts failed alone, in this step (`failed`) and the last ones, without a sampled token."""
        for part in parts:
            if part.result is not None and part.plan.samples:
                self._failures, self._sampled_any = 0, True
                return
        self._failures += failed
        if failed and self._failures >= _MAX_FAILURES:
            raise _device_error(self._failures, next(part.problem for part in parts if part.result is None))


def _device_error(rows: int, problem: str) -> DeviceError:
    message = f"the device ran out of memory for {rows} rows, each run alone, without producing a token ({problem}); "
    return DeviceError(f"{message}lower --kv-memory, or free memory that other processes use")


def _try_run(part: StepPlan, run: Callable[[StepPlan], T]) -> tuple[T | None, str]:
    """The part's result, or None and the device's message. After a failure, the try's tensors can be freed."""
    try:
        return run(part), ""
    except (RuntimeError, MemoryError) as problem:
        if not is_out_of_memory(problem):
            raise
        return None, str(problem).strip().split("\n")[0][:200]


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an exception is an out-of-memory error of the device or the host."""
    if isinstance(problem, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(problem, RuntimeError) and any(sign in str(problem) for sign in _OOM_MESSAGES)


def _chunk_end(plan: StepPlan, at: int) -> int:
    """The end of the chunk that contains flat token `at`."""
    end = 0
    for chunk in plan.prefills:
        end += chunk.end - chunk.start
        if at < end:
            return end
    raise AssertionError(f"no chunk contains flat token {at}")


def blocked_requests(plan: StepPlan, tree: PrefixTree) -> list[int]:
    """Requests that cannot be finished because `plan`, of one token, could not be run.

    If the token's keys and values were to be stored, these are all requests whose prompt contains the position; for a
    sequence that is recomputed, only its own request.
    """
    requests: list[int] = []
    for chunk in plan.prefills:
        if not chunk.store:
            continue
        if chunk.sequence is not None:
            requests.append(chunk.request)
            continue
        node = int(tree.node_of_request[chunk.request])
        while tree.start_of(node) > chunk.start:
            node = int(tree.parent[node])
        requests += tree.requests_below(node).tolist()
    return requests
