"""The batch-invariant products in Triton's interpreter: against PyTorch, and each row alone and in a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.kernels.gpu import matmul as gpu
from batchgen.kernels.gpu.launch import recording
from tests.kernels import references as pytorch
from tests.kernels.closeness import DTYPES, assert_as_close


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_of_any_strides(dtype: torch.dtype) -> None:
    """`test_ops` has equal layouts of inputs and weights."""
    wide, weight = randn(9, 80, dtype=dtype), randn(48, 20, dtype=dtype, seed=1)
    other = randn(20, 48, dtype=dtype, seed=1).T
    for x, w in ((wide[::2, 8:28], weight), (wide[:, 1:21], weight), (wide.T[:20].T, weight), (wide[:, :20], other)):
        bias = randn(96, dtype=dtype, seed=3)[:48] if w is other else None
        exact = x.double() @ w.double().T + (0.0 if bias is None else bias.double())
        assert_as_close(gpu.linear(x, w, bias), pytorch.linear(x, w, bias), exact)


def test_leading_dimensions() -> None:
    x, weight = randn(2, 3, 5, 40), randn(24, 40, seed=1)
    assert torch.equal(gpu.linear(x, weight), gpu.linear(x.view(30, 40), weight).view(2, 3, 5, 24))


# Batch invariance. The interpreter's products are numpy's, whose rounding differs from a tensor core's. These tests
# show that a row's result contains nothing of other rows, and that launches do not depend on them.


@pytest.mark.parametrize("count", [1, 2, 17, 64, 65, 300])
def test_a_row_s_result_does_not_depend_on_other_rows(count: int) -> None:
    """Integers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-8, 9, size, generator=generator).bfloat16() for size in ((300, 96), (100, 96)))
    alone = torch.cat([gpu.linear(row[None], weight) for row in x[:20]])
    chosen = torch.randperm(300, generator=generator)[:count]
    rows = torch.cat([chosen[chosen >= 20], chosen[chosen < 20]])
    got = gpu.linear(x[rows], weight)
    for place, row in enumerate(rows.tolist()):
        if row < 20:
            assert torch.equal(got[place], alone[row])


def test_tile_steps_and_order_of_the_sum_are_the_same_for_any_rows() -> None:
    """Any number of rows, and a view of one row with any stride, or a slice with any offset."""
    seen: list[tuple[Any, ...]] = []

    def note(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        tokens, *others = [x for x in args if not isinstance(x, Tensor)]  # `tokens` is not specialised
        seen.append((kernel, others, constants))
        rows, columns = (constants[name] for name in ("ROWS", "COLUMNS"))
        assert grid == (-(-tokens // rows) * -(-200 // columns),)

    weight, base = torch.zeros(200, 96), torch.zeros(8192, 96)
    with recording(note):
        for x in (
            *(base[:n] for n in (1, 2, 16, 17, 64, 65, 300, 8192)),
            base[3:4],
            base[::7][:1],
            base[5:6].expand(1, 96),
        ):
            gpu.linear(x, weight)
    assert len(seen) == 11
    assert all(launch == seen[0] for launch in seen)
