"""Short causal convolution of runs in one launch, which reads and writes their last inputs in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.gpu.common import power_of_2, rounded
from batchgen.kernels.gpu.launch import launch
from batchgen.kernels.gpu.runs import RUN_POINTERS, load_run, packed, run_args
from batchgen.kernels.mixers.states import RunBatch

_CHANNELS: Final = 512
"""Most channels of a program with one token."""
_TILE: Final = (16, 128)
"""Tokens and most channels of the others. A filter may have one number more than a tile has tokens."""


@triton.jit(do_not_specialize=["stride_rows"], do_not_specialize_on_alignment=RUN_POINTERS)
def _conv(
    p_x, p_weight, p_bias, p_states, p_out, p_rows, p_lengths, p_sources, p_slots, stride_rows, stride_x,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """out[t, c] = act(bias[c] + sum over j: weight[c, j] * input[t - WIDTH + 1 + j, c]) of a run's tokens t.

    The inputs before a run's first token are in its source [WIDTH, C], oldest first; with READ, that of its only token
    is there, too. x [T, C] with stride `stride_x`, weight [C, WIDTH], states [P, WIDTH, C], out [T, C].
    Grid: (runs, tiles of BLOCK_TOKENS tokens, blocks of channels). The first tile alone reads the source, and then
    stores the last inputs in the slot, so source and slot may be the same. Float32 sums, rounded once. Bytes: x once
    (its neighbours come from the cache) and out once, the state twice.
    """
    i_run, i_tile = tl.program_id(0), tl.program_id(1)
    start, length, source, slot = load_run(p_rows, p_lengths, p_sources, p_slots, stride_rows, i_run)
    if i_tile * BLOCK_TOKENS >= length:
        return
    o_token = i_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)  # [t]
    o_channel = tl.program_id(2) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)  # [c]
    m_token, m_channel = o_token < length, o_channel < CHANNELS
    p_source = p_states + source * WIDTH * CHANNELS + o_channel[None, :]  # [1, c]
    p_inputs = p_x + o_channel[None, :]  # [1, c]
    acc = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.float32)
    if BIAS:
        acc += tl.load(p_bias + o_channel, mask=m_channel, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(WIDTH):
        o_at = o_token - WIDTH + 1 + j  # [t] place of the input in the run
        m_old = (m_token & (o_at < READ))[:, None] & m_channel[None, :]
        m_new = (m_token & (o_at >= READ))[:, None] & m_channel[None, :]
        b_old = tl.load(p_source + (WIDTH - READ + o_at)[:, None] * CHANNELS, mask=m_old, other=0.0)
        b_new = tl.load(p_inputs + (start + o_at)[:, None] * stride_x, mask=m_new, other=0.0)
        b_weight = tl.load(p_weight + o_channel * WIDTH + j, mask=m_channel, other=0.0).to(tl.float32)  # [c]
        acc += (b_old.to(tl.float32) + b_new.to(tl.float32)) * b_weight[None, :]
    if SILU:
        acc = acc / (1 + tl.exp(-acc))
    p_cells = p_out + (start + o_token)[:, None] * CHANNELS + o_channel[None, :]
    tl.store(p_cells, rounded(acc, p_out.dtype.element_ty), mask=m_token[:, None] & m_channel[None, :])
    if (READ == 0) & (i_tile == 0):
        o_kept = tl.arange(0, BLOCK_WIDTH)  # [w]
        o_last = length - WIDTH + o_kept
        m_row = (o_kept < WIDTH)[:, None] & m_channel[None, :]
        m_before = m_row & (o_last < 0)[:, None]
        b_before = tl.load(p_source + (WIDTH + o_last)[:, None] * CHANNELS, mask=m_before, other=0.0)
        b_own = tl.load(p_inputs + (start + o_last)[:, None] * stride_x, mask=m_row & (o_last >= 0)[:, None], other=0.0)
        b_kept = tl.where(m_before, b_before.to(tl.float32), b_own.to(tl.float32))
        p_kept = p_states + (slot * WIDTH + o_kept)[:, None] * CHANNELS + o_channel[None, :]
        tl.debug_barrier()  # a thread may still load what another one overwrites
        if slot != 0:
            tl.store(p_kept, rounded(b_kept, p_states.dtype.element_ty), mask=m_row)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batches: Sequence[RunBatch], activation: str | None
) -> Tensor:
    """Convolve the rows of a step, and keep their last inputs. See `kernels.mixers.conv.causal_conv`."""
    channels, width = weight.shape
    x, out = packed(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert weight.is_contiguous()
    assert states.is_contiguous()
    assert width <= _TILE[0] + 1
    for batch in batches:
        runs, longest = batch.rows.shape
        tokens, most = (1, _CHANNELS) if longest == 1 else _TILE
        block = min(most, power_of_2(channels))
        launch(
            _conv, (runs, triton.cdiv(longest, tokens), triton.cdiv(channels, block)),
            x, weight, weight if bias is None else bias, states, out, *run_args(batch), x.stride(0),
            CHANNELS=channels, WIDTH=width, BLOCK_TOKENS=tokens, BLOCK_CHANNELS=block, BLOCK_WIDTH=power_of_2(width),
            BIAS=bias is not None, SILU=activation is not None, READ=int(batch.slots is None), num_warps=4,
        )  # fmt: skip
    return out
