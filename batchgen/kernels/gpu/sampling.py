"""Draws of one token per row: the twin of `batchgen.kernels.sampling`, one launch for rows of any mix of parameters.

With the row's largest logit m, x = (logit - m) / temperature and q = exp(x), a row's survivors are its first k tokens
in the order (logit falling, id rising), of these the tokens before which less than p of their mass stands, of these
the ones with q >= min_p. Drawn is the survivor with the largest x + noise, the lowest id of equals.

A program per row, which does what its row asks for and no more. Passes over the row's V logits:

    greedy, or top_k 1                              1
    unfiltered, or min_p alone                      2   largest; draw
    top_k, with any top_p and min_p                 2   largest; the k first written down; the rest in registers
    top_p, its tokens among the first ~1,400        2   largest; those written down, total; the rest on what was written
    top_p of a flatter row                          4 + (1 - p) + ...   largest; as above; draw; checks

No draw looks for top_p's boundary. One token is drawn from the row (or from top_k's survivors), and the next pass sums
what stands before it, which tells whether it survives, and in the same pass draws among just that, which is the next
token to check if it does not. A draw fails its check with a probability of 1 - p.

Noise costs more than reading. Only tokens that could win get it in full: from 53 bits comes a uniform v, and x + noise
exceeds the best so far only if v < q * exp(-best), so most blocks of a row need no logarithm, and blocks without a
survivor need no bits.

Numerics: logits are converted to float32 where they are loaded; masses are float64 sums of float32 exp. A device's exp
and log are within 2 ulp of a CPU's, so the two may draw differently where a mass or the two best scores are as close as
that; by the spacing of scores, about once in a million draws. Nothing depends on the row's neighbours, and nothing is
rounded differently between runs.

Bytes moved: the passes above times V logits, 4 * CAPACITY of scratch for rows with top_k or top_p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.gpu.launch import launch
from batchgen.kernels.gpu.logprobs import argmax_lse
from batchgen.kernels.gpu.noise import gumbel_of, noise_bits, uniform_of
from batchgen.kernels.gpu.thresholds import (
    LOWEST_LOGIT,
    boundary_of_rank,
    collect,
    inside,
    lane_maxima,
    load_logits,
    narrow,
    ordered,
    scaled,
    value_of,
)
from batchgen.kernels.sampling import GREEDY_TEMPERATURE, SampleResult, SamplingColumns

__all__ = ["DEFAULT_TILE", "SamplingTile", "cut", "greedy", "largest_of_row", "nan_rows", "sample"]

GREEDY_BELOW = tl.constexpr(GREEDY_TEMPERATURE)
NO_ID = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True, slots=True)
class SamplingTile:
    """How a row is walked."""

    block: int = 2048
    """logits per step, and lanes of the search for the largest; a power of 2"""
    capacity: int = 2048
    """ids that may be written down; a power of 2"""
    spread: int = 1024
    """lanes whose maxima rows with top_p alone write down, with all above the least of them: of V >> block logits about
    -block * log(1 - spread / block)"""
    few_block: int = 1024
    """written-down ids per step; a power of 2"""
    warps: int = 8
    stages: int = 4
    """blocks in flight, where rows are aligned to 16 bytes"""

    def stages_for(self, logits: Tensor) -> int:
        """1 for rows that cannot be fetched ahead: in pieces of less than 16 bytes that costs more than it hides."""
        aligned = logits.stride(1) == 1 and logits.stride(0) * logits.element_size() % 16 == 0
        return self.stages if aligned else 1


DEFAULT_TILE = SamplingTile()


@triton.jit
def largest_of_row(p_row, stride, vocab, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Lanes' maxima, the largest, the lowest id that has it, and whether nothing can be drawn from the row."""
    b_largest, b_id, b_nan = lane_maxima(p_row, stride, vocab, BLOCK, STAGES)
    largest = tl.max(b_largest, axis=0)
    token = tl.min(tl.where(b_largest == largest, b_id, NO_ID), axis=0)
    bad = (tl.max(b_nan.to(tl.int32), axis=0) > 0) | (largest == float("inf")) | (largest == float("-inf"))
    return b_largest, largest, token, bad


