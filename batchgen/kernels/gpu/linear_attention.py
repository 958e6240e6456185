"""Linear attention of runs, token by token, which reads and writes their states in place."""

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

_TILE: Final = 2048
"""Numbers of a state in a program, which has one warp: the tokens of a run wait for one another, values do not."""


@triton.jit(do_not_specialize=["stride_rows"], do_not_specialize_on_alignment=RUN_POINTERS)
def _attend(
    p_q, p_k, p_v, p_g, p_beta, p_states, p_out, p_rows, p_lengths, p_sources, p_slots, stride_rows,
    stride_q, stride_k, stride_v, stride_g, stride_beta,
    HEADS: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DECAYS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_DECAYS: tl.constexpr, DELTA: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """S = exp(g) S + k u^T of each token of a run, from S = its source, and out = S^T q; with READ, S is the source.

        u = v, and with DELTA u = beta (v - (exp(g) S)^T k)

    q and k [T, G, K], v [T, H, V], g [T, H, DECAYS] with 1 or K decays, beta [T, H], each with the stride of a token;
    states [P, H, K, V] float32, out [T, H, V]. Head h has key h // RATIO.
    Grid: (runs, H, blocks of values). A block of the state stays in registers while the program walks over the run.
    Float32. Bytes: q, k and g once per block of values, the state twice, v and out once.
    """
    i_head = tl.program_id(1)
    start, length, source, slot = load_run(p_rows, p_lengths, p_sources, p_slots, stride_rows, tl.program_id(0))
    o_key, o_decay = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_DECAYS)  # [k], [d]
    o_value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)  # [v]
    m_key, m_value, m_decay = o_key < K, o_value < V, o_decay < DECAYS
    o_cell = (i_head * K + o_key)[:, None] * V + o_value[None, :]  # [k, v]
    m_cell = m_key[:, None] & m_value[None, :]
    o_key, o_value, o_decay = i_head // RATIO * K + o_key, i_head * V + o_value, i_head * DECAYS + o_decay
    b_state = tl.load(p_states + source * HEADS * K * V + o_cell, mask=m_cell, other=0.0)  # [k, v]
    for i in tl.range(0, length, num_stages=3):
        row = start + i
        b_q = tl.load(p_q + row * stride_q + o_key, mask=m_key, other=0.0).to(tl.float32)  # [k]
        if READ == 0:
            b_k = tl.load(p_k + row * stride_k + o_key, mask=m_key, other=0.0).to(tl.float32)  # [k]
            b_u = tl.load(p_v + row * stride_v + o_value, mask=m_value, other=0.0).to(tl.float32)  # [v]
            b_g = tl.load(p_g + row * stride_g + o_decay, mask=m_decay, other=0.0).to(tl.float32)  # [d]
            b_state *= tl.exp(b_g)[:, None]
            if DELTA:
                b_known = tl.sum(b_state * b_k[:, None], axis=0)  # [v]
                b_u = (b_u - b_known) * tl.load(p_beta + row * stride_beta + i_head).to(tl.float32)
            b_state += b_k[:, None] * b_u[None, :]
        b_out = tl.sum(b_state * b_q[:, None], axis=0)  # [v]
        tl.store(p_out + row * HEADS * V + o_value, rounded(b_out, p_out.dtype.element_ty), mask=m_value)
    if READ == 0:
        tl.debug_barrier()  # a thread may still load what another one overwrites
        if slot != 0:
            tl.store(p_states + slot * HEADS * K * V + o_cell, b_state, mask=m_cell)


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    states: Tensor,
    batches: Sequence[RunBatch],
) -> Tensor:
    """Compute the rows of a step, and keep their states. See `kernels.mixers.linear_attention.linear_attention`."""
    (groups, size), (heads, width) = key.shape[1:], value.shape[1:]
    assert states.is_contiguous()
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    inputs = [packed(x) for x in (query, key, value, decay, decay if beta is None else beta)]
    decays, block_key = (size if decay.ndim == 3 else 1), power_of_2(size)
    block = min(max(1, _TILE // block_key), power_of_2(width))
    for batch in batches:
        launch(
            _attend, (len(batch.rows), heads, triton.cdiv(width, block)), *inputs, states, out, *run_args(batch),
            *(x.stride(0) for x in inputs),
            HEADS=heads, RATIO=heads // groups, K=size, V=width, DECAYS=decays, BLOCK_K=block_key, BLOCK_V=block,
            BLOCK_DECAYS=1 if decays == 1 else block_key, DELTA=beta is not None, READ=int(batch.slots is None),
            num_warps=1,
        )  # fmt: skip
    return out
