"""Scores of the distribution that `gpu.sampling` draws from, without a sort; see `kernels.filtering`.

With x, q and the survivors as in `gpu.sampling`: x for survivors and for the sampled token, -inf for others. Grid: one
program per row. Two passes find top_k's boundary or collect the most likely tokens; top_p's boundary is found among the
collected tokens by bisection on float64 masses; a last pass writes the scores. If top_p extends beyond the collected
tokens, the bisection runs over the whole row, two bits of the boundary per pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.gpu.launch import launch
from batchgen.kernels.gpu.sampling import DEFAULT_TILE, GREEDY_BELOW, SamplingTile, cut, largest_of_row
from batchgen.kernels.gpu.top_k_threshold import boundary_in_few, boundary_in_row, inside, load_logits, scaled


@triton.jit
def _filter(
    p_logits, stride_row, stride, vocab, p_temperature, p_top_k, p_top_p, p_min_p, p_drawn, p_ids, p_scores,
    BLOCK: tl.constexpr, CAPACITY: tl.constexpr, SPREAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + row * stride_row
    p_ids += row * CAPACITY
    p_scores += row * vocab
    b_largest, largest, _, bad = largest_of_row(p_row, stride, vocab, BLOCK, STAGES)
    temperature = tl.load(p_temperature + row)
    whole = (temperature < GREEDY_BELOW) | bad
    temperature = tl.where(temperature < GREEDY_BELOW, 1.0, temperature)
    top_k = tl.where(whole, 0, tl.load(p_top_k + row))
    top_p = tl.where(whole, 1.0, tl.load(p_top_p + row))
    min_p = tl.where(whole, 0.0, tl.load(p_min_p + row))
    drawn = tl.load(p_drawn + row)
    value, last, count, total = cut(
        p_row, stride, vocab, b_largest, largest, temperature, top_k, top_p, p_ids, BLOCK, CAPACITY, SPREAD, STAGES
    )
    if top_p < 1.0:
        share = top_p.to(tl.float64)
        if count > 0:
            o_few = tl.arange(0, CAPACITY)
            m_few = o_few < count
            ids = tl.load(p_ids + o_few, mask=m_few, other=0)
            logits = load_logits(p_row, stride, ids, m_few)  # [CAPACITY]
            q = tl.exp(scaled(logits, largest, temperature)).to(tl.float64)
            q = tl.where(inside(logits, ids, value, last) & m_few, q, 0.0)
            total = tl.where(total == 0.0, tl.sum(q, axis=0), total)
            value, last = boundary_in_few(logits, ids, m_few, q, share * total)
        else:
            if total == 0.0:
                b_mass = tl.zeros([BLOCK], tl.float64)
                for start in range(0, vocab, BLOCK):
                    ids = start + tl.arange(0, BLOCK)
                    logits = load_logits(p_row, stride, ids, ids < vocab)
                    q = tl.exp(scaled(logits, largest, temperature))
                    b_mass += tl.where(inside(logits, ids, value, last), q, 0.0).to(tl.float64)
                total = tl.sum(b_mass, axis=0)
            value, last = boundary_in_row(
                p_row, stride, vocab, share * total, largest, temperature, value, last, True, BLOCK
            )
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = load_logits(p_row, stride, ids, ids < vocab)  # [BLOCK]
        x = scaled(logits, largest, temperature)
        survives = inside(logits, ids, value, last) & (tl.exp(x) >= min_p)
        survives = survives | (ids == drawn)
        tl.store(p_scores + ids, tl.where(survives, x, float("-inf")), mask=ids < vocab)


def filtered_scores(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    drawn: Tensor,
    tile: SamplingTile = DEFAULT_TILE,
) -> Tensor:
    """See `kernels.filtering.filtered_scores`; logits may be float16 or bfloat16 too.

    `tile`: sizes of the passes; does not change the result.
    """
    rows, vocab = logits.shape
    scores = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    launch(
        _filter, (rows,), logits, logits.stride(0), logits.stride(1), vocab, temperature, top_k, top_p, min_p, drawn,
        torch.empty(rows, tile.capacity, dtype=torch.int32, device=logits.device), scores,
        BLOCK=tile.block, CAPACITY=tile.capacity, SPREAD=tile.spread, STAGES=1,
        num_warps=2 * tile.warps,  # half the registers per thread: the bisections are wide
        maxnreg=128,  # else ptxas aims at two programs per multiprocessor, which spills on sm_80 and sm_89
    )  # fmt: skip
    return scores
