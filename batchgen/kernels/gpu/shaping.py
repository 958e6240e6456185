"""Biases and masks by (row, token) pairs in Triton, as `kernels.shaping`: in place, a few bytes per pair."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.gpu.launch import launch

_PAIRS = 128
"""Pairs per program."""
_BLOCK = 4096
"""Logits per program when whole rows are filled."""


@triton.jit
def _pair(p_logits, stride_r, stride_v, p_row, stride_row, p_id, stride_id, pairs, PAIRS: tl.constexpr):
    """Indexes of a program's pairs, their mask, their rows, and the addresses of their logits."""
    o_pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    m_pair = o_pair < pairs
    i_row = tl.load(p_row + o_pair * stride_row, mask=m_pair, other=0)
    i_v = tl.load(p_id + o_pair * stride_id, mask=m_pair, other=0)
    return o_pair, m_pair, i_row, p_logits + i_row * stride_r + i_v * stride_v


@triton.jit(do_not_specialize=["pairs"])
def _bias_kernel(
    p_logits, stride_r, stride_v, p_row, stride_row, p_id, stride_id, pairs, p_value, PAIRS: tl.constexpr
):  # fmt: skip
    """x[row[i], id[i]] += value[i], atomically, as pairs may repeat. Grid: (m / PAIRS)."""
    o_pair, m_pair, _, p_x = _pair(p_logits, stride_r, stride_v, p_row, stride_row, p_id, stride_id, pairs, PAIRS)
    value = tl.load(p_value + o_pair, mask=m_pair, other=0.0)
    tl.atomic_add(p_x, value, mask=m_pair, sem="relaxed")


@triton.jit(do_not_specialize=["pairs"])
def _move_kernel(
    p_logits, stride_r, stride_v, p_row, stride_row, p_id, stride_id, pairs, p_kept,
    PAIRS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """kept[i] = x[row[i], id[i]], or BACK. Grid: (m / PAIRS)."""
    o_pair, m_pair, _, p_x = _pair(p_logits, stride_r, stride_v, p_row, stride_row, p_id, stride_id, pairs, PAIRS)
    if BACK:
        tl.store(p_x, tl.load(p_kept + o_pair, mask=m_pair, other=0.0), mask=m_pair)
    else:
        tl.store(p_kept + o_pair, tl.load(p_x, mask=m_pair, other=0.0), mask=m_pair)


@triton.jit
def _bar_kernel(p_logits, stride_r, stride_v, p_row, vocab, blocks, BLOCK: tl.constexpr):
    """x[row[i], :] = -inf. Grid: (w * blocks). Writes w * V logits."""
    pid = tl.program_id(0).to(tl.int64)
    i_row = tl.load(p_row + pid // blocks)
    o_v = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    barred = tl.full([BLOCK], -float("inf"), tl.float32)
    tl.store(p_logits + i_row * stride_r + o_v * stride_v, barred, mask=o_v < vocab)


@triton.jit(do_not_specialize=["rows"])
def _drew_kernel(p_logits, stride_r, stride_v, p_row, p_token, p_out, rows, ROWS: tl.constexpr):
    """out[i] = x[row[i], token[row[i]]] is -inf. Grid: (w / ROWS)."""
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < rows
    i_row = tl.load(p_row + o_row, mask=m_row, other=0)
    i_v = tl.load(p_token + i_row, mask=m_row, other=0)
    x = tl.load(p_logits + i_row * stride_r + i_v * stride_v, mask=m_row, other=0.0)
    tl.store(p_out + o_row, x == -float("inf"), mask=m_row)


def _launch_pairs(kernel: object, logits: Tensor, rows: Tensor, ids: Tensor, *args: Tensor, **constants: bool) -> None:
    pairs = rows.shape[0]
    launch(
        kernel, (triton.cdiv(pairs, _PAIRS),), logits, logits.stride(0), logits.stride(1),
        rows, rows.stride(0), ids, ids.stride(0), pairs, *args, PAIRS=_PAIRS, num_warps=4, **constants,
    )  # fmt: skip


def add_bias(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """See `kernels.shaping.add_bias`; the order in which equal pairs are added is undefined."""
    _launch_pairs(_bias_kernel, logits, rows, ids, values.contiguous())


def keep_only(logits: Tensor, whole: Tensor, rows: Tensor, ids: Tensor) -> None:
    """See `kernels.shaping.keep_only`, for any float type."""
    kept = torch.empty(rows.shape[0], dtype=logits.dtype, device=logits.device)
    _launch_pairs(_move_kernel, logits, rows, ids, kept, BACK=False)
    blocks = triton.cdiv(logits.shape[1], _BLOCK)
    launch(
        _bar_kernel, (whole.shape[0] * blocks,), logits, logits.stride(0), logits.stride(1), whole.contiguous(),
        logits.shape[1], blocks, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    _launch_pairs(_move_kernel, logits, rows, ids, kept, BACK=True)


def drew_masked(logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """See `kernels.shaping.drew_masked`, for any float type."""
    count = rows.shape[0]
    out = torch.empty(count, dtype=torch.bool, device=logits.device)
    launch(
        _drew_kernel, (triton.cdiv(count, _PAIRS),), logits, logits.stride(0), logits.stride(1), rows.contiguous(),
        tokens.contiguous(), out, count, ROWS=_PAIRS, num_warps=4,
    )  # fmt: skip
    return out
