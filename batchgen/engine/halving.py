"""What is done when a step does not fit into the device's memory: it is run in parts, and what fits in no part fails.

Out of memory says nothing of whose fault it is. So the step is cut in two, each half is tried, and so on down: either
everything fits in smaller parts, and later steps begin smaller, or single tokens are left that do not fit even alone.
Their rows end in an error, and the job goes on.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import torch

from batchgen.errors import DeviceError
from batchgen.plan.split import split_plan
from batchgen.plan.tree import PrefixTree
from batchgen.plan.types import StepPlan

__all__ = ["Halver", "Part", "is_out_of_memory", "stranded"]

T = TypeVar("T")

_SIGNS: Final = (
    "out of memory",  # CUDA's own calls, Triton's launches
    "not enough memory",  # PyTorch's allocator for CPUs
    "can't allocate memory",  # the same, before
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_HOPELESS: Final = 3
"""Parts that failed alone, one after the other and no token drawn in between, until the device is at fault."""


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """Some of a step's tokens and samples, in their order."""

    plan: StepPlan
    result: T | None
    """None: it fits no memory, or continues what did not."""
    problem: str = ""
    """what the device said of a part that failed"""


class Halver:
    """Runs steps in as large parts as the device's memory takes.

    Args:
        page_size: S, positions of a page.
        max_tokens: most flat tokens of a step.
        release: called after a failure and before the next try, to give back what is held for later.
    """

    def __init__(self, page_size: int, max_tokens: int, release: Callable[[], None]) -> None:
        self.limit = max_tokens
        """Most flat tokens that are tried at once. Halved by every step that did not fit, but whose parts all did."""
        self.retries = 0
        """Tries that ran out of memory."""
        self._page_size = page_size
        self._release = release
        self._hopeless = 0
        self._drew = False

    def run(self, plan: StepPlan, run: Callable[[StepPlan], T]) -> list[Part[T]]:
        """Run a step, in parts where it has to be. No result may be None.

        Args:
            plan: the step; page copies are made, and sequences begun, before.
            run: runs a plan. When it has raised, it is called again with the same plan or its parts, and must be able
                to begin anew: writing keys and values twice is harmless, whatever else it did it has to undo.

        Returns:
            The parts, in order; their samples one after the other are the plan's.

        Raises:
            DeviceError: nothing gives a token any more, not even alone.
        """
        parts: list[Part[T]] = []
        waiting = [(plan, 0)]  # with the place of their first flat token in the step
        doomed = range(0)  # flat tokens of a chunk whose beginning failed
        tries, lost = self.retries, 0
        while waiting:
            part, at = waiting.pop()
            if at in doomed:
                if at + part.tokens > doomed.stop:
                    waiting += self._cut(part, at, doomed.stop - at)
                else:
                    parts.append(Part(part, None, parts[-1].problem))
                continue
            if part.tokens > self.limit:
                waiting += self._cut(part, at, self.limit)
                continue
            result, problem = _attempt(part, run)
            if result is not None:
                parts.append(Part(part, result))
                continue
            self.retries += 1
            gc.collect(1)  # frames of the failed try may hold one another, and its tensors
            self._release()
            halves = self._cut(part, at)
            waiting += halves
            if not halves:
                parts.append(Part(part, None, problem))
                lost += 1
                if part.prefills and part.prefills[0].store:
                    doomed = range(at, _chunk_end(plan, at))
        if self.retries > tries and not lost:
            self.limit = max(1, self.limit // 2)
        self._judge(parts, lost)
        return parts

    def _cut(self, part: StepPlan, at: int, tokens: int | None = None) -> list[tuple[StepPlan, int]]:
        """Both halves with their places, the one to run first last; none where nothing can be cut."""
        halves = split_plan(part, self._page_size, tokens)
        if halves is None:
            return []
        first, second = halves
        return [(second, at + part.tokens - second.tokens), (first, at)]

    def strand(self, rows: int, problem: str) -> None:
        """So many rows hang on a position that could not be computed.

        Raises:
            DeviceError: they are several, and no token was drawn before.
        """
        if not self._drew and rows >= _HOPELESS:
            raise _device_error(rows, problem)

    def _judge(self, parts: list[Part[T]], lost: int) -> None:
        """Give up where `lost` parts of this step, and those of the last ones, failed alone and no token came out."""
        for part in parts:
            if part.result is not None and part.plan.samples:
                self._hopeless, self._drew = 0, True
                return
        self._hopeless += lost
        if lost and self._hopeless >= _HOPELESS:
            raise _device_error(self._hopeless, next(part.problem for part in parts if part.result is None))


def _device_error(rows: int, problem: str) -> DeviceError:
    return DeviceError(
        f"the device ran out of memory for {rows} rows with nothing beside them, and gave no token meanwhile "
        f"({problem}); lower --kv-memory, or free memory that other processes hold"
    )


def _attempt(part: StepPlan, run: Callable[[StepPlan], T]) -> tuple[T | None, str]:
    """The part's result, or None and what the device said. By then nothing holds the tensors of the failed try."""
    try:
        return run(part), ""
    except (RuntimeError, MemoryError) as problem:
        if not is_out_of_memory(problem):
            raise
        return None, str(problem).strip().split("\n")[0][:200]


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether memory, the device's or the host's, did not suffice."""
    if isinstance(problem, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(problem, RuntimeError) and any(sign in str(problem) for sign in _SIGNS)


def _chunk_end(plan: StepPlan, at: int) -> int:
    """The flat token behind the chunk that flat token `at` belongs to."""
    end = 0
    for chunk in plan.prefills:
        end += chunk.end - chunk.start
        if at < end:
            return end
    raise AssertionError("a chunk holds the token")


def stranded(plan: StepPlan, tree: PrefixTree) -> list[int]:
    """Requests that can never be finished when `plan`, of one token, could not be run.

    Where the token's keys and values were to be stored, those are all whose prompts go through its position; for a
    sequence that was computed again, its own.
    """
    found: list[int] = []
    for chunk in plan.prefills:
        if not chunk.store:
            continue
        if chunk.sequence is not None:
            found.append(chunk.request)
            continue
        node = int(tree.node_of_request[chunk.request])
        while tree.start[node] > chunk.start:
            node = int(tree.parent[node])
        found += tree.order[int(tree.first_row[node]) : int(tree.last_row[node]) + 1].tolist()
    return found
