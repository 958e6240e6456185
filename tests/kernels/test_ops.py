"""Every operation on every backend that replaces it, at odd sizes and strides, against PyTorch's and float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchgen.kernels.chips import GroupedTile
from batchgen.kernels.cpu import lora, ops
from batchgen.kernels.cpu.library import loaded, missing
from batchgen.kernels.cpu.ops import COMPILED_INVARIANT_OPS, COMPILED_OPS
from batchgen.kernels.gpu import moe, row_scan, top
from batchgen.kernels.gpu.ops import TRITON_INVARIANT_OPS, TRITON_OPS
from batchgen.kernels.invariant import INVARIANT_OPS
from batchgen.kernels.ops import TORCH_OPS, Ops
from tests.gpu.under_test import kernel, reference
from tests.kernels.closeness import DTYPES, assert_as_close
from tests.kernels.numbers import Numbers
from tests.kernels.op_cases import INDEXING, OPERATIONS, PYTORCH_ONLY, Operation, Sizes
from tests.kernels.op_results import results

CPU = torch.device("cpu")
DRAWS = 2
TILE = GroupedTile(rows=16, columns=32, inner=64, warps=4, stages=1)


@dataclass(frozen=True)
class Backend:
    """Operations under test; those of `base` are not tested again."""

    name: str
    ops: Ops
    base: Ops
    dtypes: tuple[torch.dtype, ...] = DTYPES
    threads: int = 1
    scratch: frozenset[str] = frozenset()
    """Arguments whose contents after the call do not matter."""

    def find(self, name: str) -> Any:
        """The backend's own version of an operation; None if it has none."""
        if self.ops is TRITON_OPS:
            return kernel(name) if name not in PYTORCH_ONLY else None
        found = getattr(self.ops, name, None)
        return None if found is getattr(self.base, name, None) else found


COMPILED_DTYPES = (torch.float32, torch.bfloat16)
QKV = frozenset({"qkv"})
BACKENDS = (
    Backend("torch", TORCH_OPS, Ops(**dict.fromkeys((f.name for f in fields(Ops)), None))),  # type: ignore[arg-type]
    Backend("torch-invariant", INVARIANT_OPS, TORCH_OPS),
    *(Backend(f"compiled-{n}", COMPILED_OPS, TORCH_OPS, COMPILED_DTYPES, n, QKV) for n in (1, 2)),
    Backend("triton", TRITON_OPS, TORCH_OPS),
    Backend("triton-invariant", TRITON_INVARIANT_OPS, TRITON_OPS),
)
RUNS = [
    pytest.param(backend, operation, dtype, id=f"{backend.name}-{operation.name}-{str(dtype).removeprefix('torch.')}")
    for backend in BACKENDS
    for operation in OPERATIONS
    if backend.find(operation.name) is not None and (backend.ops is not TORCH_OPS or operation.exact is not None)
    for dtype in operation.dtypes
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


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of which some tens of columns fill several; threads share any amount of work."""
    monkeypatch.setattr(row_scan, "BLOCK", 64)
    monkeypatch.setattr(top, "GROUPS", {4: 8, 16: 4})
    monkeypatch.setattr(moe, "chip_tuning", lambda device: SimpleNamespace(grouped_tile=lambda rows, dtype: TILE))
    for module in (ops, lora):
        monkeypatch.setattr(module, "_SERIAL", 0)
    monkeypatch.setattr(ops, "_SERIAL_COPIES", 0)


def check(backend: Backend, operation: Operation, dtype: torch.dtype, sizes: Sizes, seed: int) -> None:
    arguments = operation.make(Numbers(CPU, seed), dtype, **sizes)
    mine, plain = (operation.adapt(call) for call in (backend.find(operation.name), reference(operation.name)))
    for one in results(arguments, mine, plain, operation.exact, operation.equal):
        where = f"{operation.name} {dict(sizes)} {dtype}: {one.name}"
        assert one.got.shape == one.plain.shape, where
        assert one.got.dtype == one.plain.dtype, where
        if one.name in backend.scratch:
            continue
        if one.exact is None:
            assert torch.equal(one.got, one.plain), where
            continue
        bound = operation.bounds.get(one.name, operation.bounds.get("*"))
        if bound is not None and one.got.dtype == torch.float32:
            rtol, atol = bound
            torch.testing.assert_close(one.got.double(), one.exact, rtol=rtol, atol=atol, msg=where)
        elif backend.ops is TORCH_OPS:
            step = 1e-5 if one.got.dtype == torch.float32 else 4 * torch.finfo(one.got.dtype).eps
            largest = float(one.exact[one.exact.isfinite()].abs().max()) if one.exact.isfinite().any() else 0.0
            torch.testing.assert_close(one.got.double(), one.exact, rtol=step, atol=step * largest, msg=where)
        else:
            assert_as_close(one.got, one.plain, one.exact, operation.tolerance, operation.roundings, where)


# The interpreter's numpy warns about intended operations: exp of a row with an infinity, log of no mass.
@pytest.mark.filterwarnings("ignore:(overflow|divide by zero|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(("backend", "operation", "dtype"), RUNS)
def test_operation(backend: Backend, operation: Operation, dtype: torch.dtype) -> None:
    if backend.name.startswith("compiled") and not loaded():
        pytest.skip(str(missing()))
    torch.set_num_threads(backend.threads)
    turn = DTYPES.index(dtype)
    for number, sizes in enumerate(operation.small):
        # Every size in float32, the first in every dtype, and most others in one of the low precisions.
        if not turn or not number or number % 3 == turn or backend.name.startswith("compiled"):
            check(backend, operation, dtype, sizes, number)


@pytest.mark.filterwarnings("ignore:(overflow|divide by zero|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("operation", [op for op in OPERATIONS if op.drawn], ids=lambda op: op.name)
def test_sizes_drawn_at_random_in_triton(operation: Operation) -> None:
    rng = Random(operation.name)
    backend = next(one for one in BACKENDS if one.name == "triton")
    for seed in range(DRAWS):
        sizes = {name: rng.randint(*ends) for name, ends in operation.drawn.items()}
        check(backend, operation, rng.choice(list(operation.dtypes)), sizes, seed)


def test_every_operation_is_in_the_table() -> None:
    assert {field.name for field in fields(Ops)} - INDEXING <= {op.name for op in OPERATIONS}
    for backend in BACKENDS:
        assert all(getattr(backend.ops, name) is getattr(TORCH_OPS, name) for name in INDEXING)


def test_invariant_operations_of_compiled_backends_are_tested() -> None:
    """They are compiled ones, or those of the batch-invariant PyTorch backend."""
    for field in fields(Ops):
        name = field.name
        assert getattr(COMPILED_INVARIANT_OPS, name) in (getattr(COMPILED_OPS, name), getattr(INVARIANT_OPS, name))
