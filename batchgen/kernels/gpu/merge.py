"""Merge of attention results by their log-sum-exp in Triton, as `kernels.merge`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.gpu.common import power_of_2, rounded
from batchgen.kernels.gpu.launch import launch
from batchgen.kernels.merge import PartLists

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)
"""Initial running maximum: finite, so that infinities are never subtracted."""

_BLOCK = 2048
"""Elements of a tile: heads times their size."""


@triton.jit
def _fold(acc, row_max, row_sum, out, lse):
    """Add a part [BH, D] with its log-sum-exp in base 2 [BH]. A part of -inf has no weight, whatever its values."""
    new_max = tl.maximum(row_max, lse)
    weight = tl.exp2(lse - new_max)
    decay = tl.exp2(row_max - new_max)
    out = tl.where(lse[:, None] == float("-inf"), 0.0, out)
    return acc * decay[:, None] + out * weight[:, None], new_max, row_sum * decay + weight


@triton.jit
def _finish(acc, row_max, row_sum, sinks, i_head, m_h, SINKS: tl.constexpr):
    """The merged values [BH, D] and their log-sum-exp [BH], natural and without sinks."""
    some = row_sum > 0.0
    lse = tl.where(some, (row_max + tl.log2(tl.where(some, row_sum, 1.0))) * LN_2, float("-inf"))
    if SINKS:
        sink = tl.load(sinks + i_head, mask=m_h, other=0.0).to(tl.float32) * LOG2_E
        new_max = tl.maximum(row_max, sink)
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.exp2(sink - new_max)
        acc = acc * decay[:, None]
    # Not-a-numbers pass through: only a sum of exactly 0 means that there are no keys.
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None], tl.where(row_sum != row_sum, row_sum, lse)


@triton.jit
def _merge_lists_kernel(
    part_out, part_lse, parts, tokens, starts, counts, out, lse_out, sinks,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    WRITES_LSE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """out[t] = sum_i exp(lse_i - lse) part_out[i] over the parts i of token t, with lse = log(sum_i exp(lse_i)).

    Shapes:
        part_out [E, N, D] and part_lse [E, N] float32, parts [E], tokens, starts, counts [M] int32, out [T, N, D],
        lse_out [T, N] float32, sinks [N].
    Grid:
        M x blocks of BLOCK_H heads, blocks fastest.
    Numerics:
        an online sum in base 2 in float32.
    Bytes:
        4 (D + 1) per part and head, read once; the results written once.
    """
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    i_program = tl.program_id(0)
    i_merge = i_program // HEAD_BLOCKS
    token = tl.load(tokens + i_merge).to(tl.int64)
    if token < 0:
        return
    i_head = i_program % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)  # [BH]
    o_d = tl.arange(0, BLOCK_D)
    m_h = i_head < HEADS
    m_hd = m_h[:, None] & (o_d < VALUE_DIM)[None, :]
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_H], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_H], tl.float32)
    p_list = parts + tl.load(starts + i_merge)
    for i_part in range(tl.load(counts + i_merge)):
        o_part = tl.load(p_list + i_part).to(tl.int64) * HEADS + i_head  # [BH]
        lse = tl.load(part_lse + o_part, mask=m_h, other=float("-inf")) * LOG2_E
        part = tl.load(part_out + o_part[:, None] * VALUE_DIM + o_d[None, :], mask=m_hd, other=0.0)
        acc, row_max, row_sum = _fold(acc, row_max, row_sum, part, lse)
    acc, lse = _finish(acc, row_max, row_sum, sinks, i_head, m_h, SINKS)
    o_out = token * HEADS + i_head
    tl.store(out + o_out[:, None] * VALUE_DIM + o_d[None, :], rounded(acc, out.dtype.element_ty), mask=m_hd)
    if WRITES_LSE:
        tl.store(lse_out + o_out, lse, mask=m_h)


def merge_lists(
    part_out: Tensor,
    part_lse: Tensor,
    lists: PartLists,
    out: Tensor,
    lse: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Merge each token's list of parts. See `kernels.merge.merge_lists`."""
    assert out.is_contiguous()
    assert lse is None or lse.is_contiguous()
    heads, dim = out.shape[1:]
    block_d = power_of_2(dim, 16)
    block_h = min(power_of_2(heads), max(1, _BLOCK // block_d))
    launch(
        _merge_lists_kernel, (lists.tokens.shape[0] * -(-heads // block_h),), part_out, part_lse, *lists, out, lse,
        sinks,
        HEADS=heads, VALUE_DIM=dim, BLOCK_H=block_h, BLOCK_D=block_d, WRITES_LSE=lse is not None,
        SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip


# The strides of log-sum-exps stored as [N, T] change with every step.
@triton.jit(do_not_specialize=["lse_a_stride_t", "lse_a_stride_n", "lse_b_stride_t", "lse_b_stride_n"])
def _merge_parts_kernel(
    out_a, lse_a, out_b, lse_b, out, lse_out, sinks,
    a_stride_t, a_stride_n, lse_a_stride_t, lse_a_stride_n, b_stride_t, b_stride_n, lse_b_stride_t, lse_b_stride_n,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b, with lse = log(exp(lse_a) + exp(lse_b)).

    Shapes:
        out_a, out_b [T, N, D] and lse_a, lse_b [T, N] with strides; out [T, N, D], lse_out [T, N] float32.
    Grid:
        T x blocks of BLOCK_H heads, blocks fastest.
    Numerics:
        float32, in base 2.
    Bytes:
        both parts read once, the result written once.
    """
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    i_token = (tl.program_id(0) // HEAD_BLOCKS).to(tl.int64)
    i_head = tl.program_id(0) % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H).to(tl.int64)  # [BH]
    o_d = tl.arange(0, BLOCK_D)
    m_h = i_head < HEADS
    m_hd = m_h[:, None] & (o_d < VALUE_DIM)[None, :]
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_H], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_H], tl.float32)
    p_lse = lse_a + i_token * lse_a_stride_t + i_head * lse_a_stride_n
    p_part = out_a + i_token * a_stride_t + i_head[:, None] * a_stride_n + o_d[None, :]
    lse = tl.load(p_lse, mask=m_h, other=float("-inf")) * LOG2_E
    part = tl.load(p_part, mask=m_hd, other=0.0).to(tl.float32)
    acc, row_max, row_sum = _fold(acc, row_max, row_sum, part, lse)
    p_lse = lse_b + i_token * lse_b_stride_t + i_head * lse_b_stride_n
    p_part = out_b + i_token * b_stride_t + i_head[:, None] * b_stride_n + o_d[None, :]
    lse = tl.load(p_lse, mask=m_h, other=float("-inf")) * LOG2_E
    part = tl.load(p_part, mask=m_hd, other=0.0).to(tl.float32)
    acc, row_max, row_sum = _fold(acc, row_max, row_sum, part, lse)
    acc, lse = _finish(acc, row_max, row_sum, sinks, i_head, m_h, SINKS)
    o_out = i_token * HEADS + i_head
    tl.store(out + o_out[:, None] * VALUE_DIM + o_d[None, :], rounded(acc, out.dtype.element_ty), mask=m_hd)
    tl.store(lse_out + o_out, lse, mask=m_h)


def merge_parts(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    dtype: torch.dtype | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge two parts of every token. See `kernels.merge.merge_parts`."""
    tokens, heads, dim = out_a.shape
    assert out_b.shape == out_a.shape
    assert lse_a.shape == lse_b.shape == (tokens, heads)
    assert out_a.stride(2) == 1
    assert out_b.stride(2) == 1
    out = torch.empty(tokens, heads, dim, dtype=out_a.dtype if dtype is None else dtype, device=out_a.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=out_a.device)
    block_d = power_of_2(dim, 16)
    block_h = min(power_of_2(heads), max(1, _BLOCK // block_d))
    launch(
        _merge_parts_kernel, (tokens * -(-heads // block_h),), out_a, lse_a, out_b, lse_b, out, lse, sinks,
        *out_a.stride()[:2], *lse_a.stride(), *out_b.stride()[:2], *lse_b.stride(),
        HEADS=heads, VALUE_DIM=dim, BLOCK_H=block_h, BLOCK_D=block_d, SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip
    return out, lse
