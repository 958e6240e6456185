"""Every operation in Triton's interpreter, at odd sizes and strides and in every dtype, against PyTorch and float64."""

from __future__ import annotations

from dataclasses import fields
from random import Random
from types import SimpleNamespace

import pytest
import torch

from batchgen.kernels.chips import GroupedTile
from batchgen.kernels.gpu import moe, row_scan, top
from batchgen.kernels.ops import Ops
from tests.gpu.under_test import kernel, reference
from tests.kernels.closeness import assert_as_close
from tests.kernels.gpu.numbers import Numbers
from tests.kernels.gpu.op_cases import DTYPES, OPERATIONS, Operation, Sizes
from tests.kernels.gpu.op_results import results

CPU = torch.device("cpu")
DRAWS = 4
TILE = GroupedTile(rows=16, columns=32, inner=64, warps=4, stages=1)
CASES = [pytest.param(op, dtype, id=f"{op.name}-{dtype}") for op in OPERATIONS for dtype in op.dtypes]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of which some tens of columns fill several."""
    monkeypatch.setattr(row_scan, "BLOCK", 64)
    monkeypatch.setattr(top, "GROUPS", {4: 8, 16: 4})
    monkeypatch.setattr(moe, "chip_tuning", lambda device: SimpleNamespace(grouped_tile=lambda rows, dtype: TILE))


def check(operation: Operation, dtype: torch.dtype, sizes: Sizes, seed: int = 0) -> None:
    arguments = operation.make(Numbers(CPU, seed), dtype, **sizes)
    mine, plain = (operation.adapt(find(operation.name)) for find in (kernel, reference))
    for one in results(arguments, mine, plain, operation.exact, operation.equal):
        where = f"{operation.name} {dict(sizes)} {dtype}: {one.name}"
        assert one.got.shape == one.plain.shape, where
        assert one.got.dtype == one.plain.dtype, where
        if one.exact is None:
            assert torch.equal(one.got, one.plain), where
        else:
            assert_as_close(one.got, one.plain, one.exact, operation.tolerance, operation.roundings, where)


# The interpreter's numpy warns about exp and log of masked rows, which are as intended.
@pytest.mark.filterwarnings("ignore:(overflow|divide by zero|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(("operation", "dtype"), CASES)
def test_results_are_as_accurate_as_pytorch_s(operation: Operation, dtype: torch.dtype) -> None:
    turn = DTYPES.index(dtype)
    for number, sizes in enumerate(operation.small):
        # Every size in float32, the first in every dtype, and most others in one of the low precisions.
        if not turn or not number or number % 3 == turn:
            check(operation, dtype, sizes, seed=number)


@pytest.mark.filterwarnings("ignore:(overflow|divide by zero|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("operation", [op for op in OPERATIONS if op.drawn], ids=lambda op: op.name)
def test_sizes_drawn_at_random(operation: Operation) -> None:
    rng = Random(operation.name)
    for seed in range(DRAWS):
        sizes = {name: rng.randint(*ends) for name, ends in operation.drawn.items()}
        check(operation, rng.choice(list(operation.dtypes)), sizes, seed)


def test_every_operation_is_in_the_table() -> None:
    elsewhere = {"sample", "filtered_scores", "copy_pages"}
    assert {field.name for field in fields(Ops)} - elsewhere <= {op.name for op in OPERATIONS}
