"""Attention over a paged cache in Triton: prefill, decode and shared prefixes by one kernel over flat work lists."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.chips import AttentionTile, ChipTuning, chip_tuning
from batchgen.kernels.gpu.common import dot, power_of_2, rounded
from batchgen.kernels.gpu.launch import launch
from batchgen.kernels.gpu.merge import merge_lists
from batchgen.kernels.gpu.work_list import (
    FIELDS,
    GROUPS,
    LARGE,
    SMALL,
    ListShape,
    TileSize,
    WorkList,
    plan_groups,
    plan_step,
)
from batchgen.kernels.types import AttentionBatch, KVPool

__all__ = ["TritonAttention"]

_LOG2_E = 1.4426950408889634
LOG2_E = tl.constexpr(_LOG2_E)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)
"""Where running maxima begin: finite, so that no difference of infinities arises where a row sees nothing."""


@triton.jit
def _step(
    acc, row_max, row_sum, q, begin,
    keys, values, p_pages, base_head, position, first, end, window, score_scale, inv_softcap, softcap,
    KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAPPED: tl.constexpr,
):  # fmt: skip
    """Attend to keys [begin, begin + BLOCK_N) of the item's table; online softmax in base 2."""
    o_n = begin + tl.arange(0, BLOCK_N)  # [BN]
    o_d = tl.arange(0, BLOCK_D)
    o_v = tl.arange(0, BLOCK_V)
    m_n = (o_n >= first) & (o_n < end)
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(p_pages + begin // PAGE_SIZE)  # the whole step stands in one page
        slot = page.to(tl.int64) * PAGE_SIZE + o_n % PAGE_SIZE  # [BN]
    elif MASKED:
        slot = tl.load(p_pages + o_n // PAGE_SIZE, mask=m_n, other=0).to(tl.int64) * PAGE_SIZE + o_n % PAGE_SIZE
    else:
        slot = tl.load(p_pages + o_n // PAGE_SIZE).to(tl.int64) * PAGE_SIZE + o_n % PAGE_SIZE
    slot_head = slot * KV_HEADS + base_head  # [BN]
    p_k = keys + slot_head[:, None] * KEY_DIM + o_d[None, :]  # [BN, D]
    p_v = values + slot_head[:, None] * VALUE_DIM + o_v[None, :]  # [BN, Dv]
    if MASKED:
        k = tl.load(p_k, mask=m_n[:, None] & (o_d < KEY_DIM)[None, :], other=0.0)
    elif KEY_DIM < BLOCK_D:
        k = tl.load(p_k, mask=(o_d < KEY_DIM)[None, :], other=0.0)
    else:
        k = tl.load(p_k)
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32))  # [BM, BN]
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
    if MASKED:
        v = tl.load(p_v, mask=m_n[:, None] & (o_v < VALUE_DIM)[None, :], other=0.0)
    elif VALUE_DIM < BLOCK_V:
        v = tl.load(p_v, mask=(o_v < VALUE_DIM)[None, :], other=0.0)
    else:
        v = tl.load(p_v)
    return dot(rounded(p, v.dtype), v, acc), new_max, row_sum


@triton.jit(do_not_specialize=["window"])
def _attention_kernel(
    query, keys, values, out, part_out, part_lse, items, rows, positions, pages, parts, sinks,
    query_stride_t, query_stride_n, window, score_scale, inv_softcap, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ITEM_FIELDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PACKED: tl.constexpr, PEELED: tl.constexpr, FOLDED: tl.constexpr,
    WINDOWED: tl.constexpr, SOFTCAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """softmax(scale * Q K^T) V of one work item for the heads of one key head (or a block of them).

    Shapes:
        query [T, N, D] with strides, keys [P, S, K, D], values [P, S, K, Dv], out [T, N, Dv], part_out [E, N, Dv]
        float32, part_lse [E, N] float32, items [I, ITEM_FIELDS] int32, sinks [N]; the rest int32 lists
        (`work_list`).
    Grid:
        items x key heads x blocks of PACKED heads, heads fastest: the programs that run together read whole tokens of
        the pool. A tile has BLOCK_M rows: BLOCK_M // PACKED tokens times PACKED heads.
    Numerics:
        Products of operands in the pool's dtype with float32 sums, softmax in base 2 in float32. Rows that see none of
        an item's keys leave zeros and a log-sum-exp of -inf. Keys outside [first, end) are not loaded.
    Bytes:
        per item and key head (end - first) * (D + Dv) elements of the pool, queries and results once.
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
    p_q = query + token[:, None] * query_stride_t + i_head[:, None].to(tl.int64) * query_stride_n + o_d[None, :]
    q = tl.load(p_q, mask=m_m[:, None] & (o_d < KEY_DIM)[None, :], other=0.0)  # [BM, D]
    if q.dtype != keys.dtype.element_ty:
        q = rounded(q.to(tl.float32), keys.dtype.element_ty)

    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    m_mv = m_m[:, None] & (o_v < VALUE_DIM)[None, :]
    edge = first // BLOCK_N * BLOCK_N
    steps = (end - edge + BLOCK_N - 1) // BLOCK_N
    if PEELED:
        for begin in range(full_from, full_to, BLOCK_N):
            acc, row_max, row_sum = _step(
                acc, row_max, row_sum, q, begin,
                keys, values, p_pages, i_kv_head, position, first, end, window, score_scale, inv_softcap, softcap,
                KV_HEADS, KEY_DIM, VALUE_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, BLOCK_V, False, WINDOWED, SOFTCAPPED,
            )  # fmt: skip
        steps -= (full_to - full_from) // BLOCK_N
    for i_step in range(steps):
        begin = edge + i_step * BLOCK_N
        if PEELED:
            begin = tl.where(begin >= full_from, begin + full_to - full_from, begin)
        acc, row_max, row_sum = _step(
            acc, row_max, row_sum, q, begin,
            keys, values, p_pages, i_kv_head, position, first, end, window, score_scale, inv_softcap, softcap,
            KV_HEADS, KEY_DIM, VALUE_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, BLOCK_V, True, WINDOWED, SOFTCAPPED,
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


@dataclass(frozen=True, slots=True)
class _UploadedList:
    """A work list and its one copy on the device."""

    work: WorkList
    device: Tensor
    """int32, all sections."""

    @staticmethod
    def of(work: WorkList, device: torch.device) -> _UploadedList:
        """One copy, which does not wait for the device."""
        host = torch.from_numpy(work.packed)
        if device.type == "cuda":
            host = host.pin_memory()
        return _UploadedList(work, host.to(device, non_blocking=True))


@dataclass(frozen=True, slots=True)
class _Heads:
    """Sizes of a layer and its query."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int

    @staticmethod
    def of(query: Tensor, keys: Tensor, values: Tensor) -> _Heads:
        return _Heads(query.shape[1], keys.shape[2], keys.shape[3], values.shape[3])

    @property
    def group(self) -> int:
        """Heads that share a key head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class _Scores:
    """How a layer scores."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class TritonAttention:
    """One step's attention (the `PagedAttention` protocol) as a few launches per layer. Made anew each step.

    The work list is made at the first layer and used again for all with the same sizes and window.
    """

    def __init__(
        self, pool: KVPool, batch: AttentionBatch, tuning: ChipTuning | None = None, multiprocessors: int | None = None
    ) -> None:
        """Attend over `pool`.

        Args:
            pool: keys and values on the device that runs the kernels.
            batch: the step.
            tuning: tile shapes and splits; None takes those of the pool's device.
            multiprocessors: how many the device has; None asks it.
        """
        self._pool = pool
        self._batch = batch
        self._device = batch.slot_mapping.device
        self._tuning = chip_tuning(self._device) if tuning is None else tuning
        self._multiprocessors = _multiprocessors(self._device) if multiprocessors is None else multiprocessors
        self._lists: dict[tuple[_Heads, int | None, bool], _UploadedList] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store the step's keys and values of `layer`, then attend. See `Attention.attend`."""
        keys, values, slots = self.cache(layer)
        for cache, new in ((keys, key), (values, value)):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new.to(cache.dtype))
        return self.attend_stored(layer, query, scale=scale, window=window, softcap=softcap, sinks=sinks)

    def cache(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where the step's keys and values go. See `PagedAttention.cache`."""
        return self._pool.keys[layer], self._pool.values[layer], self._batch.slot_mapping

    def attend_stored(
        self,
        layer: int,
        query: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend over what stands in the pool. See `PagedAttention.attend_stored`.

        Raises:
            ValueError: no tile takes heads of that size.
        """
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        heads = _Heads.of(query, keys, values)
        uploaded = self._list(heads, keys.dtype, window)
        out = torch.empty(query.shape[0], heads.heads, heads.value_dim, dtype=query.dtype, device=query.device)
        run = _Run(self._tuning, uploaded, query, keys, values, out, _Scores(scale, window, softcap, sinks))
        run.launch_all()
        if uploaded.work.num_merges:
            run.merge(out, None)
        return out

    def prefix_parts(
        self, layer: int, query: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention of the R decode rows to the pages of their prefix groups alone, all levels merged.

        Args:
            layer: which layer's pool.
            query: [T, N, D] of the whole step.
            scale: as in `attend`.
            window: as in `attend`.
            softcap: as in `attend`.

        Returns:
            out [R, N, Dv] float32 and its log-sum-exp [R, N] float32: 0 and -inf for rows that see no group.
        """
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        heads = _Heads.of(query, keys, values)
        uploaded = self._list(heads, keys.dtype, window, groups_only=True)
        out = torch.empty(query.shape[0], heads.heads, heads.value_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=query.device)
        run = _Run(self._tuning, uploaded, query, keys, values, out, _Scores(scale, window, softcap, None))
        run.launch_all()
        run.merge(out, lse)
        return out[self._batch.decode_start :], lse[self._batch.decode_start :]

    def work(self, layer: int, num_heads: int, window: int | None = None) -> WorkList:
        """The work list of a layer's step: what is counted."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        heads = _Heads(num_heads, keys.shape[2], keys.shape[3], values.shape[3])
        return self._list(heads, keys.dtype, window).work

    def _list(self, heads: _Heads, dtype: torch.dtype, window: int | None, groups_only: bool = False) -> _UploadedList:
        key = (heads, window, groups_only)
        found = self._lists.get(key)
        if found is None:
            shape = _list_shape(self._tuning, self._multiprocessors, heads, dtype, self._pool.page_size, window)
            work = (plan_groups if groups_only else plan_step)(self._batch, shape)
            found = self._lists[key] = _UploadedList.of(work, self._device)
        return found


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _block_m(tile: AttentionTile, heads: _Heads) -> int:
    """Rows of a tile: its own number, or more where one token's heads need them."""
    return max(tile.queries, power_of_2(min(heads.group, 64)))


def _tiles(tuning: ChipTuning, heads: _Heads, dtype: torch.dtype) -> tuple[AttentionTile, AttentionTile]:
    """The tile of many rows and the tile of few."""
    width = max(heads.key_dim, heads.value_dim)
    return tuning.attention_tile("prefill", width, dtype), tuning.attention_tile("decode", width, dtype)


def _list_shape(
    tuning: ChipTuning, multiprocessors: int, heads: _Heads, dtype: torch.dtype, page_size: int, window: int | None
) -> ListShape:
    large, small = _tiles(tuning, heads, dtype)

    def size(tile: AttentionTile, split: int, per_multiprocessor: int) -> TileSize:
        rows = _block_m(tile, heads)
        packed = min(heads.group, rows)
        programs = heads.kv_heads * -(-heads.group // packed)
        return TileSize(
            queries=rows // packed,
            keys=tile.keys,
            split=-(-split // tile.keys) * tile.keys,
            wanted=max(1, multiprocessors * per_multiprocessor // programs),
        )

    return ListShape(
        page_size=page_size,
        window=window,
        large=size(large, tuning.split_keys_large, tuning.items_per_sm_large),
        small=size(small, tuning.split_keys, tuning.items_per_sm),
    )


class _Run:
    """One layer's launches over one work list."""

    def __init__(
        self,
        tuning: ChipTuning,
        uploaded: _UploadedList,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        scores: _Scores,
    ) -> None:
        assert query.stride(2) == 1, "a query's numbers must be adjacent"
        assert keys.is_contiguous()
        assert values.is_contiguous()
        self._uploaded = uploaded
        self._query, self._keys, self._values, self._out = query, keys, values, out
        self._scores = scores
        self._heads = _Heads.of(query, keys, values)
        self._large, self._small = _tiles(tuning, self._heads, keys.dtype)
        parts, value_dim = uploaded.work.num_parts, values.shape[3]
        self._part_out = query.new_empty(parts, query.shape[1], value_dim, dtype=torch.float32)
        self._part_lse = query.new_empty(parts, query.shape[1], dtype=torch.float32)

    def launch_all(self) -> None:
        """Every item: results of tokens that are in one item alone, parts of the others."""
        for number, tile in ((LARGE, self._large), (GROUPS, self._small), (SMALL, self._small)):
            if self._uploaded.work.count(number):
                self._launch(number, tile)

    def merge(self, out: Tensor, lse: Tensor | None) -> None:
        """Merge the parts of the tokens that are listed for it."""
        work, device = self._uploaded.work, self._uploaded.device
        parts, tokens, starts, counts = (device[section] for section in (work.parts, *work.merges))
        merge_lists(self._part_out, self._part_lse, parts, tokens, starts, counts, out, lse, self._scores.sinks)

    def _launch(self, number: int, tile: AttentionTile) -> None:
        work, device = self._uploaded.work, self._uploaded.device
        heads, scores = self._heads, self._scores
        rows = _block_m(tile, heads)
        packed = min(heads.group, rows)
        softcap = scores.softcap or 1.0
        launch(
            _attention_kernel,
            (work.count(number) * heads.kv_heads * -(-heads.group // packed),),
            self._query,
            self._keys,
            self._values,
            self._out,
            self._part_out,
            self._part_lse,
            device[work.items[number]],
            device[work.rows],
            device[work.positions],
            device[work.pages],
            device[work.parts],
            scores.sinks,
            *self._query.stride()[:2],
            scores.window or 0,
            scores.scale * _LOG2_E,
            scores.scale / softcap,
            softcap * _LOG2_E,
            HEADS=heads.heads,
            KV_HEADS=heads.kv_heads,
            KEY_DIM=heads.key_dim,
            VALUE_DIM=heads.value_dim,
            PAGE_SIZE=self._keys.shape[1],
            ITEM_FIELDS=FIELDS,
            BLOCK_M=rows,
            BLOCK_N=tile.keys,
            BLOCK_D=power_of_2(heads.key_dim, 16),
            BLOCK_V=power_of_2(heads.value_dim, 16),
            PACKED=packed,
            PEELED=tile.queries >= 64,
            FOLDED=number == SMALL,
            WINDOWED=scores.window is not None,
            SOFTCAPPED=scores.softcap is not None,
            SINKS=scores.sinks is not None,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
