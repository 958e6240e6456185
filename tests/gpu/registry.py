"""Cases as data: a function, the shapes it runs at, and the operation that it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.gpu.compare import Verdict
from tests.gpu.lab import Lab
from tests.gpu.report import Figure, Measure, Profile

__all__ = ["DTYPES", "LOW", "BenchCase", "Labelled", "ParityCase", "ProofCase", "Shape", "bench", "parity", "proof"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LOW = (torch.float16, torch.bfloat16)

Shape = Mapping[str, Any]
Labelled = tuple[str, Verdict]
"""What was compared, and how it went."""
_Proof = Callable[..., Iterator[Labelled | Measure | Profile | str]]


@dataclass(frozen=True, slots=True)
class ParityCase:
    """`run(lab, dtype, **shape)` yields comparisons."""

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
    """`run(lab, **shape)` yields figures."""

    op: str
    name: str
    shape: Shape
    run: Callable[..., Iterator[Figure]]

    def figures(self, lab: Lab) -> list[Figure]:
        """Run the case."""
        return list(self.run(lab, **self.shape))


@dataclass(frozen=True, slots=True)
class ProofCase:
    """A case of a stage about whole jobs: `run(lab, **shape)` yields comparisons, measures, profiles and remarks."""

    stage: str
    op: str
    name: str
    shape: Shape
    run: Callable[..., Iterator[Labelled | Measure | Profile | str]]


class Registry:
    """All cases, by the name of their stage, real sizes and toy sizes apart."""

    def __init__(self) -> None:
        self._parity: list[tuple[bool, ParityCase]] = []
        self._bench: list[tuple[bool, BenchCase]] = []
        self._proofs: list[tuple[bool, ProofCase]] = []

    def parity_cases(self, toy: bool) -> list[ParityCase]:
        """Those of one size, in the order of registration."""
        return [case for is_toy, case in self._parity if is_toy == toy]

    def bench_cases(self, toy: bool) -> list[BenchCase]:
        """Those of one size, in the order of registration."""
        return [case for is_toy, case in self._bench if is_toy == toy]

    def proof_cases(self, stage: str, toy: bool) -> list[ProofCase]:
        """Those of one stage and size, in the order of registration."""
        return [case for is_toy, case in self._proofs if is_toy == toy and case.stage == stage]

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
            op: the operation's name in `Ops`, or of an attention backend.
            shapes: on a device.
            toy: in the interpreter.
            dtypes: those that it is run in.
            name: the cases', where it is not the function's.
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

    def proof(self, stage: str, op: str, shapes: Sequence[Shape], toy: Sequence[Shape]) -> Callable[[_Proof], _Proof]:
        """Register the decorated `run(lab, **shape)` of a stage about whole jobs at every shape.

        Args:
            stage: its name in `budget.STAGES`; the file that registers it has the same name.
            op: what is proven or measured.
            shapes: on a device.
            toy: on a CPU.
        """

        def register(run: _Proof) -> _Proof:
            for is_toy, sizes in ((False, shapes), (True, toy)):
                for shape in sizes:
                    whole = f"{run.__name__}[{_words(shape)[1:]}]"
                    self._proofs.append((is_toy, ProofCase(stage, op, whole, shape, run)))
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
proof = _registry.proof
proof_cases = _registry.proof_cases
