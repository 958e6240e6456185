"""The Triton kernel of paged attention for prefill, decode and shared prefixes. See `attention`."""

from __future__ import annotations

import triton
import triton.language as tl

from batchgen.kernels.gpu.common import dot, from_e4m3, rounded

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)
"""Initial running maximum: finite, so that rows that see nothing do not subtract infinities."""


@triton.jit
def _step(
    acc, row_max, row_sum, q, q_rest, begin,
    keys, values, p_pages, base_head, position, first, end, window, score_scale, inv_softcap, softcap,
    KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAPPED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Attend to keys [begin, begin + BLOCK_N) of the item's page table; online softmax in base 2.

    BLOCK_R: 0, or values are the first VALUE_DIM numbers of the keys, loaded once for both, and BLOCK_R covers the rest
    of a key, to which `q_rest` belongs.
    """
    WIDTH: tl.constexpr = VALUE_DIM if BLOCK_R else KEY_DIM  # numbers of a key that `q` is multiplied with
    o_n = begin + tl.arange(0, BLOCK_N)  # [BN]
    o_d = tl.arange(0, BLOCK_D)
    o_v = tl.arange(0, BLOCK_V)
    m_n = (o_n >= first) & (o_n < end)
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(p_pages + begin // PAGE_SIZE)  # the whole step is in one page
        slot = page.to(tl.int64) * PAGE_SIZE + o_n % PAGE_SIZE  # [BN]
    elif MASKED:
        slot = tl.load(p_pages + o_n // PAGE_SIZE, mask=m_n, other=0).to(tl.int64) * PAGE_SIZE + o_n % PAGE_SIZE
    else:
        slot = tl.load(p_pages + o_n // PAGE_SIZE).to(tl.int64) * PAGE_SIZE + o_n % PAGE_SIZE
    slot_head = slot * KV_HEADS + base_head  # [BN]
    p_k = keys + slot_head[:, None] * KEY_DIM + o_d[None, :]  # [BN, D]
    p_v = values + slot_head[:, None] * VALUE_DIM + o_v[None, :]  # [BN, Dv]
    if MASKED:
        k = tl.load(p_k, mask=m_n[:, None] & (o_d < WIDTH)[None, :], other=0.0)
    elif WIDTH < BLOCK_D:
        k = tl.load(p_k, mask=(o_d < WIDTH)[None, :], other=0.0)
    else:
        k = tl.load(p_k)
    if k.dtype == tl.uint8:
        k = from_e4m3(k, NATIVE, q.dtype)
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32))  # [BM, BN]
    if BLOCK_R:
        o_r = VALUE_DIM + tl.arange(0, BLOCK_R)
        p_r = keys + slot_head[:, None] * KEY_DIM + o_r[None, :]  # [BN, R]
        rest = tl.load(p_r, mask=m_n[:, None] & (o_r < KEY_DIM)[None, :], other=0.0)
        scores = dot(q_rest, tl.trans(rest), scores)
    if SOFTCAPPED:
        # tanh(x) = sign(x) (1 - e) / (1 + e), e = exp(-2 |x|)
        x = scores * inv_softcap
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
        scores = tl.where(x < 0, -softcap, softcap) * (1.0 - e) / (1.0 + e)
    else:
        scores = scores * score_scale
    if MASKED:
        visible = (o_n[None, :] <= position[:, None]) & m_n[None, :]
        if WINDOWED:
            visible &= o_n[None, :] > position[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    p = tl.exp2(scores - new_max[:, None])  # [BM, BN]
    decay = tl.exp2(row_max - new_max)
    row_sum = row_sum * decay + tl.sum(p, 1)
    acc = acc * decay[:, None]
    if BLOCK_R:
        v = k
    elif MASKED:
        v = tl.load(p_v, mask=m_n[:, None] & (o_v < VALUE_DIM)[None, :], other=0.0)
    elif VALUE_DIM < BLOCK_V:
        v = tl.load(p_v, mask=(o_v < VALUE_DIM)[None, :], other=0.0)
    else:
        v = tl.load(p_v)
    if v.dtype == tl.uint8:
        v = from_e4m3(v, NATIVE, q.dtype)
    return dot(rounded(p, v.dtype), v, acc), new_max, row_sum


@triton.jit(do_not_specialize=["window"])
def attention_kernel(
    query, keys, values, out, part_out, part_lse, items, rows, positions, pages, parts, sinks,
    query_stride_t, query_stride_n, window, score_scale, inv_softcap, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ITEM_FIELDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
    PACKED: tl.constexpr, PEELED: tl.constexpr, FOLDED: tl.constexpr,
    WINDOWED: tl.constexpr, SOFTCAPPED: tl.constexpr, SINKS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """softmax(scale * Q K^T) V of one work item for the heads of one key head (or a block of them).

    Shapes:
        query [T, N, D] with strides, keys [P, S, K, D], values [P, S, K, Dv] (with BLOCK_R not read, see `_step`), out
        [T, N, Dv], part_out [E, N, Dv] float32, part_lse [E, N] float32, items [I, ITEM_FIELDS] int32, sinks [N]; the
        rest int32 lists (`work_list`).
    Grid:
        items x key heads x blocks of PACKED heads, heads fastest: programs that run together read whole tokens of the
        pool. A tile has BLOCK_M rows: BLOCK_M // PACKED tokens times PACKED heads.
    Numerics:
        Products of operands in the pool's dtype, or in the query's over a pool of E4M3 (uint8), with float32 sums,
        softmax in base 2 in float32. Rows that see none of an item's keys leave zeros and a log-sum-exp of -inf. Keys
        outside [first, end) are not loaded.
    Bytes:
        per item and key head (end - first) * (D + Dv) elements of the pool, or D with BLOCK_R; queries and results
        once.
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
    first = tl.load(p_item + 4)
    full_from = tl.load(p_item + 5)
    full_to = tl.load(p_item + 6)
    end = tl.load(p_item + 7)
    part_at = tl.load(p_item + 8)

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_v = tl.arange(0, BLOCK_V)
    i_query = o_m // PACKED  # [BM]
    i_in_group = i_block * PACKED + o_m % PACKED
    m_m = (i_query < count) & (i_in_group < HEADS // KV_HEADS)
    i_head = i_kv_head * (HEADS // KV_HEADS) + i_in_group
    token = tl.load(rows + rows_at + i_query, mask=m_m, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=m_m, other=0) - base
    p_head = query + token[:, None] * query_stride_t + i_head[:, None].to(tl.int64) * query_stride_n
    WIDTH: tl.constexpr = VALUE_DIM if BLOCK_R else KEY_DIM
    q = tl.load(p_head + o_d[None, :], mask=m_m[:, None] & (o_d < WIDTH)[None, :], other=0.0)  # [BM, D]
    if q.dtype != keys.dtype.element_ty and keys.dtype.element_ty != tl.uint8:
        q = rounded(q.to(tl.float32), keys.dtype.element_ty)
    q_rest = q
    if BLOCK_R:
        o_r = VALUE_DIM + tl.arange(0, BLOCK_R)
        q_rest = tl.load(p_head + o_r[None, :], mask=m_m[:, None] & (o_r < KEY_DIM)[None, :], other=0.0)  # [BM, R]
        if q_rest.dtype != keys.dtype.element_ty:
            q_rest = rounded(q_rest.to(tl.float32), keys.dtype.element_ty)

    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    m_mv = m_m[:, None] & (o_v < VALUE_DIM)[None, :]
    edge = first // BLOCK_N * BLOCK_N
    steps = (end - edge + BLOCK_N - 1) // BLOCK_N
    if PEELED:
        for begin in range(full_from, full_to, BLOCK_N):
            acc, row_max, row_sum = _step(
                acc, row_max, row_sum, q, q_rest, begin,
                keys, values, p_pages, i_kv_head, position, first, end, window, score_scale, inv_softcap, softcap,
                KV_HEADS, KEY_DIM, VALUE_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_R, False, WINDOWED,
                SOFTCAPPED, NATIVE,
            )  # fmt: skip
        steps -= (full_to - full_from) // BLOCK_N
    for i_step in range(steps):
        begin = edge + i_step * BLOCK_N
        if PEELED:
            begin = tl.where(begin >= full_from, begin + full_to - full_from, begin)
        acc, row_max, row_sum = _step(
            acc, row_max, row_sum, q, q_rest, begin,
            keys, values, p_pages, i_kv_head, position, first, end, window, score_scale, inv_softcap, softcap,
            KV_HEADS, KEY_DIM, VALUE_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_R, True, WINDOWED, SOFTCAPPED,
            NATIVE,
        )  # fmt: skip

    if FOLDED:
        p_fold = parts + tl.load(p_item + 9)
        for i_fold in range(tl.load(p_item + 10)):
            o_part = tl.load(p_fold + i_fold).to(tl.int64) * HEADS + i_head  # [BM]
            lse = tl.load(part_lse + o_part, mask=m_m, other=float("-inf")) * LOG2_E
            part = tl.load(part_out + o_part[:, None] * VALUE_DIM + o_v[None, :], mask=m_mv, other=0.0)
            new_max = tl.maximum(row_max, lse)
            weight = tl.exp2(lse - new_max)
            decay = tl.exp2(row_max - new_max)
            acc = acc * decay[:, None] + part * weight[:, None]
            row_sum = row_sum * decay + weight
            row_max = new_max

    if part_at < 0:
        if SINKS:
            sink = tl.load(sinks + i_head, mask=m_m, other=0.0).to(tl.float32) * LOG2_E
            new_max = tl.maximum(row_max, sink)
            decay = tl.exp2(row_max - new_max)
            row_sum = row_sum * decay + tl.exp2(sink - new_max)
            acc = acc * decay[:, None]
        acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        p_out = out + (token * HEADS + i_head)[:, None] * VALUE_DIM + o_v[None, :]
        tl.store(p_out, rounded(acc, out.dtype.element_ty), mask=m_mv)
    else:
        acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        o_part = (part_at + i_query).to(tl.int64) * HEADS + i_head
        tl.store(part_out + o_part[:, None] * VALUE_DIM + o_v[None, :], acc, mask=m_mv)
        lse = tl.where(
            row_sum == 0.0, float("-inf"), (row_max + tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum))) * LN_2
        )
        tl.store(part_lse + o_part, lse, mask=m_m)
