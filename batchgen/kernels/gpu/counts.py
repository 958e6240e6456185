"""Token counts and penalties on device lists in Triton, as `kernels.counts`; empty lists cost nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.counts import CountLists, Penalties
from batchgen.kernels.gpu.launch import launch

_SCANNED = 1024
"""Tokens of a list processed together."""
_PENALISED = 256
"""Tokens of a list per program."""
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_MOST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _count_kernel(p_slot, p_row, p_token, p_ids, p_counts, p_used, width, BLOCK: tl.constexpr):
    """List of slot[q] <- token[row[q]]: increment its count if it is listed, else append it with a count of 1.

    Grid: (Q). Reads 4 bytes per token of the list. Tokens that do not fit in `width` are dropped.
    """
    i_slot = tl.load(p_slot + tl.program_id(0))
    if i_slot > 0:
        token = tl.load(p_token + tl.load(p_row + tl.program_id(0))).to(tl.int32)
        used = tl.load(p_used + i_slot)
        p_ids += i_slot * width
        p_counts += i_slot * width
        b_place = tl.full([BLOCK], -1, tl.int32)
        for start in range(0, used, BLOCK):
            o_id = start + tl.arange(0, BLOCK)
            ids = tl.load(p_ids + o_id, mask=o_id < used, other=-1)
            b_place = tl.where(ids == token, o_id, b_place)
        place = tl.max(b_place, axis=0)
        if place >= 0:
            tl.store(p_counts + place, tl.load(p_counts + place) + 1.0)
        elif used < width:
            tl.store(p_ids + used, token)
            tl.store(p_counts + used, 1.0)
            tl.store(p_used + i_slot, used + 1)


@triton.jit
def _penalise_kernel(
    p_logits, stride_r, stride_v, p_row, p_slot, p_ids, p_counts, p_used, width,
    p_repetition, p_frequency, p_presence, BLOCK: tl.constexpr,
):  # fmt: skip
    """Penalise the tokens of slot[q]'s list in x = logits[row[q]], float32.

        x = x / r if x > 0 else x * r;  x = x - f * count - p * (count > 0)

    Grid: (Q, most tokens / BLOCK). The division is rounded to nearest (IEEE 754) and never gives +inf. Moves 16 bytes
    per token of the list.
    """
    i_q = tl.program_id(0)
    i_slot = tl.load(p_slot + i_q)
    if i_slot > 0:
        used = tl.load(p_used + i_slot)
        start = tl.program_id(1) * BLOCK
        if start < used:
            o_id = start + tl.arange(0, BLOCK)
            m_id = o_id < used
            i_v = tl.load(p_ids + i_slot * width + o_id, mask=m_id, other=0).to(tl.int64)
            count = tl.load(p_counts + i_slot * width + o_id, mask=m_id, other=0.0)
            p_x = p_logits + tl.load(p_row + i_q) * stride_r + i_v * stride_v
            x = tl.load(p_x, mask=m_id, other=0.0)
            factor = tl.maximum(tl.load(p_repetition + i_q), _TINY)
            # Other values are not divided: a factor near 0 would make them infinite.
            divided = tl.minimum(tl.div_rn(tl.where(x > 0, x, 0.0), factor), _MOST)
            x = tl.where(x > 0, divided, x * factor)
            x -= count * tl.load(p_frequency + i_q)
            x -= tl.where(count > 0, tl.load(p_presence + i_q), 0.0)
            tl.store(p_x, x, mask=m_id)


def count_tokens(lists: CountLists, slots: Tensor, rows: Tensor, tokens: Tensor, width: int) -> None:
    """See `kernels.counts.count_tokens`; all tensors contiguous. `width` is ignored: lists know their length."""
    launch(
        _count_kernel, (slots.shape[0],), slots, rows, tokens, lists.ids, lists.counts, lists.used,
        lists.ids.shape[1], BLOCK=_SCANNED, num_warps=4,
    )  # fmt: skip


def penalise(logits: Tensor, rows: Tensor, slots: Tensor, lists: CountLists, penalties: Penalties, width: int) -> None:
    """See `kernels.counts.penalise`; all tensors but the logits contiguous. `width` only sizes the grid."""
    launch(
        _penalise_kernel, (slots.shape[0], triton.cdiv(width, _PENALISED)), logits, logits.stride(0), logits.stride(1),
        rows, slots, lists.ids, lists.counts, lists.used, lists.ids.shape[1], *penalties,
        BLOCK=_PENALISED, num_warps=4,
    )  # fmt: skip
