"""Products y = x W^T + b over weights that stay in eight or four bits in memory (`kernels.quantization`).

Their numbers are exact in x's dtype and are multiplied as such; a group's float32 sum is multiplied by its scale, so
that no weight is rounded. With many rows the product is no longer limited by reading the weight; then it is dequantised
into temporary memory for the library's product.
"""

from __future__ import annotations

from math import gcd

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.chips import converts_fp8
from batchgen.kernels.gpu.common import INTERPRETED, dot, from_e4m3, power_of_2, rounded
from batchgen.kernels.gpu.launch import launch
from batchgen.kernels.quantization import FP8, GroupedWeight

FEW_ROWS = 128
"""Most rows of a product that reads the weight in its own format."""
_INNER = 128
"""Most inputs of a step; all of a step are in one group."""
_LEAST_INNER = 32
_MANY_OUTPUTS = 16384
"""Outputs from which wide tiles fill a device."""
_BLOCK = 1024
"""Inputs that a program dequantises."""
_FP8, _INT8, _INT4 = range(3)


@triton.jit
def _values(b, KIND: tl.constexpr, NATIVE: tl.constexpr, dtype: tl.constexpr):
    """Numbers of bytes `b` (uint8), E4M3 or int8, in `dtype`, exactly."""
    if KIND == 0:
        return from_e4m3(b, NATIVE, dtype)
    else:
        return b.to(tl.int8, bitcast=True).to(tl.float32).to(dtype)


