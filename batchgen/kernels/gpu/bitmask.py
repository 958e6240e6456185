"""Packed token masks in Triton, as `kernels.bitmask`, in place: writes masked logits only, reads none."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.gpu.common import power_of_2
from batchgen.kernels.gpu.launch import launch

_WORDS = 128
"""Most words (of 32 tokens) per program."""


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
    """See `kernels.bitmask.apply_bitmask`."""
    masks, vocab = bitmask.shape[0], logits.shape[1]
    words = min(_WORDS, power_of_2(triton.cdiv(vocab, 32)))
    blocks = triton.cdiv(vocab, 32 * words)
    launch(
        _bitmask_kernel, (masks * blocks,), logits, logits.stride(0), logits.stride(1),
        bitmask, bitmask.stride(0), bitmask.stride(1), None if rows is None else rows.contiguous(), vocab, blocks,
        WORDS=words, HAS_ROWS=rows is not None, num_warps=4,
    )  # fmt: skip
