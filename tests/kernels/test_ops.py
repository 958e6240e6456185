"""Every case of the registry on every backend: against PyTorch's operations, and float64 where a case has an oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.kernels.cpu import lora, ops
from batchgen.kernels.cpu.library import loaded, missing
from batchgen.kernels.cpu.ops import COMPILED_INVARIANT_OPS, COMPILED_OPS
from batchgen.kernels.gpu.ops import TRITON_INVARIANT_OPS, TRITON_OPS
from batchgen.kernels.invariant import INVARIANT_OPS
from batchgen.kernels.ops import TORCH_OPS, Ops
from batchgen.kernels.sampling import SampleResult
from tests.kernels.cases import CASES, Case, flat
from tests.kernels.closeness import DTYPES, assert_as_close


@dataclass(frozen=True)
class Backend:
    """Operations under test; those of `base` are not tested again."""

    name: str
    ops: Ops
    base: Ops
    dtypes: tuple[torch.dtype, ...] = DTYPES
    threads: int = 1

    def tests(self, case: Case) -> bool:
        """Whether the backend has its own version of the case's operation."""
        return getattr(self.ops, case.op) is not getattr(self.base, case.op)


COMPILED_DTYPES = (torch.float32, torch.bfloat16)
BACKENDS = (
    Backend("torch", TORCH_OPS, Ops(**dict.fromkeys((f.name for f in fields(Ops)), None))),  # type: ignore[arg-type]
    Backend("torch-invariant", INVARIANT_OPS, TORCH_OPS),
    *(Backend(f"compiled-{n}", COMPILED_OPS, TORCH_OPS, COMPILED_DTYPES, n) for n in (1, 2)),
    Backend("triton", TRITON_OPS, TORCH_OPS),
    Backend("triton-invariant", TRITON_INVARIANT_OPS, TRITON_OPS),
)
RUNS = [
    pytest.param(backend, case, dtype, id=f"{backend.name}-{case}-{str(dtype).removeprefix('torch.')}")
    for backend in BACKENDS
    for case in CASES
    if backend.tests(case) and (backend.ops is not TORCH_OPS or case.exact is not None)
    for dtype in case.dtypes
    if dtype in backend.dtypes
]


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    """Fill new memory with not-a-numbers, so that missing writes show."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert bool(torch.empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(before)


def run(ops: Ops, case: Case, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of the result, and those of the arguments after the call."""
    arguments = case.arguments(dtype)
    result = getattr(ops, case.op)(*arguments)
    if isinstance(result, SampleResult):
        result = result.tokens  # PyTorch's does not check the rows
    kept = [argument for number, argument in enumerate(arguments) if number not in case.scratch]
    return list(flat(result)), list(flat(kept))


def judge(got: Tensor, plain: Tensor, rtol: float) -> None:
    """Compare with PyTorch's result; in low precision one rounding is allowed where any difference is."""
    assert got.dtype == plain.dtype
    if not plain.is_floating_point():
        rtol = 0.0
    elif rtol and plain.dtype != torch.float32:
        rtol = 2 * torch.finfo(plain.dtype).eps
    largest = float(plain[plain.isfinite()].abs().max()) if rtol and plain.isfinite().any() else 0.0
    torch.testing.assert_close(got, plain, rtol=rtol, atol=rtol * largest, equal_nan=True)


# The interpreter's numpy warns about intended operations: exp of a row with an infinity, log of no mass.
@pytest.mark.filterwarnings("ignore:(overflow|divide by zero|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(("backend", "case", "dtype"), RUNS)
def test_operation(backend: Backend, case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend.name.startswith("compiled") and not loaded():
        pytest.skip(str(missing()))
    torch.set_num_threads(backend.threads)
    for module in (ops, lora):
        monkeypatch.setattr(module, "_SERIAL", 0)  # threads share any amount of work
    monkeypatch.setattr(ops, "_SERIAL_COPIES", 0)
    (got, after), (plain, plain_after) = run(backend.ops, case, dtype), run(TORCH_OPS, case, dtype)
    for ours, theirs in zip(after, plain_after, strict=True):
        judge(ours, theirs, case.changed)
    exact: list[Any] = [None] * len(plain)
    if case.exact is not None:
        exact = list(flat(case.exact(*case.arguments(dtype))))
    for ours, theirs, truth in zip(got, plain, exact, strict=True):
        if truth is None:
            judge(ours, theirs, case.rtol)
        elif backend.ops is TORCH_OPS:
            step = 1e-5 if ours.dtype == torch.float32 else 4 * torch.finfo(ours.dtype).eps
            torch.testing.assert_close(ours.double(), truth, rtol=step, atol=step * float(truth.abs().max()))
        else:
            assert_as_close(ours, theirs, truth)


def test_every_operation_has_a_case() -> None:
    assert {f.name for f in fields(Ops)} - {"linear"} == {case.op for case in CASES}


def test_invariant_operations_of_compiled_backends_are_tested() -> None:
    """They are compiled ones, or those of the batch-invariant PyTorch backend."""
    for field in fields(Ops):
        name = field.name
        assert getattr(COMPILED_INVARIANT_OPS, name) in (getattr(COMPILED_OPS, name), getattr(INVARIANT_OPS, name))