@triton.jit
def _codes(b, b_zero, dtype: tl.constexpr):
    """Codes `b` (uint8) of four bits less their zeros, in `dtype`, exactly."""
    if dtype == tl.bfloat16 and not INTERPRETED:
        # 128 + code, and 128 + zero, by their bits.
        wide = (b.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
        return wide - (b_zero + 128.0).to(tl.bfloat16)
    else:
        return (b.to(tl.float32) - b_zero).to(dtype)


@triton.jit(do_not_specialize=["tokens"])
def _product(
    p_x, p_numbers, p_scales, p_zeros, p_bias, p_out, tokens, inputs, outputs, x_token, row_bytes, groups, size,
    KIND: tl.constexpr, NATIVE: tl.constexpr, BIASED: tl.constexpr, WHOLE_INNER: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """y[t, o] = sum over groups g: scale[o, g] * sum over i in g: x[t, i] * (number[o, i] - zero[o, g]), + bias[o].

    x [T, I] with rows `x_token` apart, numbers as bytes [O, row_bytes], scales and zeros [O, G], bias [O], y [T, O].
    Grid: (blocks of COLUMNS outputs, blocks of ROWS tokens). Float32 sums over i in steps of INNER, each of one group
    of `size` inputs; one rounding. Bytes: the weight once per block of tokens, x once per block of outputs, unless
    cached.
    """
    o_column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    o_row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    m_row, m_column = (o_row < tokens)[:, None], o_column < outputs
    # Columns past the last one read its weight, and are not written.
    o_read = tl.minimum(o_column, outputs - 1)
    p_rows = p_x + o_row[:, None] * x_token
    p_weight = p_numbers + o_read[:, None] * row_bytes
    STEP: tl.constexpr = INNER // 2 if KIND == 2 else INNER  # bytes of a row
    o_byte = tl.arange(0, STEP)
    # Two inputs of a byte are 16 apart.
    o_first = o_byte // 16 * 32 + o_byte % 16 if KIND == 2 else o_byte
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in range(0, inputs, INNER):
        o_in = i + o_first
        m_in = (o_in < inputs)[None, :]
        p_bytes = p_weight + (i // INNER * STEP + o_byte)[None, :]
        if WHOLE_INNER:
            b_bytes = tl.load(p_bytes)
            b_x = tl.load(p_rows + o_in[None, :], mask=m_row, other=0.0)
        else:
            b_bytes = tl.load(p_bytes, mask=m_in, other=0)
            b_x = tl.load(p_rows + o_in[None, :], mask=m_row & m_in, other=0.0)
        b_scale = tl.load(p_scales + o_read * groups + i // size)
        b_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
        if KIND == 2:
            b_zero = tl.load(p_zeros + o_read * groups + i // size).to(tl.float32)[:, None]
            b_sum = dot(b_x, tl.trans(_codes(b_bytes & 15, b_zero, p_x.dtype.element_ty)), b_sum)
            o_high = (o_in + 16)[None, :]
            if WHOLE_INNER:
                b_x = tl.load(p_rows + o_high, mask=m_row, other=0.0)
            else:
                b_x = tl.load(p_rows + o_high, mask=m_row & (o_high < inputs), other=0.0)
            b_sum = dot(b_x, tl.trans(_codes(b_bytes >> 4, b_zero, p_x.dtype.element_ty)), b_sum)
        else:
            b_sum = dot(b_x, tl.trans(_values(b_bytes, KIND, NATIVE, p_x.dtype.element_ty)), b_sum)
        acc += b_sum * b_scale[None, :]
    if BIASED:
        acc += tl.load(p_bias + o_column, mask=m_column, other=0.0).to(tl.float32)[None, :]
    p_cells = p_out + o_row[:, None] * outputs + o_column[None, :]
    tl.store(p_cells, rounded(acc, p_out.dtype.element_ty), mask=m_row & m_column[None, :])


@triton.jit
def _dequantise(
    p_numbers, p_scales, p_zeros, p_out, inputs, row_bytes, groups, size, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out[o, i] = rounded((number[o, i] - zero[o, g]) * scale[o, g]), [O, I]; one rounding.

    Grid: (O, blocks of BLOCK inputs). Bytes: the weight once, the output once.
    """
    i_row = tl.program_id(0).to(tl.int64)
    o_in = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_in = o_in < inputs
    b_scale = tl.load(p_scales + i_row * groups + o_in // size, mask=m_in, other=0.0)
    if KIND == 2:
        o_byte = o_in // 32 * 16 + o_in % 16
        b_bytes = tl.load(p_numbers + i_row * row_bytes + o_byte, mask=m_in, other=0)
        b_codes = tl.where(o_in % 32 < 16, b_bytes & 15, b_bytes >> 4).to(tl.float32)
        b_out = (
            b_codes - tl.load(p_zeros + i_row * groups + o_in // size, mask=m_in, other=0).to(tl.float32)
        ) * b_scale
    else:
        b_bytes = tl.load(p_numbers + i_row * row_bytes + o_in, mask=m_in, other=0)
        b_out = _values(b_bytes, KIND, False, tl.float32) * b_scale
    tl.store(p_out + i_row * inputs + o_in, rounded(b_out, p_out.dtype.element_ty), mask=m_in)


def dequantised(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """W [O, I] in `dtype`, rounded once, in new memory."""
    outputs, groups, _ = weight.numbers.shape
    out = torch.empty(outputs, weight.inner, dtype=dtype, device=weight.numbers.device)
    numbers, zeros = _bytes(weight)
    launch(
        _dequantise, (outputs, triton.cdiv(weight.inner, _BLOCK)),
        numbers, weight.scales, zeros, out, weight.inner, numbers.shape[1], groups, weight.size,
        KIND=_kind(weight), BLOCK=_BLOCK,
    )  # fmt: skip
    return out


def linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """The product y [..., O] = x [..., I] W^T + b [O], with float32 sums.

    With more than `FEW_ROWS` rows, W is rounded to x's dtype.

    Args:
        x: float32, float16 or bfloat16, of any strides; copied unless the last dimension is contiguous.
        weight: on x's device, one that `is_supported`, without not-a-numbers.
        bias: of x's dtype.

    Returns:
        a new contiguous tensor of x's dtype.
    """
    flat = x.reshape(-1, x.shape[-1])
    if len(flat) > FEW_ROWS:
        return F.linear(x, dequantised(weight, x.dtype), bias)
    return _few_rows(flat, weight, bias).view(*x.shape[:-1], len(weight.numbers))


def _few_rows(x: Tensor, weight: GroupedWeight, bias: Tensor | None) -> Tensor:
    if x.stride(1) != 1:
        x = x.contiguous()
    tokens, inputs = x.shape
    outputs, groups, _ = weight.numbers.shape
    assert inputs == weight.inner
    numbers, zeros = _bytes(weight)
    half = x.dtype != torch.float32
    rows, inner = min(64, power_of_2(tokens, 16)), _inner(weight, x.dtype)
    columns = 128 if half and rows == 64 and outputs >= _MANY_OUTPUTS else 32
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    launch(
        _product, (triton.cdiv(outputs, columns), triton.cdiv(tokens, rows)),
        x, numbers, weight.scales, zeros, x if bias is None else bias, out,
        tokens, inputs, outputs, x.stride(0) if tokens > 1 else inputs, numbers.shape[1], groups, weight.size,
        KIND=_kind(weight), NATIVE=converts_fp8(x.device), BIASED=bias is not None, WHOLE_INNER=inputs % inner == 0,
        ROWS=rows, COLUMNS=columns, INNER=inner,
        num_warps=8 if columns == 128 else 4, num_stages=3 if columns == 128 else 4,
    )  # fmt: skip
    return out


def is_supported(weight: GroupedWeight) -> bool:
    """Whether steps of the kernel can lie in one group each."""
    return _inner(weight) >= _LEAST_INNER


def _inner(weight: GroupedWeight, dtype: torch.dtype = torch.bfloat16) -> int:
    # Products of float32 operands do not use tensor cores, and wide steps would need too many registers.
    most = _LEAST_INNER if dtype == torch.float32 else _INNER
    return most if weight.numbers.shape[1] == 1 else gcd(weight.size, most)


def _kind(weight: GroupedWeight) -> int:
    if weight.zeros is not None:
        return _INT4
    return _FP8 if weight.scheme.dtype == FP8.dtype else _INT8


def _bytes(weight: GroupedWeight) -> tuple[Tensor, Tensor]:
    """Numbers as bytes [O, row], and zeros; scales in their place where there are none."""
    return weight.numbers.view(torch.uint8).flatten(1), weight.scales if weight.zeros is None else weight.zeros
