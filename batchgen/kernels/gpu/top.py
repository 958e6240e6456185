"""The k largest of each row, as `kernels.top` gives them, in an amount of work that no logits can change.

Cut a row into groups of neighbours. The k largest logits stand in the k groups whose largest are largest (ties by
position in both): were one of them in another group, the k groups before that would hold k larger ones. So a reading
of the row gives each group's largest, a selection among those gives k groups, and one among their logits the result.

Both selections are few enough to stand in registers, where bisection finds the k-th key, and both keep their order, so
that the first of equals are those of lowest id. Against a search for the k-th key over the row itself this reads the
row once, by as many programs as fill the device. Against sorting it is a short program, for any k.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels import top as twin
from batchgen.kernels.gpu.common import power_of_2
from batchgen.kernels.gpu.launch import launch
from batchgen.kernels.gpu.row_scan import scan_rows, to_key
from batchgen.kernels.gpu.thresholds import narrow, value_of

__all__ = ["group_size", "largest", "select_top", "serves"]

GROUPS = {8: 64, 32: 64, 128: 32, 1024: 16}
"""By the k that a selection has room for: logits per group, so that groups and their logits are about as many."""
MOST_GROUPS = 1 << 15
"""Groups of a row that stand in registers."""
_STEP = 2048
"""Of them looked at at once, where more than their keys is worked on."""


@triton.jit
def _cut(keys, count):
    """The key that cuts off the first `count` of [N] int32 keys, and how many of its equals are among these."""
    pivot, above = narrow(keys, tl.full([keys.shape[0]], 1, tl.int32), count)
    return pivot, count - above


@triton.jit
def _places(keys, pivot, ties, larger, equal):
    """Which of the next keys are in front of the cut, and their places, after so many larger and equal ones."""
    both = (keys > pivot).to(tl.int32) + ((keys == pivot).to(tl.int32) << 16)  # two counts in one scan
    running = tl.cumsum(both, axis=0)
    rank = equal + (running >> 16)
    kept = (keys > pivot) | ((keys == pivot) & (rank <= ties))
    place = larger + (running & 0xFFFF) + tl.minimum(rank, ties) - 1
    found = tl.sum(both, axis=0)
    return kept, place, larger + (found & 0xFFFF), equal + (found >> 16)


@triton.jit
def _group_keys(p_group_key, o_group, groups):
    return tl.load(p_group_key + o_group, mask=o_group < groups, other=-0x80000000)


@triton.jit
def _logit_keys(p_row, stride_v, p_chosen, o_c, vocab, chosen, GROUP: tl.constexpr):
    """Keys and ids of candidates: logit c % GROUP of the c // GROUP-th group chosen; ids from `vocab` on are none."""
    o_group = o_c // GROUP
    i_group = tl.load(p_chosen + o_group, mask=o_group < chosen, other=vocab // GROUP + 1)
    ids = i_group * GROUP + o_c % GROUP
    x = tl.load(p_row + ids.to(tl.int64) * stride_v, mask=ids < vocab, other=0.0).to(tl.float32)
    return tl.where(ids < vocab, to_key(x), -0x80000000), ids


@triton.jit
def _groups_kernel(p_group_key, p_chosen, groups, GROUPS: tl.constexpr, ROOM: tl.constexpr, STEP: tl.constexpr):
    """Write the first ROOM groups of row r by their largest, in rising order: chosen [R, ROOM] int32.

    Grid: (R). group_key [R, groups] int32, at least ROOM of them, held in registers for the cut and read again, STEP at
    a time, for what is in front of it. Exact. Reads 4 bytes per group, twice.
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

    Grid: (R). chosen [R, ROOM] int32, `chosen` of them, rising. Cut as the groups are; the first k then stand as 64-bit
    integers (key << 32 | ~id), all different, in few [R, ROOM], where the rank of each is the number of larger ones.
    Exact. Reads ROOM * GROUP logits, twice.
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
    tl.debug_barrier()  # all are written before any is read
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
    """Whether kernels find the k largest of rows of `vocab` logits; the twin does where not."""
    return k <= max(GROUPS) and vocab <= MOST_GROUPS * _room(k)[1]


def group_size(vocab: int, k: int) -> int:
    """Logits per group whose largest `select_top` needs of a row of `vocab`; 0 where it needs none."""
    room, group = _room(k)
    return 0 if vocab <= room * group else group


def select_top(logits: Tensor, k: int, groups: Tensor | None, minus: Tensor) -> tuple[Tensor, Tensor]:
    """Values and ids of the k largest of each row.

    Args:
        logits: [R, V] of any float type.
        k: 1 to V; `serves(V, k)`.
        groups: what `scan_rows` gave for `group_size(V, k)`; None where that is 0.
        minus: [R] float32, taken from the row's values: its normaliser, and they are logprobs.

    Returns:
        [R, k] float32 values in falling order, ties by rising id, and [R, k] int64 ids.
    """
    rows, vocab = logits.shape
    device = logits.device
    room, group = _room(k)
    if groups is None:  # all of them are looked into
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
    """As `kernels.top.largest`, of [R, V] of any float type; the twin itself for float64 and what is not served."""
    if not serves(logits.shape[1], k) or logits.dtype == torch.float64:
        return twin.largest(logits, k)
    group = group_size(logits.shape[1], k)
    groups = scan_rows(logits, normalize=False, group=group).groups if group else None
    nothing = torch.zeros(logits.shape[0], dtype=torch.float32, device=logits.device)
    values, ids = select_top(logits, k, groups, nothing)
    return values.to(logits.dtype), ids


def _room(k: int) -> tuple[int, int]:
    return next((room, group) for room, group in GROUPS.items() if k <= room)


def _warps(tile: int) -> int:
    return max(1, min(16, tile // 512))
