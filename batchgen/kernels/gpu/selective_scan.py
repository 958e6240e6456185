"""Selective scan of Mamba-1 over runs, which reads and writes their states in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.gpu.common import power_of_2
from batchgen.kernels.gpu.launch import launch
from batchgen.kernels.gpu.runs import RUN_POINTERS, load_run, packed, run_args
from batchgen.kernels.mixers.states import RunBatch

_TILE: Final = 512
"""Numbers of a state in a program, which has one warp: the tokens of a run wait for one another, channels do not."""


@triton.jit(do_not_specialize=["stride_rows"], do_not_specialize_on_alignment=RUN_POINTERS)
def _scan(
    p_x, p_dt, p_a, p_b, p_c, p_states, p_out, p_rows, p_lengths, p_sources, p_slots, stride_rows,
    stride_x, stride_dt, stride_b, stride_c,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    READ: tl.constexpr,
):  # fmt: skip
    """Of each token of a run: s = exp(dt a) s + dt x b, from s = its source, and out = s c; with READ, s is the source.

    x and dt [T, C], a [C, N], b and c [T, N], each with the stride of a token; states [P, C, N] and out [T, C] float32.
    Grid: (runs, blocks of channels). Float32. Bytes: b and c once per block, the state twice, everything else once.
    """
    start, length, source, slot = load_run(p_rows, p_lengths, p_sources, p_slots, stride_rows, tl.program_id(0))
    o_channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)  # [c]
    o_size = tl.arange(0, BLOCK_SIZE)  # [n]
    m_channel, m_size = o_channel < CHANNELS, o_size < SIZE
    o_cell = o_channel[:, None] * SIZE + o_size[None, :]  # [c, n]
    m_cell = m_channel[:, None] & m_size[None, :]
    b_state = tl.load(p_states + source * CHANNELS * SIZE + o_cell, mask=m_cell, other=0.0)  # [c, n]
    b_a = tl.load(p_a + o_cell, mask=m_cell, other=0.0).to(tl.float32)  # [c, n]
    for i in tl.range(0, length, num_stages=3):
        row = start + i
        b_c = tl.load(p_c + row * stride_c + o_size, mask=m_size, other=0.0).to(tl.float32)  # [n]
        if READ == 0:
            b_x = tl.load(p_x + row * stride_x + o_channel, mask=m_channel, other=0.0).to(tl.float32)  # [c]
            b_dt = tl.load(p_dt + row * stride_dt + o_channel, mask=m_channel, other=0.0).to(tl.float32)  # [c]
            b_b = tl.load(p_b + row * stride_b + o_size, mask=m_size, other=0.0).to(tl.float32)  # [n]
            b_state = tl.exp(b_dt[:, None] * b_a) * b_state + (b_dt * b_x)[:, None] * b_b[None, :]
        tl.store(p_out + row * CHANNELS + o_channel, tl.sum(b_state * b_c[None, :], axis=1), mask=m_channel)
    if READ == 0:
        tl.debug_barrier()  # a thread may still load what another one overwrites
        if slot != 0:
            tl.store(p_states + slot * CHANNELS * SIZE + o_cell, b_state, mask=m_cell)


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor, batches: Sequence[RunBatch]
) -> Tensor:
    """Compute the rows of a step, and keep their states. See `kernels.mixers.selective_scan.selective_scan`."""
    channels, size = a.shape
    x, dt, b, c = packed(x), packed(dt), packed(b), packed(c)
    assert a.is_contiguous()
    assert states.is_contiguous()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    block_size = power_of_2(size)
    block = min(max(1, _TILE // block_size), power_of_2(channels))
    for batch in batches:
        launch(
            _scan, (len(batch.rows), triton.cdiv(channels, block)), x, dt, a, b, c, states, out, *run_args(batch),
            x.stride(0), dt.stride(0), b.stride(0), c.stride(0),
            CHANNELS=channels, SIZE=size, BLOCK_CHANNELS=block, BLOCK_SIZE=block_size,
            READ=int(batch.slots is None), num_warps=1,
        )  # fmt: skip
    return out
