"""The device under test, with timing and random numbers; on the CPU it is a stand-in for one."""

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
from tests.gpu.compare import forbid_sync
from tests.gpu.under_test import flash_attention, torch_attention, triton_attention
from tests.kernels.numbers import Numbers
from tests.kernels.steps import Step

RUNS = 20
WARM_UP_RUNS = 3
TOY_RUNS = 2
_FLUSH_BYTES = 256 << 20
"""Bytes written between runs to flush the L2 cache: several times the size of any chip's L2."""
_SPIN_CYCLES = 400_000
"""Cycles of a spin kernel (about 0.2 ms), during which the host enqueues the timed work."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Times in microseconds: median, 20th and 80th percentile."""

    p20: float
    p50: float
    p80: float
    runs: int
    how: str
    """"graph": replays of a CUDA graph; "eager": launches, with the host ahead; "wall": wall clock of a toy run."""


@dataclass
class Gpu(Numbers):
    """The device of a run, with timing, random numbers and values shared between cases."""

    device: torch.device
    toy: bool
    flash_path: str = ""
    """Path of a flash library; empty: the installed one."""
    memory_rate: float = 0.0
    """Bytes per second, read plus written; 0 before it is measured."""
    matmul_rate: float = 0.0
    """bfloat16 operations per second of a large matrix product; 0 before it is measured."""
    deadline: float = math.inf
    """`time.monotonic` after which the current stage begins no more cases."""
    waiting: list[str] = field(default_factory=list)
    """Names of the current case and of those after it in the stage."""
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Values shared between cases, such as times that several benchmarks compare with."""
    _flush: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__init__(self.device)

    def attention(self, name: str, step: Step) -> PagedAttention:
        """A step's attention by the backend "triton", "flash" or "torch".

        Raises:
            Missing: the Triton backend cannot be imported.
            Absent: the flash library is not on this machine, or does not support these heads.
        """
        if name == "flash":
            return flash_attention(step, self.flash_path, self.toy)
        return triton_attention(step) if name == "triton" else torch_attention(step)

    def left(self) -> float:
        """Seconds left for the current stage."""
        return self.deadline - time.monotonic()

    @property
    def name(self) -> str:
        """Name of the device; in a toy run that of the device of the goals."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "toy H200"

    def synchronize(self) -> None:
        """Wait for the device, so that an error is raised by the case that caused it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Free the device memory of the last case."""
        gc.collect()  # engines are in reference cycles
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def time(self, run: Callable[[], object]) -> Timing:
        """Time `run` with a cold L2, replayed as a CUDA graph if possible, as the engine does with decode steps.

        Args:
            run: function to time; does the same work each time, and may allocate.
        """
        if self.device.type != "cuda":
            return self._wall(run)
        for _ in range(WARM_UP_RUNS):
            run()
        self.synchronize()
        replay = self._captured(run)
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
        """The replay of `run` captured as a graph; None if it waits for the device, which a capture does not allow."""
        graph = torch.cuda.CUDAGraph()
        try:
            with forbid_sync():  # tried first: a failed capture leaves torch's allocator in a bad state
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
