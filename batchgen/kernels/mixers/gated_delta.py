"""Gated delta rule: the state S [K, V] of a head decays, forgets what it predicts for a key, and stores the value.

S = exp(g) S + beta k (v - exp(g) S^T k)^T, and a token's result is S^T q / sqrt(K). A chunk of C tokens is computed by
products: with the decay between two tokens D, the triangular system (I + tril(beta k k^T D, -1)) gives the values that
each token stores. Source: Gated Delta Networks (arXiv:2412.06464), which extends arXiv:2406.06484.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from batchgen.kernels.mixers.states import RunBatch

CHUNK: Final = 64
"""Tokens computed together."""


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, states: Tensor, batches: Sequence[RunBatch]
) -> Tensor:
    """Compute the rows of a step, and keep their states.

    Args:
        query: [T, H, K]; normalised and scaled by the caller.
        key: [T, H, K]; normalised by the caller.
        value: [T, H, V].
        decay: [T, H] logarithms, at most 0.
        beta: [T, H] share of a value that is stored.
        states: [P, H, K, V] float32; written.
        batches: the step's runs.

    Returns:
        [T, H, V] in the values' dtype; computed in float32.
    """
    out = torch.empty_like(value)
    for batch in batches:
        before = states[batch.sources]  # [B, H, K, V]
        rows = batch.rows
        if batch.slots is None:
            batch.put(out, torch.einsum("bhkv,blhk->blhv", before, query[rows].float()))
            continue
        q, k, v, g, b = (x[rows].float() for x in (query, key, value, decay, beta))
        if (padding := batch.padding) is not None:  # what neither decays nor stores changes no state
            g, b = (x.masked_fill(padding[..., None], 0) for x in (g, b))
        values, after = (_update if rows.shape[1] == 1 else _chunks)(q, k, v, g, b, before)
        states[batch.slots] = after
        batch.put(out, values)
    return out


def _update(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each run: [B, 1, H, ...] -> [B, 1, H, V] and the states."""
    q, k, v, decay, beta = (x[:, 0] for x in (q, k, v, decay, beta))
    state = state * decay.exp()[..., None, None]
    stored = (v - torch.einsum("bhkv,bhk->bhv", state, k)) * beta[..., None]
    state = state + k[..., None] * stored[:, :, None]
    return torch.einsum("bhkv,bhk->bhv", state, q)[:, None], state


def _chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Runs [B, L, H, ...] -> [B, L, H, V] and the states."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, L, .]
    decay, beta = decay.transpose(1, 2), beta.transpose(1, 2)[..., None]
    out = torch.empty_like(v)
    for at in range(0, q.shape[2], CHUNK):
        part = slice(at, at + CHUNK)
        total = decay[:, :, part].cumsum(2)  # [B, H, C]
        between = (total[..., None] - total[:, :, None]).tril().exp().tril()  # [B, H, C, C]
        keys, queries = k[:, :, part], q[:, :, part]
        scaled = keys * beta[:, :, part]
        system = (scaled @ keys.mT * between).tril(-1)
        begun = total.exp()[..., None]
        known = v[:, :, part] * beta[:, :, part] - (scaled * begun) @ state
        stored = torch.linalg.solve_triangular(
            system + torch.eye(system.shape[-1], device=q.device), known, upper=False, unitriangular=True
        )  # [B, H, C, V]
        out[:, :, part] = (queries * begun) @ state + (queries @ keys.mT * between) @ stored
        left = (total[..., -1:] - total).exp()[..., None]
        state = state * total[..., -1:, None].exp() + (keys * left).mT @ stored
    return out.transpose(1, 2), state


def naive_gated_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for one row, token by token, in float32: [L, H, K] twice, [L, H, V], [L, H] twice and [H, K, V]."""
    out = []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = state * g.exp()[:, None, None]
        stored = (v - (state * k[..., None]).sum(1)) * b[:, None]
        state = state + k[..., None] * stored[:, None]
        out.append((state * q[..., None]).sum(1))
    return torch.stack(out), state
