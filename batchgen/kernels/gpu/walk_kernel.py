"""The kernel of attention by interruptible walks: one machine code for whatever stands in a step. See `walk_list`."""

from __future__ import annotations

import triton
import triton.language as tl

from batchgen.kernels.gpu.attention_kernel import LOG2_E, LOWEST, _step
from batchgen.kernels.gpu.common import rounded

__all__ = ["walk_kernel"]


@triton.jit(do_not_specialize=["window", "state_from"])
def walk_kernel(
    query, keys, values, out, state_out, state_max, state_sum, items, rows, positions, pages, sinks,
    query_stride_t, query_stride_n, state_from, window, score_scale, inv_softcap, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ITEM_FIELDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PACKED: tl.constexpr,
    ALIGNED: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """softmax(scale * Q K^T) V of one work item for the heads of one key head, from its first step to its last.

    Shapes:
        query [T, N, D] with strides, keys [P, S, K, D], values [P, S, K, Dv], out [T, N, Dv], state_out [R, N, Dv],
        state_max and state_sum [R, N] float32, items [I, ITEM_FIELDS] int32, sinks [N]; the rest int32 lists.
        The state of token t stands at t - state_from.
    Grid:
        items x key heads x blocks of PACKED heads, heads fastest. A tile has BLOCK_M rows: BLOCK_M // PACKED tokens
        times PACKED heads.
    Numerics:
        as `attention_kernel`, but every step is masked: a row's numbers are then the same whoever else is in the tile.
        A step that a row sees nothing of changes none of its bits. What is put aside is the walk's float32 state as it
        is, so that a walk in several items gives the bits of a walk in one.
    Bytes:
        per item and key head (end - begin) * (D + Dv) elements of the pool, queries and results once; a state that is
        put aside 4 (Dv + 2) per token and head.
    """
    HEAD_BLOCKS: tl.constexpr = (HEADS // KV_HEADS + PACKED - 1) // PACKED
    i_program = tl.program_id(0)
    i_kv_head = i_program % (KV_HEADS * HEAD_BLOCKS) // HEAD_BLOCKS
    i_block = i_program % HEAD_BLOCKS
    p_item = items + (i_program // (KV_HEADS * HEAD_BLOCKS)) * ITEM_FIELDS
    count = tl.load(p_item + 1)
    if count == 0:
        return
    rows_at = tl.load(p_item)
    p_pages = pages + tl.load(p_item + 2)
    base = tl.load(p_item + 3)
    first = tl.load(p_item + 4) - base
    begin = tl.multiple_of(tl.load(p_item + 5) - base, ALIGNED)
    end = tl.load(p_item + 6) - base
    resumed = tl.load(p_item + 7)
    put_aside = tl.load(p_item + 8)

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_v = tl.arange(0, BLOCK_V)
    i_query = o_m // PACKED  # [BM]
    i_in_group = i_block * PACKED + o_m % PACKED
    m_m = (i_query < count) & (i_in_group < HEADS // KV_HEADS)
    m_mv = m_m[:, None] & (o_v < VALUE_DIM)[None, :]
    i_head = i_kv_head * (HEADS // KV_HEADS) + i_in_group
    token = tl.load(rows + rows_at + i_query, mask=m_m, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=m_m, other=0) - base
    p_q = query + token[:, None] * query_stride_t + i_head[:, None].to(tl.int64) * query_stride_n + o_d[None, :]
    q = tl.load(p_q, mask=m_m[:, None] & (o_d < KEY_DIM)[None, :], other=0.0)  # [BM, D]
    if q.dtype != keys.dtype.element_ty:
        q = rounded(q.to(tl.float32), keys.dtype.element_ty)

    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if resumed != 0:
        o_state = (token - state_from) * HEADS + i_head  # [BM]
        acc = tl.load(state_out + o_state[:, None] * VALUE_DIM + o_v[None, :], mask=m_mv, other=0.0)  # [BM, Dv]
        row_max = tl.load(state_max + o_state, mask=m_m, other=LOWEST)
        row_sum = tl.load(state_sum + o_state, mask=m_m, other=0.0)
    for i_step in range((end - begin + BLOCK_N - 1) // BLOCK_N):
        acc, row_max, row_sum = _step(
            acc, row_max, row_sum, q, begin + i_step * BLOCK_N,
            keys, values, p_pages, i_kv_head, position, first, end, window, score_scale, inv_softcap, softcap,
            KV_HEADS, KEY_DIM, VALUE_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, BLOCK_V, True, WINDOWED, SOFTCAPPED,
        )  # fmt: skip

    if put_aside != 0:
        o_state = (token - state_from) * HEADS + i_head
        tl.store(state_out + o_state[:, None] * VALUE_DIM + o_v[None, :], acc, mask=m_mv)
        tl.store(state_max + o_state, row_max, mask=m_m)
        tl.store(state_sum + o_state, row_sum, mask=m_m)
    else:
        if SINKS:
            sink = tl.load(sinks + i_head, mask=m_m, other=0.0).to(tl.float32) * LOG2_E
            new_max = tl.maximum(row_max, sink)
            decay = tl.exp2(row_max - new_max)
            row_sum = row_sum * decay + tl.exp2(sink - new_max)
            acc = acc * decay[:, None]
        acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        p_out = out + (token * HEADS + i_head)[:, None] * VALUE_DIM + o_v[None, :]
        tl.store(p_out, rounded(acc, out.dtype.element_ty), mask=m_mv)
