"""Test cases as data: a function, the shapes that it runs at, and the operation that it tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.gpu.compare import Verdict
from tests.gpu.lab import Lab
from tests.gpu.report import Figure, Measure, Profile

__all__ = ["DTYPES", "LOW", "BenchCase", "JobCase", "Labelled", "ParityCase", "Shape", "bench", "job_case", "parity"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LOW = (torch.float16, torch.bfloat16)

Shape = Mapping[str, Any]
Labelled = tuple[str, Verdict]
"""(what was compared, the result)"""
_JobRun = Callable[..., Iterator[Labelled | Measure | Profile | str]]


@dataclass(frozen=True, slots=True)
class ParityCase:
    """A parity check: `run(lab, dtype, **shape)` yields comparisons."""

    op: str
    name: str
    dtype: torch.dtype
    shape: Shape
    run: Callable[..., Iterator[Labelled]]

    def verdicts(self, lab: Lab) -> list[Labelled]:
        """Run the case."""
        return list(self.run(lab, self.dtype, **self.shape))


@dataclass(frozen=True, slots=True)
class BenchCase:
    """A microbenchmark: `run(lab, **shape)` yields figures."""

    op: str
    name: str
    shape: Shape
    run: Callable[..., Iterator[Figure]]

    def figures(self, lab: Lab) -> list[Figure]:
        """Run the case."""
        return list(self.run(lab, **self.shape))


@dataclass(frozen=True, slots=True)
class JobCase:
    """A case of a stage that runs whole jobs: `run(lab, **shape)` yields comparisons, measures, profiles and notes."""

    stage: str
    op: str
    name: str
    shape: Shape
    run: Callable[..., Iterator[Labelled | Measure | Profile | str]]


class Registry:
    """The cases of all stages, at real sizes and at toy sizes."""

    def __init__(self) -> None:
        self._parity: list[tuple[bool, ParityCase]] = []
        self._bench: list[tuple[bool, BenchCase]] = []
        self._jobs: list[tuple[bool, JobCase]] = []

    def parity_cases(self, toy: bool) -> list[ParityCase]:
        """Parity cases at real or toy sizes, in the order of registration."""
        return [case for is_toy, case in self._parity if is_toy == toy]

    def bench_cases(self, toy: bool) -> list[BenchCase]:
        """Microbenchmarks at real or toy sizes, in the order of registration."""
        return [case for is_toy, case in self._bench if is_toy == toy]

    def job_cases(self, stage: str, toy: bool) -> list[JobCase]:
        """Cases of one whole-job stage at real or toy sizes, in the order of registration."""
        return [case for is_toy, case in self._jobs if is_toy == toy and case.stage == stage]

    def parity(
        self,
        op: str,
        shapes: Sequence[Shape],
        toy: Sequence[Shape],
        dtypes: Sequence[torch.dtype] = DTYPES,
        name: str = "",
    ) -> Callable[[Callable[..., Iterator[Labelled]]], Callable[..., Iterator[Labelled]]]:
        """Register the decorated `run(lab, dtype, **shape)` at every shape and dtype.

        Args:
            op: name of the operation in `Ops`, or of an attention backend.
            shapes: shapes on a device.
            toy: shapes in the interpreter.
            dtypes: dtypes to run in.
            name: name of the cases; empty: the function's name.
        """

        def register(run: Callable[..., Iterator[Labelled]]) -> Callable[..., Iterator[Labelled]]:
            for is_toy, sizes in ((False, shapes), (True, toy)):
                for shape in sizes:
                    for dtype in dtypes:
                        whole = f"{name or run.__name__}[{_short(dtype)}{_words(shape)}]"
                        self._parity.append((is_toy, ParityCase(op, whole, dtype, shape, run)))
            return run

        return register

    def bench(
        self, op: str, shapes: Sequence[Shape], toy: Sequence[Shape], name: str = ""
    ) -> Callable[[Callable[..., Iterator[Figure]]], Callable[..., Iterator[Figure]]]:
        """Register the decorated `run(lab, **shape)` at every shape; arguments as in `parity`."""

        def register(run: Callable[..., Iterator[Figure]]) -> Callable[..., Iterator[Figure]]:
            for is_toy, sizes in ((False, shapes), (True, toy)):
                for shape in sizes:
                    whole = f"{name or run.__name__}[{_words(shape)[1:]}]"
                    self._bench.append((is_toy, BenchCase(op, whole, shape, run)))
            return run

        return register

    def job_case(
        self, stage: str, op: str, shapes: Sequence[Shape], toy: Sequence[Shape]
    ) -> Callable[[_JobRun], _JobRun]:
        """Register the decorated `run(lab, **shape)` of a whole-job stage at every shape.

        Args:
            stage: name in `budget.STAGES`, and of the file that registers the case.
            op: what is checked or measured.
            shapes: sizes on a device.
            toy: sizes on a CPU.
        """

        def register(run: _JobRun) -> _JobRun:
            for is_toy, sizes in ((False, shapes), (True, toy)):
                for shape in sizes:
                    whole = f"{run.__name__}[{_words(shape)[1:]}]"
                    self._jobs.append((is_toy, JobCase(stage, op, whole, shape, run)))
            return run

        return register


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _words(shape: Shape) -> str:
    return "".join(f",{name}={value}" for name, value in shape.items())


_registry = Registry()
parity = _registry.parity
bench = _registry.bench
parity_cases = _registry.parity_cases
bench_cases = _registry.bench_cases
job_case = _registry.job_case
job_cases = _registry.job_cases
