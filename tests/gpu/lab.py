"""Where checks and benchmarks run: the device, its clock, its random numbers, and the operations under test."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from batchgen.kernels.types import PagedAttention
from tests.gpu.compare import not_waiting
from tests.gpu.under_test import flash_attention, torch_attention, triton_attention
from tests.kernels.steps import Step

__all__ = ["Lab", "Timing"]

RUNS = 20
WARM_UPS = 3
TOY_RUNS = 2
_FLUSH_BYTES = 256 << 20
"""Written between runs: several times any chip's L2."""
_SPIN_CYCLES = 400_000
"""A GPU kept busy this long (about 0.2 ms) lets the host finish enqueueing before the clock starts."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of the median run and of the 20th and 80th percentiles."""

    p20: float
    p50: float
    p80: float
    runs: int
    how: str
    """"graph": replays of a CUDA graph; "eager": launches, with the host ahead; "wall": a toy's wall clock."""


@dataclass
class Lab:
    """A device and all that cases draw on."""

    device: torch.device
    toy: bool
    flash_path: str = ""
    """A flash library that is not installed; empty: none."""
    copy_rate: float = 0.0
    """Bytes per second read plus written by a large copy, once measured."""
    matmul_rate: float = 0.0
    """bfloat16 operations per second of a large product, once measured."""
    deadline: float = math.inf
    """When, by `time.monotonic`, the stage under way begins no more cases."""
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What one benchmark measured for others to compare with."""
    _flush: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator(self.device).manual_seed(0)

    def attention(self, name: str, step: Step) -> PagedAttention:
        """A step's attention by the backend "triton", "flash" or "torch".

        Raises:
            Missing: Triton's is not in this build.
            Absent: the flash library is not on this machine, or does not take such heads.
        """
        if name == "flash":
            return flash_attention(step, self.flash_path, self.toy)
        return triton_attention(step) if name == "triton" else torch_attention(step)

    def seed(self, number: int) -> None:
        """Begin a case: its numbers do not depend on which ran before."""
        self._generator.manual_seed(number)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal numbers, drawn in float32."""
        return torch.randn(*shape, generator=self._generator, device=self.device).to(dtype)

    def rand(self, *shape: int) -> Tensor:
        """Uniform float32 numbers in [0, 1)."""
        return torch.rand(*shape, generator=self._generator, device=self.device)

    def randint(self, low: int, high: int, *shape: int) -> Tensor:
        """Uniform int64 numbers in [low, high)."""
        return torch.randint(low, high, shape, generator=self._generator, device=self.device)

    def distinct(self, high: int, rows: int, count: int) -> Tensor:
        """[rows, count] int64 below `high`, none twice in a row."""
        return self.rand(rows, high).argsort(-1)[:, :count].contiguous()

    def left(self) -> float:
        """Seconds that the stage under way has left."""
        return self.deadline - time.monotonic()

    @property
    def aimed_at(self) -> bool:
        """Whether this is the device whose floors and goals are known; a toy pretends to be."""
        return self.toy or (self.device.type == "cuda" and "H200" in torch.cuda.get_device_name(self.device))

    def synchronize(self) -> None:
        """Wait for the device, so that a fault shows where it arose."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Give the device back what the last case took."""
        gc.collect()  # engines hold themselves in circles
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def time(self, run: Callable[[], object], *, graph: bool = True) -> Timing:
        """Time `run` with a cold L2.

        Args:
            run: does the same work every time; may allocate.
            graph: whether to replay it as a CUDA graph where it can be captured, as the engine's decode steps do:
                launches then cost the host nothing.
        """
        if self.device.type != "cuda":
            return self._wall(run)
        for _ in range(WARM_UPS):
            run()
        self.synchronize()
        replay = self._captured(run) if graph else None
        if replay is not None:
            replay()
        return self._events(replay or run, "graph" if replay else "eager")

    def _wall(self, run: Callable[[], object]) -> Timing:
        taken = []
        for _ in range(TOY_RUNS):
            begin = time.perf_counter()
            run()
            taken.append((time.perf_counter() - begin) * 1e6)
        return _timing(taken, "wall")

    def _captured(self, run: Callable[[], object]) -> Callable[[], object] | None:
        """`run` as a graph's replay; None where it waits for the device, which no capture allows."""
        graph = torch.cuda.CUDAGraph()
        try:
            with not_waiting():  # asked first: a capture that fails leaves torch's allocator out of order
                run()
            with torch.cuda.graph(graph):
                run()
        except RuntimeError:
            self.synchronize()
            return None
        return graph.replay

    def _events(self, run: Callable[[], object], how: str) -> Timing:
        if self._flush is None:
            self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        pairs = []
        for _ in range(RUNS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            torch.cuda._sleep(_SPIN_CYCLES)
            begin.record()
            run()
            end.record()
            pairs.append((begin, end))
        self.synchronize()
        return _timing([begin.elapsed_time(end) * 1e3 for begin, end in pairs], how)


def _timing(microseconds: list[float], how: str) -> Timing:
    ordered = sorted(microseconds)
    last = len(ordered) - 1
    return Timing(
        p20=ordered[round(0.2 * last)],
        p50=statistics.median(ordered),
        p80=ordered[round(0.8 * last)],
        runs=len(ordered),
        how=how,
    )
