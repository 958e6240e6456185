"""One pass over logits [R, V]: each row's maximum, its id, the log-sum-exp, and the maxima of groups.

A row is divided into blocks of a fixed size, one program each, for any number of rows: few rows still fill a device,
and a row's results do not depend on other rows. A second, small launch combines the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.gpu.common import power_of_2
from batchgen.kernels.gpu.launch import launch
from batchgen.kernels.gpu.top_k_threshold import ordered

BLOCK = 4096
"""Most logits per program."""


@triton.jit
def to_key(x):
    """int32 keys in the order of float32 x: -0 equals 0, not-a-number equals +inf."""
    x = tl.where(x == x, x, float("inf"))
    return ordered(tl.where(x == 0.0, 0.0, x))


@triton.jit
def _scan_kernel(
    p_logits, stride_r, stride_v, p_max, p_id, p_sum, p_group, vocab, blocks, groups,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, ARG: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Read block b of row r once.

    With m the largest x in it (not-a-number counts as +inf) and m' = m, or 0 if m is infinite:

        max[r, b] = m,  id[r, b] = the lowest id of x = m,  sum[r, b] = sum(exp(x - m')),
        group[r, g] = to_key(the largest of x[g * GROUP : (g + 1) * GROUP])

    x [R, V] of any float type, others [R, blocks] and [R, groups]. Grid: (R * blocks). Float32 sums over one block, as
    a tree. Reads R * V logits, writes 12 bytes per block and 4 per group.
    """
    pid = tl.program_id(0).to(tl.int64)
    i_row, i_block = pid // blocks, (pid % blocks).to(tl.int32)
    if GROUP:
        o_group = tl.arange(0, BLOCK // GROUP)
        o_v = i_block * BLOCK + o_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [BLOCK / GROUP, GROUP]
    else:
        o_v = i_block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    p_row = p_logits + i_row * stride_r
    x = tl.load(p_row + o_v.to(tl.int64) * stride_v, mask=o_v < vocab, other=-float("inf")).to(tl.float32)
    seen = tl.where(x == x, x, float("inf"))
    if GROUP:
        top = tl.max(seen, axis=1)  # [BLOCK / GROUP]
        i_group = i_block * (BLOCK // GROUP) + o_group
        tl.store(p_group + i_row * groups + i_group, to_key(top), mask=i_group < groups)
        largest = tl.max(top, axis=0)
    else:
        largest = tl.max(seen, axis=0)
    tl.store(p_max + pid, largest)
    if ARG:
        ids = tl.where(seen == largest, o_v, 0x7FFFFFFF)
        if GROUP:
            tl.store(p_id + pid, tl.min(tl.min(ids, axis=1), axis=0))
        else:
            tl.store(p_id + pid, tl.min(ids, axis=0))
    if SUM:
        # With an infinite m, x - m would be inf - inf; shifted by 0, the sum is inf or not-a-number if the row has one.
        shift = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
        parts = tl.exp(x - shift)
        if GROUP:
            tl.store(p_sum + pid, tl.sum(tl.sum(parts, axis=1), axis=0))
        else:
            tl.store(p_sum + pid, tl.sum(parts, axis=0))


@triton.jit
def _join_kernel(
    p_logits, stride_r, stride_v, p_max, p_id, p_sum, p_target, p_out_id, p_out_max, p_out_lse, p_out_bad, p_out_target,
    blocks, BLOCKS: tl.constexpr, ARG: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Combine the parts of a row's blocks.

    With M the largest m of the blocks, and M' and m' as in `_scan_kernel`:

        lse[r] = M' + log(sum over b of sum[r, b] * exp(m'[b] - M')),  target[r] = x[r, target[r]] - lse[r]

    and the row is bad if M is infinite. Grid: (R). Reads 12 bytes per block.
    """
    i_row = tl.program_id(0).to(tl.int64)
    o_block = tl.arange(0, BLOCKS)
    m_block = o_block < blocks
    maxima = tl.load(p_max + i_row * blocks + o_block, mask=m_block, other=-float("inf"))  # [BLOCKS]
    sums = tl.load(p_sum + i_row * blocks + o_block, mask=m_block, other=0.0)
    largest = tl.max(maxima, axis=0)
    bad = tl.abs(largest) == float("inf")
    shift = tl.where(bad, 0.0, largest)
    # A block of -inf logits has no weight; the sums of a bad row are not shifted.
    by = tl.where(bad, 0.0, tl.where(maxima == -float("inf"), -float("inf"), maxima - shift))
    total = tl.sum(sums * tl.exp(by), axis=0)
    lse = shift + tl.log(total)
    tl.store(p_out_lse + i_row, lse)
    if ARG:
        ids = tl.load(p_id + i_row * blocks + o_block, mask=m_block, other=0x7FFFFFFF)
        tl.store(p_out_id + i_row, tl.min(tl.where(maxima == largest, ids, 0x7FFFFFFF), axis=0).to(tl.int64))
        tl.store(p_out_max + i_row, tl.where(total == total, largest, total))
        tl.store(p_out_bad + i_row, bad)
    if TARGET:
        i_v = tl.load(p_target + i_row)
        x = tl.load(p_logits + i_row * stride_r + i_v * stride_v).to(tl.float32)
        tl.store(p_out_target + i_row, x - lse)


@dataclass(frozen=True, slots=True)
class Scan:
    """Results of one pass over R rows; None if not requested."""

    normalizers: Tensor | None
    """[R] float32 log(sum(exp))"""
    targets: Tensor | None
    """[R] float32, logprob of each row's target"""
    ids: Tensor | None
    """[R] int64 id of the largest, the lowest of equal ones"""
    maxima: Tensor | None
    """[R] float32, the largest logit"""
    bad: Tensor | None
    """[R] bool: the row cannot be sampled"""
    groups: Tensor | None
    """[R, ceil(V / group)] int32, `to_key` of the maximum of each `group` logits"""


def scan_rows(
    logits: Tensor, *, arg: bool = False, normalize: bool = True, targets: Tensor | None = None, group: int = 0
) -> Scan:
    """Read logits [R, V] of any float type once.

    Args:
        logits: of any strides.
        arg: find each row's largest; implies `normalize`.
        normalize: sum the exponentials.
        targets: [R] int64 tokens whose logprobs are returned; implies `normalize`.
        group: a power of 2: also return the maximum of each `group` logits.
    """
    rows, vocab = logits.shape
    normalize = normalize or arg or targets is not None
    block = min(BLOCK, power_of_2(vocab, least=max(16, group)))
    blocks = triton.cdiv(vocab, block)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    # Separate tensors: in one tensor, the second part's alignment, and so the specialisation, would depend on R.
    maxima, sums = empty(rows, blocks), empty(rows, blocks)
    ids = empty(rows, blocks, dtype=torch.int32) if arg else None
    groups = empty(rows, triton.cdiv(vocab, group), dtype=torch.int32) if group else None
    strides = (logits.stride(0), logits.stride(1))
    launch(
        _scan_kernel, (rows * blocks,), logits, *strides, maxima, ids, sums if normalize else None, groups,
        vocab, blocks, 0 if groups is None else groups.shape[1],
        BLOCK=block, GROUP=group, ARG=arg, SUM=normalize, num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    if not normalize:
        return Scan(None, None, None, None, None, groups)
    lse = empty(rows)
    target_logits = empty(rows) if targets is not None else None
    best, top, bad = (empty(rows, dtype=d) if arg else None for d in (torch.int64, torch.float32, torch.bool))
    launch(
        _join_kernel, (rows,), logits, *strides, maxima, ids, sums, targets, best, top, lse, bad, target_logits,
        blocks, BLOCKS=power_of_2(blocks), ARG=arg, TARGET=targets is not None, num_warps=1,
    )  # fmt: skip
    return Scan(lse, target_logits, best, top, bad, groups)