@triton.jit
def cut(
    p_row,
    stride,
    vocab,
    b_largest,
    largest,
    temperature,
    top_k,
    top_p,
    p_ids,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    SPREAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Find top_k's survivors, and write down few tokens that hold all of top_p's, where they are few.

    Returns:
        `(value, last, count, total)`: top_k's boundary; how many ids stand in `p_ids`, rising, 0: go by the whole row;
        and the mass that top_p is a share of, float64, 0: that inside the boundary.
    """
    value = tl.full([], float("-inf"), tl.float32)
    last = tl.full([], 0, tl.int32) + vocab
    count = tl.full([], 0, tl.int32)
    total = tl.full([], 0.0, tl.float64)
    if (top_k > 0) & (top_k < vocab):
        k = top_k.to(tl.int32)
        value, last, count = boundary_of_rank(p_row, stride, vocab, k, b_largest, p_ids, BLOCK, CAPACITY, STAGES)
    elif top_p < 1.0:
        bound, _ = narrow(ordered(b_largest), tl.full([BLOCK], 1, tl.int32), SPREAD)
        least = value_of(bound)
        ties = tl.where(bound > LOWEST_LOGIT, SPREAD, 0)
        count, total = collect(
            p_row, stride, vocab, least, vocab, ties, p_ids, largest, temperature, True, BLOCK, CAPACITY, STAGES
        )
        # What was written down are the first tokens of the order; do they hold top_p's?
        o_few = tl.arange(0, CAPACITY)
        m_few = o_few < count
        logits = load_logits(p_row, stride, tl.load(p_ids + o_few, mask=m_few, other=0), m_few)
        mass = tl.sum(tl.exp(scaled(logits, largest, temperature)).to(tl.float64), axis=0)
        count = tl.where((count <= CAPACITY) & (mass >= top_p.to(tl.float64) * total), count, 0)
    return value, last, count, total


@triton.jit
def _draw(
    p_row,
    stride,
    p_ids,
    count,
    largest,
    temperature,
    min_p,
    key,
    value,
    last,
    want_mass,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One pass over `count` tokens, those of `p_ids` if FEW: the mass inside the boundary, and the draw among it.

    Returns:
        the sum of exp(x) inside, float64, 0 unless `want_mass`; the id drawn, -1 if nothing is inside; its logit.
    """
    o_lane = tl.arange(0, BLOCK)
    b_mass = tl.zeros([BLOCK], tl.float64)
    # The most likely token, which every boundary keeps first, scores at least -2.9: nothing below can win.
    best = tl.full([], -4.0, tl.float32)
    best_id = tl.full([], -1, tl.int32)
    best_logit = tl.full([], 0.0, tl.float32)
    for start in range(0, count, BLOCK):
        place = start + o_lane
        m_place = place < count
        ids = tl.load(p_ids + place, mask=m_place, other=0) if FEW else place
        logits = load_logits(p_row, stride, ids, m_place)  # [BLOCK]
        x = scaled(logits, largest, temperature)
        q = tl.exp(x)
        kept = inside(logits, ids, value, last)
        if want_mass:
            b_mass += tl.where(kept, q, 0.0).to(tl.float64)
        kept = kept & (q >= min_p)
        if tl.max(kept.to(tl.int32), axis=0) > 0:
            v = uniform_of(noise_bits(key, ids))
            # noise >= best - x  =>  -log1p(-v) <= exp(x - best)  =>  v <= q * exp(-best); a little more for rounding.
            kept = kept & (v <= q * (tl.exp(-best) * 1.001))
            if tl.max(kept.to(tl.int32), axis=0) > 0:
                scores = tl.where(kept, x + gumbel_of(v), float("-inf"))
                top = tl.max(scores, axis=0)
                if top > best:
                    best = top
                    best_id = tl.min(tl.where(scores == top, ids, NO_ID), axis=0)
                    best_logit = tl.max(tl.where(ids == best_id, logits, float("-inf")), axis=0)
    return tl.sum(b_mass, axis=0), best_id, best_logit


@triton.jit
def _settle(
    p_row, stride, p_ids, count, largest, temperature, top_p, min_p, key, value, last, total,
    FEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw inside the boundary until the token survives top_p; `total` is the mass it is a share of, 0: that inside."""
    token = tl.full([], -1, tl.int32)
    limit = top_p.to(tl.float64) * total
    checks = top_p < 1.0
    going = True
    while going:
        mass, drawn, logit = _draw(
            p_row, stride, p_ids, count, largest, temperature, min_p, key, value, last, checks, FEW, BLOCK
        )
        settled = (token >= 0) & ((drawn < 0) | (mass < limit))
        if (token < 0) & (limit == 0.0):
            limit = top_p.to(tl.float64) * mass
        token = tl.where(settled, token, drawn)
        value = logit
        last = drawn - 1
        going = checks & ~settled & (drawn >= 0)
    return token


@triton.jit
def _sample(
    p_logits,
    stride_row,
    stride,
    vocab,
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p,
    p_keys,
    p_ids,
    p_tokens,
    p_bad,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    SPREAD: tl.constexpr,
    FEW_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + row * stride_row
    p_ids += row * CAPACITY
    b_largest, largest, token, bad = largest_of_row(p_row, stride, vocab, BLOCK, STAGES)
    tl.store(p_bad + row, bad)
    temperature = tl.load(p_temperature + row)
    top_k = tl.load(p_top_k + row)
    if (temperature >= GREEDY_BELOW) & (top_k != 1) & ~bad:
        top_p = tl.load(p_top_p + row)
        min_p = tl.load(p_min_p + row)
        key = tl.load(p_keys + row).to(tl.uint64)
        value, last, count, total = cut(
            p_row, stride, vocab, b_largest, largest, temperature, top_k, top_p, p_ids, BLOCK, CAPACITY, SPREAD, STAGES
        )
        if count > 0:
            token = _settle(
                p_row, stride, p_ids, count, largest, temperature, top_p, min_p, key, value, last, total,
                True, FEW_BLOCK,
            )  # fmt: skip
        else:
            token = _settle(
                p_row, stride, p_ids, vocab, largest, temperature, top_p, min_p, key, value, last, total,
                False, BLOCK,
            )  # fmt: skip
    tl.store(p_tokens + row, token.to(tl.int64))


def sample(
    logits: Tensor,
    columns: SamplingColumns,
    sample_rows: Tensor | None = None,
    *,
    tile: SamplingTile = DEFAULT_TILE,
) -> SampleResult:
    """Draw one token per row.

    Args:
        logits: [U, V] float32, float16 or bfloat16, after penalties and masks; left as it is. -inf is never drawn.
            Rows that are `bad` in the result give some id in range.
        columns: the parameters of R draws, with keys unless all are greedy. Which rows need what work is not looked at.
        sample_rows: as for `sampling.sample`.
        tile: how to walk the rows; changes no draw.
    """
    assert columns.keys is not None or columns.all_greedy, "draws need keys"
    if sample_rows is not None:
        logits = logits[sample_rows]
    rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    bad = torch.empty(rows, dtype=torch.bool, device=device)
    launch(
        _sample,
        (rows,),
        logits,
        logits.stride(0),
        logits.stride(1),
        vocab,
        columns.temperature,
        columns.top_k,
        columns.top_p,
        columns.min_p,
        columns.keys if columns.keys is not None else columns.top_k,
        torch.empty(rows, tile.capacity, dtype=torch.int32, device=device),
        tokens,
        bad,
        BLOCK=tile.block,
        CAPACITY=tile.capacity,
        SPREAD=tile.spread,
        FEW_BLOCK=tile.few_block,
        STAGES=tile.stages_for(logits),
        num_warps=tile.warps,
    )
    return SampleResult(tokens, bad)


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row, the lowest id of equals: [R] int64 of [R, V], read once."""
    return argmax_lse(logits)[0]


def nan_rows(logits: Tensor) -> Tensor:
    """Rows [R] bool that nothing can be drawn from: a not-a-number or +inf among the logits, or all of them -inf."""
    return argmax_lse(logits)[3]
