"""Sampling of one token per row in Triton: `kernels.sampling` in one launch for rows with any mix of parameters.

With the row's largest logit m, x = (logit - m) / temperature and q = exp(x), a row's survivors are its first k tokens
in the order (logit falling, id rising), of these the tokens preceded by less than p of their mass, of these the ones
with q >= min_p. The sampled token is the survivor with the largest x + noise, the lowest id of equal ones.

Grid: one program per row, which does only what the row's parameters need. Passes over the row's V logits:

    greedy, or top_k 1                              1
    no filter, or min_p only                        2   largest; draw
    top_k, with any top_p and min_p                 2   largest; collect the first k; the rest in registers
    top_p, its tokens among the first ~1,400        2   largest; collect these, total; the rest on the collected tokens
    top_p of a flatter row                          4 + (1 - p) + ...   largest; as above; draw; checks

Sampling does not search top_p's boundary. One token is drawn from the row (or from top_k's survivors). The next pass
sums the mass before it, which shows whether it survives, and at the same time draws among those tokens the next
candidate in case it does not. A draw fails its check with a probability of 1 - p.

Noise costs more than reading, so only tokens that could win get it in full: 53 bits give a uniform v, and x + noise
exceeds the best so far only if v < q * exp(-best). Most blocks of a row need no logarithm, and blocks without a
survivor need no bits.

Numerics: logits are converted to float32 when loaded; masses are float64 sums of float32 exp. A device's exp and log
are within 2 ulp of a CPU's, so the two may sample differently if a mass or the two best scores are that close: by the
spacing of scores, about once in a million draws. A row's result does not depend on other rows, nor on the run.

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
from batchgen.kernels.gpu.top_k_threshold import (
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

GREEDY_BELOW = tl.constexpr(GREEDY_TEMPERATURE)
NO_ID = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True, slots=True)
class SamplingTile:
    """Tile sizes of the pass over a row."""

    block: int = 2048
    """logits per step, and lanes of the search for the largest; a power of 2"""
    capacity: int = 2048
    """most ids that are collected; a power of 2"""
    spread: int = 1024
    """rows with top_p only collect all tokens from the least of the `spread` largest lane maxima on: of V >> block
    logits about -block * log(1 - spread / block)"""
    few_block: int = 1024
    """collected ids per step; a power of 2"""
    warps: int = 8
    stages: int = 4
    """blocks in flight, if rows are aligned to 16 bytes"""

    def stages_for(self, logits: Tensor) -> int:
        """Blocks in flight; 1 for unaligned rows, whose prefetch in small pieces costs more than it saves."""
        aligned = logits.stride(1) == 1 and logits.stride(0) * logits.element_size() % 16 == 0
        return self.stages if aligned else 1


DEFAULT_TILE = SamplingTile()


@triton.jit
def largest_of_row(p_row, stride, vocab, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Lanes' maxima, the largest logit, the lowest id that has it, and whether the row cannot be sampled."""
    b_largest, b_id, b_nan = lane_maxima(p_row, stride, vocab, BLOCK, STAGES)
    largest = tl.max(b_largest, axis=0)
    token = tl.min(tl.where(b_largest == largest, b_id, NO_ID), axis=0)
    bad = (tl.max(b_nan.to(tl.int32), axis=0) > 0) | (largest == float("inf")) | (largest == float("-inf"))
    return b_largest, largest, token, bad


@triton.jit
def cut(
    p_row, stride, vocab, b_largest, largest, temperature, top_k, top_p, p_ids,
    BLOCK: tl.constexpr, CAPACITY: tl.constexpr, SPREAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Find top_k's boundary, or collect few tokens that include all of top_p's, if there are few.

    Returns:
        `(value, last, count, total)`: top_k's boundary; the number of ids in `p_ids`, rising, or 0 for the whole
        row; and the mass that top_p is a share of, float64, or 0 for the mass inside the boundary.
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
        # The collected tokens are the first in the order; check that they include all of top_p's.
        o_few = tl.arange(0, CAPACITY)
        m_few = o_few < count
        logits = load_logits(p_row, stride, tl.load(p_ids + o_few, mask=m_few, other=0), m_few)
        mass = tl.sum(tl.exp(scaled(logits, largest, temperature)).to(tl.float64), axis=0)
        count = tl.where((count <= CAPACITY) & (mass >= top_p.to(tl.float64) * total), count, 0)
    return value, last, count, total


@triton.jit
def _draw(
    p_row, stride, p_ids, count, largest, temperature, min_p, key, value, last, want_mass,
    FEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One pass over `count` tokens (those of `p_ids` if FEW): the mass inside the boundary, and a draw among it.

    Returns:
        the sum of exp(x) inside, float64, 0 unless `want_mass`; the id drawn, -1 if nothing is inside; its logit.
    """
    o_lane = tl.arange(0, BLOCK)
    b_mass = tl.zeros([BLOCK], tl.float64)
    # The most likely token, which every boundary keeps, scores at least -2.9: nothing below can win.
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
            # noise >= best - x  =>  -log1p(-v) <= exp(x - best)  =>  v <= q * exp(-best), with a margin for rounding.
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
    """Draw inside the boundary until the token survives top_p of `total`; 0: of the mass inside the boundary."""
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
    p_logits, stride_row, stride, vocab, p_temperature, p_top_k, p_top_p, p_min_p, p_keys, p_ids, p_tokens, p_bad,
    BLOCK: tl.constexpr, CAPACITY: tl.constexpr, SPREAD: tl.constexpr, FEW_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
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
    logits: Tensor, columns: SamplingColumns, sample_rows: Tensor | None = None, *, tile: SamplingTile = DEFAULT_TILE
) -> SampleResult:
    """See `kernels.sampling.sample`; rows that are `bad` in the result yield some id in range.

    `columns`: its grouping of rows is not used. `tile`: sizes of the passes; does not change the result.
    """
    assert columns.keys is not None or columns.all_greedy, "draws need keys"
    if sample_rows is not None:
        logits = logits[sample_rows]
    rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    bad = torch.empty(rows, dtype=torch.bool, device=device)
    launch(
        _sample, (rows,), logits, logits.stride(0), logits.stride(1), vocab, columns.temperature, columns.top_k,
        columns.top_p, columns.min_p, columns.keys if columns.keys is not None else columns.top_k,
        torch.empty(rows, tile.capacity, dtype=torch.int32, device=device), tokens, bad,
        BLOCK=tile.block, CAPACITY=tile.capacity, SPREAD=tile.spread, FEW_BLOCK=tile.few_block,
        STAGES=tile.stages_for(logits), num_warps=tile.warps,
    )  # fmt: skip
    return SampleResult(tokens, bad)


def greedy(logits: Tensor) -> Tensor:
    """[R] int64: the most likely token of each row of [R, V], the lowest id of equal ones, in one pass."""
    return argmax_lse(logits)[0]


def nan_rows(logits: Tensor) -> Tensor:
    """[R] bool: rows that cannot be sampled, with a not-a-number or +inf among the logits, or all of them -inf."""
    return argmax_lse(logits)[3]
