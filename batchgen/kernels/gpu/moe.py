"""Mixture of experts in Triton: routing in one launch, the experts in four, without reading device values on the host.

A pair is a token and one of its experts: pair t * k + j for the j-th expert of token t. Pairs are sorted by expert,
each expert's pairs are divided into tiles, and one launch computes all tiles. The number of tiles is known on the
device only; the grid is its upper bound, and programs without a tile return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.activation import KINDS
from batchgen.kernels.chips import GroupedTile, chip_tuning
from batchgen.kernels.gpu.activation import activated
from batchgen.kernels.gpu.common import dot, power_of_2, rounded
from batchgen.kernels.gpu.launch import launch
from batchgen.kernels.moe import Experts, Routing

_SORT_BLOCK = 1024
_COMBINE_BLOCK = 1024


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `kernels.moe.route`."""
    tokens, experts = logits.shape
    routing.check(experts)
    assert logits.stride(1) == 1, "a token's logits must be contiguous"
    chosen, columns = routing.experts_per_token, power_of_2(experts, 16)
    ids = torch.empty(tokens, chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, chosen, dtype=torch.float32, device=logits.device)
    rows = max(1, 1024 // columns)
    launch(
        _route, (triton.cdiv(tokens, rows),), logits, logits if bias is None else bias, ids, weights,
        logits.stride(0), tokens, routing.scale,
        EXPERTS=experts, CHOSEN=chosen, CHOSEN_BLOCK=power_of_2(chosen), GROUPS=routing.groups,
        TOP_GROUPS=routing.top_groups, GROUPS_BLOCK=power_of_2(routing.groups, 2),
        BEST_TWO=routing.group_score == "top2", SOFTMAX=routing.scoring == "softmax", BIASED=bias is not None,
        BY_LOGIT=routing.by_logit(bias is not None), RENORMALISE=routing.renormalise,
        ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return ids, weights


def moe_experts(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, tile: GroupedTile | None = None) -> Tensor:
    """See `kernels.moe.moe_experts`; sums over a token's experts are in the order of `ids`.

    `tile`: of the products; None: the chip's.
    """
    tokens, hidden = x.shape
    chosen, (count, both, _), inner = ids.shape[1], experts.gate_up.shape, experts.down.shape[2]
    assert both == 2 * inner
    pairs = tokens * chosen
    if tile is None:
        tile = chip_tuning(x.device).grouped_tile(-(-pairs // count), x.dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    ids, weights = ids.contiguous(), weights.contiguous()
    slots = pairs // tile.rows + count

    def empty(*shape: int, dtype: torch.dtype = x.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    order, tiles = empty(pairs, dtype=torch.int32), empty(slots, 3, dtype=torch.int32)
    launch(_sort, (count,), ids, order, tiles, pairs, slots, ROWS=tile.rows, BLOCK=_SORT_BLOCK, num_warps=4)
    middle = empty(pairs, inner)
    gating, up_bias = experts.gating, experts.gate_up_bias
    stride_expert, stride_out, stride_in = experts.gate_up.stride()
    launch(
        _gate_up, (slots * triton.cdiv(inner, tile.columns),), x, order, tiles, experts.gate_up,
        x if up_bias is None else up_bias, middle, x.stride(0), stride_expert, stride_out, stride_in,
        stride_out * inner, hidden, inner, chosen, gating.limit or 0.0, gating.shift,
        KIND=KINDS[gating.activation], LIMITED=gating.limit is not None, BIASED=up_bias is not None,
        INTERLEAVED=gating.interleaved, ROWS=tile.rows, COLUMNS=tile.columns, INNER=tile.inner,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    parts, down_bias = empty(pairs, hidden), experts.down_bias
    columns = 2 * tile.columns  # one product instead of two
    launch(
        _down, (slots * triton.cdiv(hidden, columns),), middle, order, tiles, experts.down,
        x if down_bias is None else down_bias, parts, *experts.down.stride(), hidden, inner,
        BIASED=down_bias is not None, ROWS=tile.rows, COLUMNS=columns, INNER=tile.inner,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    out = empty(tokens, hidden)
    launch(
        _combine, (tokens, triton.cdiv(hidden, _COMBINE_BLOCK)), parts, ids, weights, out, hidden, chosen, count,
        BLOCK=_COMBINE_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _best(values, o_column, COLUMNS: tl.constexpr):
    """[ROWS]: index of the largest of each row of `values`, the lowest of equal ones."""
    top = tl.max(values, 1)
    return tl.min(tl.where(values == top[:, None], o_column[None, :], COLUMNS), 1)


@triton.jit(do_not_specialize=["tokens"])
def _route(
    p_logits, p_bias, p_ids, p_weights, stride, tokens, scale,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr, BEST_TWO: tl.constexpr, SOFTMAX: tl.constexpr,
    BIASED: tl.constexpr, BY_LOGIT: tl.constexpr, RENORMALISE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ids, weights = the `CHOSEN` largest scores of each token, from the best groups only.

    logits [T, E], bias [E], ids and weights [T, CHOSEN]. One program per `ROWS` tokens, all in registers, float32.
    Bytes: the logits once.
    """
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_expert = tl.arange(0, COLUMNS)
    m_row = o_row < tokens  # [ROWS]
    m_expert = (o_expert < EXPERTS)[None, :]  # [1, COLUMNS]
    p_cells = p_logits + o_row[:, None] * stride + o_expert[None, :]
    b_logits = tl.load(p_cells, mask=m_row[:, None] & m_expert, other=0.0).to(tl.float32)  # [ROWS, COLUMNS]
    if SOFTMAX:
        top = tl.max(tl.where(m_expert, b_logits, float("-inf")), 1)
        b_scores = tl.where(m_expert, tl.exp(b_logits - top[:, None]), 0.0)
        b_scores = b_scores / tl.sum(b_scores, 1)[:, None]
    else:
        b_scores = tl.sigmoid(b_logits)
    if BY_LOGIT:
        b_choice = b_logits
    elif BIASED:
        b_choice = b_scores + tl.load(p_bias + o_expert, mask=o_expert < EXPERTS, other=0.0)[None, :].to(tl.float32)
    else:
        b_choice = b_scores
    b_choice = tl.where(m_expert, b_choice, float("-inf"))
    if GROUPS > 1:
        o_group = tl.arange(0, GROUPS_BLOCK)
        group_of = o_expert // (EXPERTS // GROUPS)
        b_groups = tl.full([ROWS, GROUPS_BLOCK], float("-inf"), tl.float32)
        for g in tl.static_range(GROUPS):
            b_own = tl.where((group_of == g)[None, :], b_choice, float("-inf"))
            value = tl.max(b_own, 1)  # [ROWS]
            if BEST_TWO:
                first = _best(b_own, o_expert, COLUMNS)
                value += tl.max(tl.where(o_expert[None, :] == first[:, None], float("-inf"), b_own), 1)
            b_groups = tl.where((o_group == g)[None, :], value[:, None], b_groups)
        b_allowed = tl.zeros([ROWS, COLUMNS], tl.int1)
        for _ in tl.static_range(TOP_GROUPS):
            best = _best(b_groups, o_group, GROUPS_BLOCK)  # [ROWS]
            b_allowed = b_allowed | (group_of[None, :] == best[:, None])
            b_groups = tl.where(o_group[None, :] == best[:, None], float("-inf"), b_groups)
        b_choice = tl.where(b_allowed, b_choice, float("-inf"))
    o_chosen = tl.arange(0, CHOSEN_BLOCK)
    b_ids = tl.zeros([ROWS, CHOSEN_BLOCK], tl.int32)
    b_weights = tl.zeros([ROWS, CHOSEN_BLOCK], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for j in tl.static_range(CHOSEN):
        best = _best(b_choice, o_expert, COLUMNS)
        m_best = o_expert[None, :] == best[:, None]  # [ROWS, COLUMNS]
        weight = tl.sum(tl.where(m_best, b_scores, 0.0), 1)  # [ROWS]
        total += weight
        b_ids = tl.where((o_chosen == j)[None, :], best[:, None], b_ids)
        b_weights = tl.where((o_chosen == j)[None, :], weight[:, None], b_weights)
        b_choice = tl.where(m_best, float("-inf"), b_choice)
    if RENORMALISE:
        b_weights = b_weights / (total + 1e-20)[:, None]
    o_out = o_row[:, None] * CHOSEN + o_chosen[None, :]
    m_out = m_row[:, None] & (o_chosen < CHOSEN)[None, :]
    tl.store(p_ids + o_out, b_ids, mask=m_out)
    tl.store(p_weights + o_out, b_weights * scale, mask=m_out)


@triton.jit(do_not_specialize=["pairs", "slots"])
def _sort(p_ids, p_order, p_tiles, pairs, slots, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Order = the pairs by expert, ascending within; tiles = (expert, first index in order, pairs) by slot.

    ids [pairs], order [pairs], tiles [slots, 3] int32. One program per expert, which reads all ids twice and does not
    depend on other programs: with `first` pairs of lower experts, expert e owns the slots from first // ROWS + e on, as
    many as its tiles or one more, and writes those that it does not need with 0 pairs. slots = pairs // ROWS + experts.
    """
    expert = tl.program_id(0)
    o_block = tl.arange(0, BLOCK)
    lower = tl.zeros([BLOCK], tl.int32)
    equal = tl.zeros([BLOCK], tl.int32)
    for i in range(0, pairs, BLOCK):
        ids = tl.load(p_ids + i + o_block, mask=i + o_block < pairs, other=-1)
        lower += ((ids >= 0) & (ids < expert)).to(tl.int32)
        equal += (ids == expert).to(tl.int32)
    first = tl.sum(lower, 0)
    count = tl.sum(equal, 0)
    slot = first // ROWS + expert
    end = (first + count) // ROWS + expert + 1
    if expert == tl.num_programs(0) - 1:
        end = slots
    for i in range(slot, end, BLOCK):
        o_slot = i + o_block
        begin = (o_slot - slot) * ROWS
        p_slots = p_tiles + o_slot * 3
        tl.store(p_slots, expert, mask=o_slot < end)
        tl.store(p_slots + 1, first + begin, mask=o_slot < end)
        tl.store(p_slots + 2, tl.minimum(tl.maximum(count - begin, 0), ROWS), mask=o_slot < end)
    for i in range(0, pairs, BLOCK):
        ids = tl.load(p_ids + i + o_block, mask=i + o_block < pairs, other=-1)
        m_own = ids == expert
        place = first + tl.cumsum(m_own.to(tl.int32), 0) - 1
        tl.store(p_order + place, i + o_block, mask=m_own)
        first += tl.sum(m_own.to(tl.int32), 0)


@triton.jit
def _gate_up(
    p_x, p_order, p_tiles, p_weight, p_bias, p_middle, stride_x, stride_expert, stride_out, stride_in, up,
    hidden, inner, chosen, limit, shift,
    KIND: tl.constexpr, LIMITED: tl.constexpr, BIASED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """middle[u] = gate(weight_e x[order[u] // chosen] + bias_e) for every index u of a tile of expert e.

    x [T, H], weight [E, 2I, H] in any memory order (`up`: from the first row of gate to that of up), bias [E, 2I],
    middle [pairs, I]. One program per (tile, block of columns), columns fastest. Both products and the gate in float32,
    one rounding. Bytes: the expert's weights once per tile, the tile's rows of x once per block of columns.
    """
    blocks = tl.cdiv(inner, COLUMNS)
    i_tile = tl.program_id(0) // blocks
    i_block = tl.program_id(0) % blocks
    expert = tl.load(p_tiles + i_tile * 3).to(tl.int64)
    first = tl.load(p_tiles + i_tile * 3 + 1)
    count = tl.load(p_tiles + i_tile * 3 + 2)
    if count == 0:
        return
    o_row = tl.arange(0, ROWS)
    o_column = i_block * COLUMNS + tl.arange(0, COLUMNS)
    m_row = o_row < count  # [ROWS]
    m_column = o_column < inner  # [COLUMNS]
    pair = tl.load(p_order + first + o_row, mask=m_row, other=0)  # [ROWS]
    p_rows = p_x + (pair // chosen).to(tl.int64)[:, None] * stride_x  # [ROWS, 1]
    p_expert = p_weight + expert * stride_expert
    if INTERLEAVED:
        o_both = i_block * 2 * COLUMNS + tl.arange(0, 2 * COLUMNS)
        m_both = o_both < 2 * inner
        p_both = p_expert + o_both.to(tl.int64)[None, :] * stride_out  # [1, 2 COLUMNS]
        both = tl.zeros([ROWS, 2 * COLUMNS], tl.float32)
        for i in range(0, hidden, INNER):
            o_in = i + tl.arange(0, INNER)
            m_in = o_in < hidden
            b_x = tl.load(p_rows + o_in[None, :], mask=m_row[:, None] & m_in[None, :], other=0.0)  # [ROWS, INNER]
            p_cells = p_both + o_in.to(tl.int64)[:, None] * stride_in  # [INNER, 2 COLUMNS]
            both = dot(b_x, tl.load(p_cells, mask=m_in[:, None] & m_both[None, :], other=0.0), both)
        gate, linear = tl.split(tl.reshape(both, [ROWS, COLUMNS, 2]))
    else:
        p_gate = p_expert + o_column.to(tl.int64)[None, :] * stride_out  # [1, COLUMNS]
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        linear = tl.zeros([ROWS, COLUMNS], tl.float32)
        for i in range(0, hidden, INNER):
            o_in = i + tl.arange(0, INNER)
            m_in = o_in < hidden
            b_x = tl.load(p_rows + o_in[None, :], mask=m_row[:, None] & m_in[None, :], other=0.0)  # [ROWS, INNER]
            p_cells = p_gate + o_in.to(tl.int64)[:, None] * stride_in  # [INNER, COLUMNS]
            m_cells = m_in[:, None] & m_column[None, :]
            gate = dot(b_x, tl.load(p_cells, mask=m_cells, other=0.0), gate)
            linear = dot(b_x, tl.load(p_cells + up, mask=m_cells, other=0.0), linear)
    if BIASED:
        if INTERLEAVED:
            p_own = p_bias + expert * 2 * inner + 2 * o_column
            p_up = p_own + 1
        else:
            p_own = p_bias + expert * 2 * inner + o_column
            p_up = p_own + inner
        gate += tl.load(p_own, mask=m_column, other=0.0).to(tl.float32)[None, :]
        linear += tl.load(p_up, mask=m_column, other=0.0).to(tl.float32)[None, :]
    if LIMITED:
        gate = tl.where(gate > limit, limit, gate)
        linear = tl.where(linear > limit, limit, tl.where(linear < -limit, -limit, linear))
    made = activated(gate, KIND) * (linear + shift)
    p_out = p_middle + (first + o_row).to(tl.int64)[:, None] * inner + o_column[None, :]
    tl.store(p_out, rounded(made, p_middle.dtype.element_ty), mask=m_row[:, None] & m_column[None, :])


@triton.jit
def _down(
    p_middle, p_order, p_tiles, p_weight, p_bias, p_parts, stride_expert, stride_out, stride_in, hidden, inner,
    BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """parts[order[u]] = weight_e middle[u] + bias_e for every index u of a tile of expert e.

    middle [pairs, I], weight [E, H, I] in any memory order, bias [E, H], parts [pairs, H]. Grid and numerics as
    `_gate_up`.
    """
    blocks = tl.cdiv(hidden, COLUMNS)
    i_tile = tl.program_id(0) // blocks
    i_block = tl.program_id(0) % blocks
    expert = tl.load(p_tiles + i_tile * 3).to(tl.int64)
    first = tl.load(p_tiles + i_tile * 3 + 1)
    count = tl.load(p_tiles + i_tile * 3 + 2)
    if count == 0:
        return
    o_row = tl.arange(0, ROWS)
    o_column = i_block * COLUMNS + tl.arange(0, COLUMNS)
    m_row = o_row < count  # [ROWS]
    m_column = o_column < hidden  # [COLUMNS]
    p_rows = p_middle + (first + o_row).to(tl.int64)[:, None] * inner  # [ROWS, 1]
    p_columns = p_weight + expert * stride_expert + o_column.to(tl.int64)[None, :] * stride_out  # [1, COLUMNS]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in range(0, inner, INNER):
        o_in = i + tl.arange(0, INNER)
        m_in = o_in < inner
        b_middle = tl.load(p_rows + o_in[None, :], mask=m_row[:, None] & m_in[None, :], other=0.0)  # [ROWS, INNER]
        p_cells = p_columns + o_in.to(tl.int64)[:, None] * stride_in  # [INNER, COLUMNS]
        acc = dot(b_middle, tl.load(p_cells, mask=m_in[:, None] & m_column[None, :], other=0.0), acc)
    if BIASED:
        acc += tl.load(p_bias + expert * hidden + o_column, mask=m_column, other=0.0).to(tl.float32)[None, :]
    pair = tl.load(p_order + first + o_row, mask=m_row, other=0).to(tl.int64)  # [ROWS]
    p_out = p_parts + pair[:, None] * hidden + o_column[None, :]
    tl.store(p_out, rounded(acc, p_parts.dtype.element_ty), mask=m_row[:, None] & m_column[None, :])


@triton.jit
def _combine(p_parts, p_ids, p_weights, p_out, hidden, chosen, experts, BLOCK: tl.constexpr):
    """out[t] = sum over j, in order: weights[t, j] * parts[t * chosen + j], where ids[t, j] is an expert.

    parts [pairs, H], ids and weights [T, chosen], out [T, H]. One program per (token, block of columns); float32 sums,
    one rounding. Bytes: the parts and the result once.
    """
    token = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_column = o_column < hidden
    acc = tl.zeros([BLOCK], tl.float32)
    for j in range(chosen):
        pair = token * chosen + j
        expert = tl.load(p_ids + pair)
        known = (expert >= 0) & (expert < experts)
        weight = tl.load(p_weights + pair).to(tl.float32)
        m_part = o_column < tl.where(known, hidden, 0)  # a block and a scalar joined by & would be int32, not a mask
        part = tl.load(p_parts + pair * hidden + o_column, mask=m_part, other=0.0).to(tl.float32)
        acc += tl.where(known, weight, 0.0) * part
    tl.store(p_out + token * hidden + o_column, rounded(acc, p_out.dtype.element_ty), mask=m_column)
