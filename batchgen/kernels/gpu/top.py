"""The k largest of each row, as `kernels.top` gives them, in an amount of work that no logits can change.

Cut a row into groups of neighbours. The k largest logits stand in the k groups whose largest are largest (ties by
position in both): were one of them in another group, the k groups before that would hold k larger ones. So a reading
of the row gives each group's largest, a selection among those gives k groups, and one among their logits the result.
Against a search for the k-th largest value this reads the row once, needs no counters, and ties cost nothing.
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
from batchgen.kernels.gpu.sorting import join_rising, top_falling
from batchgen.kernels.gpu.thresholds import value_of

__all__ = ["group_size", "largest", "select_top", "widest"]

GROUPS = {8: 64, 32: 64, 128: 32, 1024: 16}
"""By the k that a selection has room for: logits per group, so that groups and their logits are about as many."""
CHUNK = 2048
"""Candidates sorted at once."""
DIRECT = 4096
"""Rows of up to this many logits are selected from as they are."""
_LEAST = tl.constexpr(-(1 << 63))


def widest() -> int:
    """The largest k that kernels serve; beyond, the twin does."""
    return max(GROUPS)


@triton.jit(do_not_specialize=["k", "stride_group"])
def _select_kernel(
    p_logits, stride_r, stride_v, p_group_key, p_group, stride_group, p_minus, p_out_id, p_out_value, vocab, count, k,
    CHUNK: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, OF_GROUPS: tl.constexpr,
):  # fmt: skip
    """Find the K best of a row's candidates by (value falling, id rising).

    Candidate c of `count` is group c with its largest (OF_GROUPS), or logit c % GROUP of group group[r, c // GROUP]. As
    64-bit integers (key << 32 | ~id) they are all different. Chunks are sorted for their K best, which meet the K best
    so far. Writes the K groups [R, K] int32, or k ids [R, k] int64 and their values less minus[r], float32. Grid: (R).
    Exact. Reads the candidates, 4 bytes or a logit each.
    """
    i_row = tl.program_id(0).to(tl.int64)
    best = tl.full([K], _LEAST, tl.int64)
    for begin in range(0, count, CHUNK):
        o_c = begin + tl.arange(0, CHUNK)
        m_c = o_c < count
        if OF_GROUPS:
            ids = o_c
            keys = tl.load(p_group_key + i_row * count + o_c, mask=m_c, other=-0x80000000)
        else:
            i_group = tl.load(p_group + i_row * stride_group + o_c // GROUP, mask=m_c, other=0x7FFFFFFF // GROUP)
            ids = i_group * GROUP + o_c % GROUP
            m_v = ids < vocab
            x = tl.load(p_logits + i_row * stride_r + ids.to(tl.int64) * stride_v, mask=m_v, other=0.0)
            keys = tl.where(m_v, to_key(x.to(tl.float32)), -0x80000000)
        packed = (keys.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
        best = join_rising(best, top_falling(packed, K))
    o_rank = K - 1 - tl.arange(0, K)
    ids = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
    if OF_GROUPS:
        # Where there are fewer than K groups, the others stand behind the row's end.
        tl.store(p_out_id + i_row * K + o_rank, tl.minimum(ids, count))
    else:
        values = value_of((best >> 32).to(tl.int32)) - tl.load(p_minus + i_row)
        m_k = o_rank < k
        tl.store(p_out_id + i_row * k + o_rank, ids.to(tl.int64), mask=m_k)
        tl.store(p_out_value + i_row * k + o_rank, values, mask=m_k)


def group_size(vocab: int, k: int) -> int:
    """Logits per group whose largest `select_top` needs of a row of `vocab`; 0 where it needs none."""
    room, group = _room(k)
    return 0 if vocab <= max(DIRECT, room * group) else group


def select_top(logits: Tensor, k: int, groups: Tensor | None, minus: Tensor) -> tuple[Tensor, Tensor]:
    """Values and ids of the k largest of each row.

    Args:
        logits: [R, V] of any float type.
        k: 1 to V, at most `widest()`.
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
        chunk = _chunk(groups.shape[1], room)
        launch(
            _select_kernel, (rows,), None, 0, 0, groups, None, 0, None, chosen, None, 0, groups.shape[1], 0,
            CHUNK=chunk, K=room, GROUP=group, OF_GROUPS=True, num_warps=_warps(chunk),
        )  # fmt: skip
    ids = torch.empty(rows, k, dtype=torch.int64, device=device)
    values = torch.empty(rows, k, dtype=torch.float32, device=device)
    chunk = _chunk(room * group, room)
    launch(
        _select_kernel, (rows,), logits, logits.stride(0), logits.stride(1), None, chosen,
        room if groups is not None else 0, minus.contiguous(), ids, values, vocab, chosen.shape[1] * group, k,
        CHUNK=chunk, K=room, GROUP=group, OF_GROUPS=False, num_warps=_warps(chunk),
    )  # fmt: skip
    return values, ids


def largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As `kernels.top.largest`, of [R, V] of any float type; beyond `widest()`, and of float64, the twin itself."""
    if k > widest() or logits.dtype == torch.float64:
        return twin.largest(logits, k)
    group = group_size(logits.shape[1], k)
    groups = scan_rows(logits, normalize=False, group=group).groups if group else None
    nothing = torch.zeros(logits.shape[0], dtype=torch.float32, device=logits.device)
    values, ids = select_top(logits, k, groups, nothing)
    return values.to(logits.dtype), ids


def _room(k: int) -> tuple[int, int]:
    return next((room, group) for room, group in GROUPS.items() if k <= room)


def _chunk(count: int, room: int) -> int:
    return max(room, min(CHUNK, power_of_2(count)))


def _warps(chunk: int) -> int:
    return max(1, min(8, chunk // 256))
