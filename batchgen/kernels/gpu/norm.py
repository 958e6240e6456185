"""RMS norm in one pass, with an optional residual addition before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.gpu.common import power_of_2, rounded
from batchgen.kernels.gpu.launch import launch

_TILE = 2048
"""Elements of a tile of several rows."""


@triton.jit(do_not_specialize=["rows"])
def _norm(
    p_x, p_delta, p_weight, p_out, rows, eps, x_outer, x_inner, delta_outer, delta_inner,
    INNER: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Per row y = x / sqrt(mean(x^2) + eps) * w, where x = round(x + delta) is stored first if ADD.

    x, delta [rows / INNER, INNER, WIDTH] with strides (outer, inner, 1), w [WIDTH], y [rows, WIDTH] contiguous.
    Grid: one program per BLOCK_ROWS rows. Sums and products in float32, one rounding to y's dtype; the residual sum is
    rounded to x's dtype before it is squared. Bytes moved per element: 2 words, with ADD 4.
    """
    i_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [r]
    i_column = tl.arange(0, BLOCK_WIDTH)  # [w]
    m_column = i_column < WIDTH  # [w]
    m_tile = (i_row < rows)[:, None] & m_column[None, :]  # [r, w]
    i_outer, i_inner = i_row // INNER, i_row % INNER  # [r]
    o_x = (i_outer * x_outer + i_inner * x_inner)[:, None] + i_column[None, :]  # [r, w]
    b_x = tl.load(p_x + o_x, mask=m_tile, other=0.0).to(tl.float32)  # [r, w]
    if ADD:
        o_delta = (i_outer * delta_outer + i_inner * delta_inner)[:, None] + i_column[None, :]  # [r, w]
        b_delta = tl.load(p_delta + o_delta, mask=m_tile, other=0.0).to(tl.float32)  # [r, w]
        b_sum = rounded(b_x + b_delta, p_x.dtype.element_ty)  # [r, w]
        tl.store(p_x + o_x, b_sum, mask=m_tile)
        b_x = b_sum.to(tl.float32)  # [r, w]
    b_weight = tl.load(p_weight + i_column, mask=m_column, other=0.0).to(tl.float32)  # [w]
    b_scale = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / WIDTH + eps)  # [r]
    b_out = rounded(b_x * b_scale[:, None] * b_weight[None, :], p_out.dtype.element_ty)  # [r, w]
    tl.store(p_out + i_row[:, None] * WIDTH + i_column[None, :], b_out, mask=m_tile)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of `x` [..., D] by `weight` [D].

    Rows may have gaps (up to three dimensions with any strides, except the last, which must be 1). Returns a new
    contiguous [..., D] of `x`'s dtype.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, eps)
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `delta` [T, H] to `x` [T, H] in place, rounded to `x.dtype`, and return the norm of the rounded sum.

    Rows may have gaps, as in `rms_norm`.
    """
    assert x.shape == delta.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, delta, weight, out, eps)
    return out


def _launch(x: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    width = x.shape[-1]
    assert weight.shape == (width,)
    assert weight.is_contiguous()
    inner, x_outer, x_inner = _rows(x)
    _, delta_outer, delta_inner = (0, 0, 0) if delta is None else _rows(delta)
    rows = x.numel() // width
    block_width = power_of_2(width, 16)
    # Independent of the number of rows, which would compile another specialisation for small steps.
    block_rows = max(1, _TILE // block_width)
    launch(
        _norm, (triton.cdiv(rows, block_rows),), x, x if delta is None else delta, weight, out, rows, eps, x_outer,
        x_inner, delta_outer, delta_inner,
        INNER=inner, WIDTH=width, BLOCK_ROWS=block_rows, BLOCK_WIDTH=block_width, ADD=delta is not None,
        num_warps=min(max(block_rows * block_width // 512, 4), 16),
    )  # fmt: skip


def _rows(x: Tensor) -> tuple[int, int, int]:
    """The size of the inner of two row dimensions, and the strides of both."""
    assert x.stride(-1) == 1 or x.shape[-1] == 1
    if x.dim() == 1:
        return 1, 0, 0
    if x.dim() == 2:
        return 1, x.stride(0), 0
    assert x.dim() == 3
    return x.shape[1], x.stride(0), x.stride(1)
