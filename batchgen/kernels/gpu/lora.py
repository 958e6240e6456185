"""LoRA updates of a linear layer for many adapters, in two launches.

Shrink: h[u] = x[order[u]] A_a^T for the adapter a of u's tile; expand: out[order[u]] += h[u] B_a^T. A tile is a number
of tokens of one adapter. Adapters' matrices are stacked (`LoraStack`), so ranks may differ; an adapter's padding is
zero. The inner dimension of shrink is split into a fixed number of parts, whose sums expand adds in order: equal steps
give equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.gpu.common import dot, power_of_2, rounded
from batchgen.kernels.gpu.launch import launch
from batchgen.kernels.lora import OUTPUT_BLOCK, TALL_TILE, LoraPairs, LoraStep, tiles_of

_PROGRAMS = 256
"""Programs of shrink at which its inner dimension is split no further: about twice a large chip's multiprocessors."""
_MOST_PARTS = 16


def add_lora(out: Tensor, x: Tensor, step: LoraStep, pairs: LoraPairs, fixed: bool = False) -> None:
    """Add each token's LoRA update to `out`, in place.

    Args:
        out: [T, O], the layer's product with `x`; may be a view with gaps between its rows.
        x: [T, I], in the pairs' dtype.
        step: which tokens use which adapter.
        pairs: of the layer, by adapter.
        fixed: whether a token's bits must not depend on other tokens: tiles and parts then depend on the layer only.
    """
    stack, tiles = pairs.stack, tiles_of(step, x.shape[0], x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    assert out.stride(1) == 1, "a token's outputs must be contiguous"
    rows, programs = (TALL_TILE, _MOST_PARTS) if fixed else (tiles.rows, _PROGRAMS // max(1, tiles.tiles.shape[0]))
    inputs, outputs, places, count = x.shape[1], out.shape[1], tiles.order.shape[0], tiles.tiles.shape[0]
    ranks = min(64, power_of_2(stack.width, 16))
    columns = min(128 if rows * ranks <= 2048 else 64, power_of_2(inputs, 16))
    rank_blocks = -(-stack.width // ranks)
    parts = max(1, min(_MOST_PARTS, programs // rank_blocks, inputs // (4 * columns)))
    part = -(-inputs // (parts * columns))  # blocks of inputs per part
    parts = -(-inputs // (part * columns))
    sums = torch.empty(parts, places, stack.width, dtype=torch.float32, device=x.device)
    launch(
        _shrink, (count, rank_blocks, parts), x, tiles.order, tiles.tiles, stack.down, stack.ranges, sums,
        x.stride(0), inputs, stack.width, places, part,
        ROWS=rows, RANKS=ranks, COLUMNS=columns, num_warps=4, num_stages=3,
    )  # fmt: skip
    launch(
        _expand, (count, -(-outputs // OUTPUT_BLOCK)), out, tiles.order, tiles.tiles, stack.up, stack.ranges,
        stack.spans, sums, out.stride(0), outputs, stack.width, places, parts,
        ROWS=rows, RANKS=ranks, COLUMNS=OUTPUT_BLOCK, num_warps=4 if rows == 16 else 8, num_stages=2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["places", "part"], do_not_specialize_on_alignment=["p_order", "p_tiles"])
def _shrink(
    p_x, p_order, p_tiles, p_down, p_ranges, p_sums, stride_x, inputs, width, places, part,
    ROWS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """sums[s, u, r] = sum over part s of i: x[order[u], i] * down[first + r, i].

    x [T, I], order [U], tiles [M, 3], down [ranks, I], ranges [A, 2], sums [parts, U, width] float32. One program per
    (tile, block of ranks, part). Float32 sums. Bytes: a tile's rows of x once per block of ranks, the adapter's A once
    per tile.
    """
    i_tile, i_block, i_part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    adapter = tl.load(p_tiles + i_tile * 3)
    first = tl.load(p_tiles + i_tile * 3 + 1)
    count = tl.load(p_tiles + i_tile * 3 + 2)
    first_rank = tl.load(p_ranges + adapter * 2).to(tl.int64)
    ranks = tl.load(p_ranges + adapter * 2 + 1)
    if (count == 0) | (i_block * RANKS >= ranks):
        return
    o_row = tl.arange(0, ROWS)
    o_rank = i_block * RANKS + tl.arange(0, RANKS)
    m_row = o_row < count  # [ROWS]
    m_rank = o_rank < ranks  # [RANKS]
    token = tl.load(p_order + first + o_row, mask=m_row, other=0)  # [ROWS] int64
    p_rows = p_x + token[:, None] * stride_x  # [ROWS, 1]
    p_ranks = p_down + (first_rank + o_rank)[None, :] * inputs  # [1, RANKS]
    acc = tl.zeros([ROWS, RANKS], tl.float32)
    for i in range(i_part * part, (i_part + 1) * part):
        o_in = i * COLUMNS + tl.arange(0, COLUMNS)
        m_in = o_in < inputs
        b_x = tl.load(p_rows + o_in[None, :], mask=m_row[:, None] & m_in[None, :], other=0.0)  # [ROWS, COLUMNS]
        b_down = tl.load(p_ranks + o_in[:, None], mask=m_in[:, None] & m_rank[None, :], other=0.0)  # [COLUMNS, RANKS]
        acc = dot(b_x, b_down, acc)
    place = i_part.to(tl.int64) * places + first + o_row  # [ROWS]
    tl.store(p_sums + place[:, None] * width + o_rank[None, :], acc, mask=m_row[:, None] & m_rank[None, :])


@triton.jit(do_not_specialize=["places", "parts"], do_not_specialize_on_alignment=["p_order", "p_tiles"])
def _expand(
    p_out, p_order, p_tiles, p_up, p_ranges, p_spans, p_sums, stride_out, outputs, width, places, parts,
    ROWS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[order[u], n] += sum over r: (sum over s: sums[s, u, r]) * up[first + r, n].

    out [T, O] with gaps between rows, up [ranks, O], spans [A, blocks, 2]. One program per (tile, block of outputs);
    ranks that are zero in the block are skipped. The inner sums are rounded to the weights' dtype; products are summed
    in float32 and added to `out` before one rounding. A token is in one tile, so no other program writes its row.
    """
    i_tile, i_block = tl.program_id(0), tl.program_id(1)
    adapter = tl.load(p_tiles + i_tile * 3)
    first = tl.load(p_tiles + i_tile * 3 + 1)
    count = tl.load(p_tiles + i_tile * 3 + 2)
    p_span = p_spans + (adapter * tl.num_programs(1) + i_block) * 2
    first_rank = tl.multiple_of(tl.load(p_ranges + adapter * 2), 16)
    start = tl.multiple_of(tl.load(p_span), 16)
    end = tl.multiple_of(tl.load(p_span + 1), 16)
    if (count == 0) | (start >= end):
        return
    o_row = tl.arange(0, ROWS)
    o_out = i_block * COLUMNS + tl.arange(0, COLUMNS)
    m_row = o_row < count  # [ROWS]
    m_out = o_out < outputs  # [COLUMNS]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for r in range(start, end, RANKS):
        o_rank = r + tl.arange(0, RANKS)
        m_rank = o_rank < end
        o_sum = (first + o_row)[:, None] * width + (o_rank - first_rank)[None, :]  # [ROWS, RANKS] int64
        b_h = tl.zeros([ROWS, RANKS], tl.float32)
        for _ in range(parts):
            b_h += tl.load(p_sums + o_sum, mask=m_row[:, None] & m_rank[None, :], other=0.0)
            o_sum += places.to(tl.int64) * width
        p_ranks = p_up + o_rank.to(tl.int64)[:, None] * outputs
        b_up = tl.load(p_ranks + o_out[None, :], mask=m_rank[:, None] & m_out[None, :], other=0.0)  # [RANKS, COLUMNS]
        acc = dot(rounded(b_h, b_up.dtype), b_up, acc)
    token = tl.load(p_order + first + o_row, mask=m_row, other=0)
    p_cells = p_out + token[:, None] * stride_out + o_out[None, :]
    m_cell = m_row[:, None] & m_out[None, :]
    before = tl.load(p_cells, mask=m_cell, other=0.0).to(tl.float32)
    tl.store(p_cells, rounded(before + acc, p_out.dtype.element_ty), mask=m_cell)
