"""Cases of the stages as data: a function, the shapes that it runs at, and the operation that it tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from tests.gpu.budget import STAGES
from tests.gpu.compare import Verdict
from tests.gpu.device import Gpu
from tests.gpu.report import Figure, Measure, Profile
from tests.kernels.closeness import DTYPES

LOW = DTYPES[1:]

Shape = Mapping[str, Any]
Labelled = tuple[str, Verdict]
"""(what was compared, the result)"""
Found = Labelled | Figure | Measure | Profile | str
"""What a case yields; a text is the reason why something was left out."""
Run = Callable[..., Iterator[Found]]


@dataclass(frozen=True, slots=True)
class Case:
    """A case: `run(gpu, **shape)`, with a dtype `run(gpu, dtype, **shape)`, yields what it finds."""

    stage: str
    op: str
    name: str
    shape: Shape
    run: Run
    dtype: torch.dtype | None = None

    @property
    def short_dtype(self) -> str:
        """Name of the dtype; empty without one."""
        return "" if self.dtype is None else str(self.dtype).removeprefix("torch.")

    def found(self, gpu: Gpu) -> Iterator[Found]:
        """Run the case."""
        return self.run(gpu, *(() if self.dtype is None else (self.dtype,)), **self.shape)


_cases: list[tuple[bool, Case]] = []


def case(
    stage: str,
    op: str,
    shapes: Sequence[Shape],
    toy: Sequence[Shape],
    dtypes: Sequence[torch.dtype | None] = (None,),
    name: str = "",
) -> Callable[[Run], Run]:
    """Register the decorated function at every shape and dtype.

    Args:
        stage: name in `budget.STAGES`.
        op: name of the operation in `Ops` or of an attention backend; for whole jobs, what is checked or measured.
        shapes: shapes on a device.
        toy: shapes on a CPU, where kernels run in the interpreter.
        dtypes: dtypes to run in; at toy sizes only the last: the tests of kernels run them in the interpreter in all.
        name: name of the cases; empty: the function's name.
    """

    def register(run: Run) -> Run:
        for is_toy, sizes, kinds in ((False, shapes, dtypes), (True, toy, dtypes[-1:])):
            for shape in sizes:
                for dtype in kinds:
                    made = Case(stage, op, "", shape, run, dtype)
                    words = [made.short_dtype, *(f"{key}={value}" for key, value in shape.items())]
                    whole = f"{name or run.__name__}[{','.join(filter(None, words))}]"
                    _cases.append((is_toy, Case(stage, op, whole, shape, run, dtype)))
        return run

    return register


def cases(stage: str, toy: bool) -> list[Case]:
    """Cases of one stage at real or toy sizes. Modules of whole jobs, which need more packages, are imported here."""
    for module in next(x.modules for x in STAGES if x.name == stage):
        import_module(f"tests.gpu.stages.{module}")
    return [found for is_toy, found in _cases if is_toy == toy and found.stage == stage]
