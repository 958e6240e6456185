"""Top-k of each row in Triton, as `kernels.top`, with an amount of work that does not depend on the logits.

A row is divided into groups of neighbours. The k largest logits are in the k groups with the largest maxima (ties by
position in both): if one were in another group, the k groups before that would contain k larger ones. So one pass over
the row finds each group's maximum, one selection among those finds k groups, and one among their logits the result.

Both selections fit in registers, where bisection finds the k-th key, and both are stable, so that of equal logits those
with the lowest ids win. Unlike a search for the k-th key over the row, this reads the row once, with enough programs to
fill the device; unlike a sort, it is a short program for any k.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels import top as torch_top
from batchgen.kernels.gpu.common import power_of_2
from batchgen.kernels.gpu.launch import launch
from batchgen.kernels.gpu.row_scan import scan_rows, to_key
from batchgen.kernels.gpu.top_k_threshold import narrow, value_of

GROUPS = {8: 64, 32: 64, 128: 32, 1024: 16}
"""By capacity for k: logits per group, such that there are about as many groups as logits in the selected groups."""
MOST_GROUPS = 1 << 15
"""Most groups per row that fit in registers."""
_STEP = 2048
"""Elements processed at once where more than their keys is needed."""


@triton.jit
def _cut(keys, count):
    """Threshold of the first `count` of [N] int32 keys, and the number of keys equal to it among these."""
    pivot, above = narrow(keys, tl.full([keys.shape[0]], 1, tl.int32), count)
    return pivot, count - above


@triton.jit
def _places(keys, pivot, ties, larger, equal):
    """Which of the next keys pass the threshold, and their output positions after `larger` and `equal` others."""
    both = (keys > pivot).to(tl.int32) + ((keys == pivot).to(tl.int32) << 16)  # two counts in one scan
    running = tl.cumsum(both, axis=0)
    rank = equal + (running >> 16)
    kept = (keys > pivot) | ((keys == pivot) & (rank <= ties))
    place = larger + (running & 0xFFFF) + tl.minimum(rank, ties) - 1
    counts = tl.sum(both, axis=0)
    return kept, place, larger + (counts & 0xFFFF), equal + (counts >> 16)


@triton.jit
def _group_keys(p_group_key, o_group, groups):
    return tl.load(p_group_key + o_group, mask=o_group < groups, other=-0x80000000)


@triton.jit
def _logit_keys(p_row, stride_v, p_chosen, o_c, vocab, chosen, GROUP: tl.constexpr):
    """Keys and ids of candidates: logit c % GROUP of the c // GROUP-th chosen group; ids >= `vocab` are padding."""
    o_group = o_c // GROUP
    i_group = tl.load(p_chosen + o_group, mask=o_group < chosen, other=vocab // GROUP + 1)
    ids = i_group * GROUP + o_c % GROUP
    x = tl.load(p_row + ids.to(tl.int64) * stride_v, mask=ids < vocab, other=0.0).to(tl.float32)
    return tl.where(ids < vocab, to_key(x), -0x80000000), ids


@triton.jit
def _groups_kernel(p_group_key, p_chosen, groups, GROUPS: tl.constexpr, ROOM: tl.constexpr, STEP: tl.constexpr):
    """Write the ROOM groups of row r with the largest maxima, by rising index: chosen [R, ROOM] int32.

    Grid: (R). group_key [R, groups] int32, groups >= ROOM, held in registers for the threshold and read again, STEP at
    a time, for the selection. Exact. Reads 4 bytes per group, twice.
    """
    i_row = tl.program_id(0).to(tl.int64)
    p_group_key += i_row * groups
    pivot, ties = _cut(_group_keys(p_group_key, tl.arange(0, GROUPS), groups), ROOM)
    larger, equal = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for begin in range(0, GROUPS, STEP):
        o_group = begin + tl.arange(0, STEP)
        keys = _group_keys(p_group_key, o_group, groups)
        kept, place, larger, equal = _places(keys, pivot, ties, larger, equal)
        tl.store(p_chosen + i_row * ROOM + place, o_group, mask=kept)


@triton.jit(do_not_specialize=["stride_chosen", "chosen", "k"])
def _logits_kernel(
    p_logits, stride_r, stride_v, p_chosen, stride_chosen, p_minus, p_few, p_out_id, p_out_value, vocab, chosen, k,
    ROOM: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Write the first k logits of row r's chosen groups: values [R, k] float32 less minus[r], and ids [R, k] int64.

    Grid: (R). chosen [R, ROOM] int32, `chosen` of them, rising. Selected like the groups; the first k are then stored
    as 64-bit integers (key << 32 | ~id), all different, in few [R, ROOM], where each one's rank is the number of larger
    ones. Exact. Reads ROOM * GROUP logits, twice.
    """
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + i_row * stride_r
    p_chosen += i_row * stride_chosen
    p_few += i_row * ROOM
    all_keys, _ = _logit_keys(p_row, stride_v, p_chosen, tl.arange(0, ROOM * GROUP), vocab, chosen, GROUP)
    pivot, ties = _cut(all_keys, k)
    larger, equal = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for begin in range(0, ROOM * GROUP, STEP):
        keys, ids = _logit_keys(p_row, stride_v, p_chosen, begin + tl.arange(0, STEP), vocab, chosen, GROUP)
        kept, place, larger, equal = _places(keys, pivot, ties, larger, equal)
        tl.store(p_few + place, (keys.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64), mask=kept)
    tl.debug_barrier()  # all stores before any load
    o_few = tl.arange(0, ROOM)
    m_few = o_few < k
    few = tl.load(p_few + o_few, mask=m_few, other=0)
    rank = tl.zeros([ROOM], tl.int32)
    for begin in range(0, k, OTHERS):
        o_other = begin + tl.arange(0, OTHERS)
        others = tl.load(p_few + o_other, mask=o_other < k, other=-(1 << 63))
        rank += tl.sum((others[:, None] > few[None, :]).to(tl.int32), axis=0)  # [OTHERS, ROOM]
    values = value_of((few >> 32).to(tl.int32)) - tl.load(p_minus + i_row)
    tl.store(p_out_id + i_row * k + rank, 0x7FFFFFFF - (few & 0x7FFFFFFF), mask=m_few)
    tl.store(p_out_value + i_row * k + rank, values, mask=m_few)


def serves(vocab: int, k: int) -> bool:
    """Whether the kernels support top-k of rows of `vocab` logits; otherwise PyTorch does it."""
    return k <= max(GROUPS) and vocab <= MOST_GROUPS * _room(k)[1]


def group_size(vocab: int, k: int) -> int:
    """Logits per group whose maxima `select_top` needs for a row of `vocab`; 0 if it needs none."""
    room, group = _room(k)
    return 0 if vocab <= room * group else group


def select_top(logits: Tensor, k: int, groups: Tensor | None, minus: Tensor) -> tuple[Tensor, Tensor]:
    """Values and ids of the k largest of each row.

    Args:
        logits: [R, V] of any float type.
        k: 1 to V; `serves(V, k)`.
        groups: group maxima by `scan_rows` for `group_size(V, k)`; None if that is 0.
        minus: [R] float32, subtracted from the row's values: with the row's log-sum-exp they become logprobs.

    Returns:
        [R, k] float32 values in falling order, ties by rising id, and [R, k] int64 ids.
    """
    rows, vocab = logits.shape
    device = logits.device
    room, group = _room(k)
    if groups is None:  # the row is small enough to select from all its groups
        chosen = torch.arange(triton.cdiv(vocab, group), dtype=torch.int32, device=device)[None]
    else:
        chosen = torch.empty(rows, room, dtype=torch.int32, device=device)
        tile = power_of_2(groups.shape[1])
        launch(
            _groups_kernel, (rows,), groups, chosen, groups.shape[1],
            GROUPS=tile, ROOM=room, STEP=min(tile, _STEP), num_warps=_warps(tile),
        )  # fmt: skip
    few = torch.empty(rows, room, dtype=torch.int64, device=device)
    ids = torch.empty(rows, k, dtype=torch.int64, device=device)
    values = torch.empty(rows, k, dtype=torch.float32, device=device)
    launch(
        _logits_kernel, (rows,), logits, logits.stride(0), logits.stride(1), chosen, 0 if groups is None else room,
        minus.contiguous(), few, ids, values, vocab, chosen.shape[1], k,
        ROOM=room, GROUP=group, STEP=min(room * group, _STEP), OTHERS=min(room, 32), num_warps=_warps(room * group),
    )  # fmt: skip
    return values, ids


def largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`kernels.top.largest` for [R, V] of any float type; in PyTorch for float64 and unsupported sizes."""
    if not serves(logits.shape[1], k) or logits.dtype == torch.float64:
        return torch_top.largest(logits, k)
    group = group_size(logits.shape[1], k)
    groups = scan_rows(logits, normalize=False, group=group).groups if group else None
    nothing = torch.zeros(logits.shape[0], dtype=torch.float32, device=logits.device)
    values, ids = select_top(logits, k, groups, nothing)
    return values.to(logits.dtype), ids


def _room(k: int) -> tuple[int, int]:
    return next((room, group) for room, group in GROUPS.items() if k <= room)


def _warps(tile: int) -> int:
    return max(1, min(16, tile // 512))
