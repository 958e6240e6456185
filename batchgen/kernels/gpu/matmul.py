"""Batch-invariant matrix products: one tile for any number of rows, and sums in one order.

The tile is chosen by the number of outputs, the dtype and the chip. A choice by the number of rows would switch between
tensor-core instructions, which round differently; splitting the sum would add its parts in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.chips import fixed_tuning
from batchgen.kernels.gpu.common import dot, rounded
from batchgen.kernels.gpu.launch import launch

_ALIGNMENT = 16
"""Multiple of bytes, or elements, at which rows are fetched fastest; others need another specialisation."""
_BAND = 8
"""Blocks of tokens that are computed with all outputs together."""


@triton.jit(do_not_specialize=["tokens"])
def _matmul(
    p_x, p_weight, p_bias, p_out, tokens, inputs, outputs,
    x_token, weight_out, weight_in,
    BIASED: tl.constexpr, WHOLE_INNER: tl.constexpr, WHOLE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Per token y[t, o] = sum over i: x[t, i] * weight[o, i], + bias[o].

    x [T, I] with strides (token, 1), weight [O, I] with any, bias [O], y [T, O] contiguous.
    Grid: blocks of ROWS tokens x blocks of COLUMNS outputs; BAND blocks of tokens are computed with all outputs
    together, so that their operands stay in the cache. Float32 sums over i in rising order, INNER at a time, for any T;
    one rounding. Bytes: x once per block of outputs, the weight once per block of tokens, unless cached.
    """
    column_blocks = tl.cdiv(outputs, COLUMNS)
    i_band = tl.program_id(0) // (BAND * column_blocks)
    i_within = tl.program_id(0) % (BAND * column_blocks)
    height = tl.minimum(tl.cdiv(tokens, ROWS) - i_band * BAND, BAND)  # the last band may be smaller
    o_row = ((i_band * BAND + i_within % height) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    o_column = (i_within // height * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    o_in = tl.arange(0, INNER)
    m_row = (o_row < tokens)[:, None]  # [ROWS, 1]
    p_rows = p_x + o_row[:, None] * x_token  # [ROWS, 1]
    p_columns = p_weight + o_column[:, None] * weight_out  # [COLUMNS, 1]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in range(0, inputs, INNER):
        p_x_cells = p_rows + (i + o_in)[None, :]  # [ROWS, INNER]
        p_w_cells = p_columns + (i + o_in).to(tl.int64)[None, :] * weight_in  # [COLUMNS, INNER]
        if WHOLE_INNER:
            b_x = tl.load(p_x_cells, mask=m_row, other=0.0)
            if WHOLE_COLUMNS:
                b_weight = tl.load(p_w_cells)
            else:
                b_weight = tl.load(p_w_cells, mask=(o_column < outputs)[:, None], other=0.0)
        else:
            m_in = (i + o_in < inputs)[None, :]
            b_x = tl.load(p_x_cells, mask=m_row & m_in, other=0.0)
            b_weight = tl.load(p_w_cells, mask=(o_column < outputs)[:, None] & m_in, other=0.0)
        acc = dot(b_x, tl.trans(b_weight), acc)
    if BIASED:
        acc += tl.load(p_bias + o_column, mask=o_column < outputs, other=0.0).to(tl.float32)[None, :]
    p_cells = p_out + o_row[:, None] * outputs + o_column[None, :]
    tl.store(p_cells, rounded(acc, p_out.dtype.element_ty), mask=m_row & (o_column < outputs)[None, :])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product y [..., O] = x [..., I] W [O, I]^T + b [O]; every row's bits depend only on that row.

    Args:
        x: of any strides; copied unless the last dimension is contiguous.
        weight: of x's dtype (float32, float16 or bfloat16) and any strides.
        bias: of any float dtype.

    Returns:
        a new contiguous tensor of x's dtype.
    """
    shape, outputs = x.shape, weight.shape[0]
    x, x_token = _rows(x.reshape(-1, x.shape[-1]))
    tokens, inputs = x.shape
    assert weight.shape == (outputs, inputs)
    assert weight.dtype == x.dtype
    assert bias is None or (bias.shape == (outputs,) and bias.stride(0) == 1)
    tile = fixed_tuning(x.device).matmul_tile(outputs, x.dtype)
    # Unaligned rows are loaded through registers, of which a wide step would need too many.
    inner, stages = (tile.inner, tile.stages) if inputs % _ALIGNMENT == 0 else (min(tile.inner, 32), 1)
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    launch(
        _matmul, (triton.cdiv(tokens, tile.rows) * triton.cdiv(outputs, tile.columns),),
        x, weight, x if bias is None else bias, out, tokens, inputs, outputs, x_token, *weight.stride(),
        BIASED=bias is not None, WHOLE_INNER=inputs % inner == 0, WHOLE_COLUMNS=outputs % tile.columns == 0,
        ROWS=tile.rows, COLUMNS=tile.columns, INNER=inner, BAND=_BAND,
        num_warps=tile.warps, num_stages=stages,
    )  # fmt: skip
    return out.view(*shape[:-1], outputs)


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """The rows x [T, I] as the kernel reads them, and their stride, which does not depend on the number of rows."""
    if x.stride(1) != 1 or x.data_ptr() % _ALIGNMENT:
        x = torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
    return x, x.stride(0) if len(x) > 1 else x.shape[1]
