"""Biases and masks in Triton, as `kernels.shaping`: in place. Those by (row, token) pairs cost a few bytes per pair;
packed ones write masked logits only, and read none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.gpu.common import power_of_2
from batchgen.kernels.gpu.launch import launch

_PAIRS = 128
"""Pairs per program."""
_BLOCK = 4096
"""Logits per program when whole rows are filled."""
_WORDS = 128
"""Most words (of 32 tokens) per program."""


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


@triton.jit
def _bitmask_kernel(
    p_logits, stride_r, stride_v, p_mask, stride_m, stride_w, p_row, vocab, blocks,
    WORDS: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """x[row[i], t] = -inf where bit t % 32 of mask[i, t // 32] is 0; row[i] = i without rows.

    x [R, V] of any float type, mask [M, W] int32. Grid: (M * blocks), a block of WORDS words each. 64-bit addresses.
    Reads V / 8 bytes per mask, writes one logit per masked token.
    """
    pid = tl.program_id(0).to(tl.int64)
    i_mask, i_block = pid // blocks, (pid % blocks).to(tl.int32)
    i_row = tl.load(p_row + i_mask) if HAS_ROWS else i_mask
    o_word = i_block * WORDS + tl.arange(0, WORDS)
    words = tl.load(p_mask + i_mask * stride_m + o_word * stride_w, mask=o_word * 32 < vocab, other=-1)  # [WORDS]
    o_bit = tl.arange(0, 32)
    # Masked tokens are stored one by one; without a known alignment a warp's lanes are neighbouring tokens of a word.
    o_v = tl.multiple_of(o_word[:, None] * 32 + o_bit[None, :], [1, 1])  # [WORDS, 32]
    m_barred = (((words[:, None] >> o_bit[None, :]) & 1) == 0) & (o_v < vocab)
    barred = tl.full([WORDS, 32], -float("inf"), tl.float32)
    tl.store(p_logits + i_row * stride_r + o_v.to(tl.int64) * stride_v, barred, mask=m_barred)


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> None:
    """See `kernels.shaping.apply_bitmask`."""
    masks, vocab = bitmask.shape[0], logits.shape[1]
    words = min(_WORDS, power_of_2(triton.cdiv(vocab, 32)))
    blocks = triton.cdiv(vocab, 32 * words)
    launch(
        _bitmask_kernel, (masks * blocks,), logits, logits.stride(0), logits.stride(1),
        bitmask, bitmask.stride(0), bitmask.stride(1), None if rows is None else rows.contiguous(), vocab, blocks,
        WORDS=words, HAS_ROWS=rows is not None, num_warps=4,
    )  # fmt: skip
