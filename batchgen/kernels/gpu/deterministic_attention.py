"""Batch-invariant attention in Triton: a token's result depends only on its own keys, bit for bit.

One specialisation of the kernel serves all work of a step. See `deterministic_list` for the order of the work.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.chips import ChipTuning, converts_fp8, fixed_tuning
from batchgen.kernels.gpu.attention import LOG2_E as LAUNCH_LOG2_E
from batchgen.kernels.gpu.attention import Heads, StepLists, block_m, product_dtype
from batchgen.kernels.gpu.attention_kernel import LOG2_E, LOWEST, _step
from batchgen.kernels.gpu.common import power_of_2, rounded
from batchgen.kernels.gpu.deterministic_list import DeterministicListShape
from batchgen.kernels.gpu.launch import launch
from batchgen.kernels.gpu.work_list import FIELDS
from batchgen.kernels.pooled import PooledAttention
from batchgen.kernels.types import AttentionArgs, AttentionBatch, KVPool


@triton.jit(do_not_specialize=["window", "state_from"])
def deterministic_attention_kernel(
    query, keys, values, out, state_out, state_max, state_sum, items, rows, positions, pages, sinks,
    query_stride_t, query_stride_n, state_from, window, score_scale, inv_softcap, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ITEM_FIELDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PACKED: tl.constexpr,
    ALIGNED: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAPPED: tl.constexpr, SINKS: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """softmax(scale * Q K^T) V of one work item for the heads of one key head, from its first step to its last.

    Shapes:
        query [T, N, D] with strides, keys [P, S, K, D], values [P, S, K, Dv], out [T, N, Dv], state_out [R, N, Dv],
        state_max and state_sum [R, N] float32, items [I, ITEM_FIELDS] int32, sinks [N]; the rest int32 lists.
        The state of token t has index t - state_from.
    Grid:
        items x key heads x blocks of PACKED heads, heads fastest. A tile has BLOCK_M rows: BLOCK_M // PACKED tokens
        times PACKED heads.
    Numerics:
        as `attention_kernel`, but every step is masked, so that a row's values do not depend on the other rows of its
        tile. A step in which a row sees no key changes none of its bits. The saved state is the scan's float32 state,
        unrounded, so that a scan in several items gives the same bits as one in a single item.
    Bytes:
        per item and key head (end - begin) * (D + Dv) elements of the pool, queries and results once; a saved state
        4 (Dv + 2) per token and head.
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
    saves_state = tl.load(p_item + 8)

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
    if q.dtype != keys.dtype.element_ty and keys.dtype.element_ty != tl.uint8:
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
            acc, row_max, row_sum, q, q, begin + i_step * BLOCK_N,
            keys, values, p_pages, i_kv_head, position, first, end, window, score_scale, inv_softcap, softcap,
            KV_HEADS, KEY_DIM, VALUE_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, BLOCK_V, 0, True, WINDOWED, SOFTCAPPED,
            NATIVE,
        )  # fmt: skip

    if saves_state != 0:
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


class DeterministicTritonAttention(PooledAttention):
    """One step's attention (the `PagedAttention` protocol): a launch per layer, and one per level of prefix groups.

    All launches of layers with the same sizes and options use one specialisation of the kernel.
    """

    def __init__(
        self, pool: KVPool, batch: AttentionBatch, tuning: ChipTuning | None = None, lists: StepLists | None = None
    ) -> None:
        """Attend over `pool`.

        Args:
            pool: keys and values, on the device of the kernels.
            batch: the step; its groups must be a tree (`plan_deterministic`).
            tuning: tile shapes; None: those of the pool's chip in `chips.toml`, never measured ones.
            lists: the step's work lists; None: new ones.
        """
        self._pool = pool
        self._batch = batch
        self._tuning = fixed_tuning(batch.slot_mapping.device) if tuning is None else tuning
        self._lists = StepLists(batch) if lists is None else lists

    def attend_stored(self, layer: int, query: Tensor, args: AttentionArgs) -> Tensor:
        """Attend over the stored keys and values. See `PagedAttention.attend_stored`.

        Raises:
            ValueError: no tile supports heads of that size.
        """
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        assert query.stride(2) == 1, "the last dimension of a query must be contiguous"
        assert keys.is_contiguous()
        assert values.is_contiguous()
        heads = Heads.of(query.shape[1], self._pool, layer)
        tile = heads.tile(self._tuning, "fixed", product_dtype(query, keys))
        rows_of_tile = block_m(tile, heads)
        packed = min(heads.group, rows_of_tile)
        shape = DeterministicListShape(self._pool.page_size, args.window, rows_of_tile // packed, tile.keys)
        uploaded = self._lists.get((heads, args.window, False), lambda: shape)
        out = query.new_empty(query.shape[0], heads.heads, heads.value_dim)
        rows = query.shape[0] - self._batch.decode_start if len(uploaded.items) > 1 else 0  # that may save a state
        state = query.new_empty(rows, heads.heads, heads.value_dim, dtype=torch.float32)
        largest, total = (query.new_empty(rows, heads.heads, dtype=torch.float32) for _ in range(2))
        cap = args.softcap or 1.0
        for number, items in enumerate(uploaded.items):
            launch(
                deterministic_attention_kernel,
                (uploaded.count(number) * heads.kv_heads * -(-heads.group // packed),), query, keys, values, out,
                state, largest, total, items, *uploaded.lists[:3], args.sinks, *query.stride()[:2],
                self._batch.decode_start, args.window or 0, args.scale * LAUNCH_LOG2_E, args.scale / cap,
                cap * LAUNCH_LOG2_E,
                HEADS=heads.heads, KV_HEADS=heads.kv_heads, KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim,
                PAGE_SIZE=keys.shape[1], ITEM_FIELDS=FIELDS, BLOCK_M=rows_of_tile, BLOCK_N=tile.keys,
                BLOCK_D=power_of_2(heads.key_dim, 16), BLOCK_V=power_of_2(heads.value_dim, 16), PACKED=packed,
                ALIGNED=gcd(keys.shape[1], tile.keys),  # tables begin at a page boundary, steps at a step boundary
                WINDOWED=args.window is not None, SOFTCAPPED=args.softcap is not None, SINKS=args.sinks is not None,
                NATIVE=converts_fp8(keys.device), num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        return out
