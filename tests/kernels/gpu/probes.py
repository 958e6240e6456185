"""Kernels for tests of the checks: a tensor-core product, which spills in float32, and one that does not compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.gpu.common import dot
from batchgen.kernels.gpu.launch import launch


@triton.jit(do_not_specialize=["T"])
def product(p_x, p_out, T, H, B: tl.constexpr):
    i_row, i_col = tl.arange(0, B), tl.arange(0, B)
    x = tl.load(p_x + i_row[:, None] * H + i_col[None, :], mask=i_row[:, None] < T, other=0.0)
    out = dot(x, tl.trans(x), tl.zeros([B, B], tl.float32))
    tl.store(p_out + i_row[:, None] * B + i_col[None, :], out, mask=i_row[:, None] < T)


@triton.jit
def wrong(p_x, B: tl.constexpr):
    tl.store(p_x + tl.arange(0, B), tl.arange(0, 2 * B))


def run_product(x: Tensor, size: int) -> None:
    out = torch.empty(size, size, device=x.device)
    launch(product, (1,), x, out, x.shape[0], x.shape[1], B=size, num_warps=4)


def launches() -> Iterator[tuple[str, Callable[[], None]]]:
    def meta(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*size, dtype=dtype, device="meta")

    for dtype in (torch.bfloat16, torch.float32):
        for rows in (1, 16, 1000):
            yield f"product[{dtype},T={rows}]", lambda d=dtype, t=rows: run_product(meta(t, 64, dtype=d), 64)
    yield "wrong", lambda: launch(wrong, (1,), meta(64), B=64)
