"""Reference attention in float64: one query at a time, slow and simple. Every backend is tested against it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.types import AttentionBatch, Ints

__all__ = ["reference_attention", "visible_slots"]


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


def reference_attention(
    batch: AttentionBatch,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of every flat token over a pool that already holds the step's keys and values.

    Args:
        batch: the step.
        query: [T, N, D].
        keys: [P, S, K, D].
        values: [P, S, K, Dv].
        scale: factor on query·key.
        window: a token sees itself and the `window - 1` before it.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [N] logits that join the denominators.

    Returns:
        [T, N, Dv] float64.
    """
    page_size, kv_heads = keys.shape[1], keys.shape[2]
    flat_keys, flat_values = keys.flatten(0, 1), values.flatten(0, 1)
    out = torch.zeros(*query.shape[:2], values.shape[3], dtype=torch.float64)
    for token, (position, slots) in enumerate(visible_slots(batch, page_size)):
        begin = 0 if window is None else max(0, position - window + 1)
        k = flat_keys[slots[begin:]].double().transpose(0, 1)  # [K, n, D]
        v = flat_values[slots[begin:]].double().transpose(0, 1)
        q = query[token].double().view(kv_heads, -1, query.shape[2])  # [K, N / K, D]
        scores = scale * (q @ k.transpose(1, 2)).flatten(0, 1)  # [N, n]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        top = scores.amax(1, keepdim=True)
        if sinks is not None:
            top = torch.maximum(top, sinks[:, None].double())
        weights = torch.exp(scores - top)
        denominator = weights.sum(1)
        if sinks is not None:
            denominator = denominator + torch.exp(sinks.double() - top[:, 0])
        summed = (weights.view(kv_heads, -1, weights.shape[1]) @ v).flatten(0, 1)  # [N, Dv]
        out[token] = summed / denominator[:, None]
    return out
