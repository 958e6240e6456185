"""Attention of a step by the definition, token by token: the oracle of every attention."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.types import AttentionArgs, AttentionBatch, Ints


def visible_slots(batch: AttentionBatch, page_size: int) -> list[tuple[int, Tensor]]:
    """By flat token of the step: its position, and the pool slots [position + 1] int64 of positions 0..position."""
    result: list[tuple[int, Tensor]] = []
    for chunk in batch.chunks:
        slots = _slots(chunk.pages, page_size)
        for position in range(chunk.kv_len - chunk.q_len, chunk.kv_len):
            result.append((position, slots[: position + 1]))
    if batch.decode_pages is None or batch.decode_lens is None or batch.decode_own_start is None:
        return result
    for row in range(batch.decode_lens.shape[0]):
        start = int(batch.decode_own_start[row])
        position = start + int(batch.decode_lens[row]) - 1
        slots = torch.full((position + 1,), -1, dtype=torch.int64)
        slots[start:] = _slots(batch.decode_pages[row], page_size)[: position + 1 - start]
        for group in batch.groups:
            if row in group.rows.tolist():
                slots[group.start : group.start + len(group.pages) * page_size] = _slots(group.pages, page_size)
        assert bool((slots >= 0).all()), f"decode row {row}: groups and own pages leave positions uncovered"
        result.append((position, slots))
    return result


def _slots(pages: Ints, page_size: int) -> Tensor:
    return torch.from_numpy(pages[:, None] * page_size + np.arange(page_size)).reshape(-1)


def _with_span(batch: AttentionBatch, token: int, position: int, slots: Tensor, begin: int, page_size: int) -> Tensor:
    """Slots of the positions from `begin` to the token's own, or to the end of the run of `batch.spans` with it."""
    for start, end in batch.spans:
        if start <= token < end:
            (chunk,) = (c for c in batch.chunks if c.q_start <= token < c.q_start + c.q_len)
            begin = min(begin, max(0, position - token + start)) if batch.spans_exceed_window else begin
            return _slots(chunk.pages, page_size)[begin : position - token + end]
    return slots[begin:]


def attend_by_token(
    batch: AttentionBatch,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    args: AttentionArgs,
    compute: torch.dtype = torch.float64,
) -> Tensor:
    """Attention of every flat token over a pool that already holds the step's keys and values.

    In float64 it gives the true values. In a lower precision it is the plain operation of the 2 x rule: products and
    probabilities are rounded to `compute`, the softmax is in float32.

    Args:
        batch: the step.
        query: [T, N, D].
        keys: [P, S, K, D].
        values: [P, S, K, Dv].
        args: settings of the layer.
        compute: float64, float32, float16 or bfloat16.

    Returns:
        [T, N, Dv] in `compute`.
    """
    page_size, kv_heads = keys.shape[1], keys.shape[2]
    flat_keys, flat_values = keys.flatten(0, 1), values.flatten(0, 1)
    wide = torch.float64 if compute == torch.float64 else torch.float32
    out = torch.empty(*query.shape[:2], values.shape[3], dtype=compute, device=query.device)
    for token, (position, slots) in enumerate(visible_slots(batch, page_size)):
        begin = 0 if args.window is None else max(0, position - args.window + 1)
        begin = position // args.window * args.window if args.window and args.restarts else begin
        chosen = (_with_span(batch, token, position, slots, begin, page_size) if args.runs else slots[begin:]).to(
            query.device
        )
        k, v = flat_keys[chosen].to(compute), flat_values[chosen].to(compute)  # [n, K, D], [n, K, Dv]
        q = query[token].view(kv_heads, -1, query.shape[-1]).to(compute)  # [K, G, D]
        scores = torch.einsum("kgd,nkd->kgn", q, k).to(wide) * args.scale
        if args.softcap is not None:
            scores = args.softcap * torch.tanh(scores / args.softcap)
        if args.sinks is not None:
            scores = torch.cat((scores, args.sinks.to(wide).view(kv_heads, -1, 1)), -1)
        weights = torch.softmax(scores, -1)[..., : len(chosen)].to(compute)
        out[token] = torch.einsum("kgn,nkd->kgd", weights, v).flatten(0, 1)
    return out
