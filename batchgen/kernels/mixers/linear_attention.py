"""Linear attention: the state S [K, V] of a head decays, and stores a value under a key.

S = exp(g) S + k v^T, and a token's result is S^T q. With a delta rule, the state first forgets what it predicts for the
key: it stores beta (v - exp(g) S^T k). Then a chunk of tokens is a triangular system: with the decay between two tokens
D, (I + tril(beta k k^T D, -1)) gives the values that each token stores. g is a number or a vector [K].

This is Mamba-2 (arXiv:2405.21060: g = dt A, v = dt x), lightning attention (arXiv:2401.04658), the gated delta rule
(arXiv:2412.06464) and Kimi delta attention (arXiv:2510.26692: the latter two with a delta rule).

Shape letters, in addition to those of `states`: G groups of heads with one key, R heads of a group, H = G R.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from batchgen.kernels.mixers.states import RunBatch

CHUNK: Final = 64
"""Tokens computed together."""
CHANNEL_CHUNK: Final = 16
"""The same where each channel decays by itself: the decays between a chunk's tokens take K times the memory."""


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    states: Tensor,
    batches: Sequence[RunBatch],
) -> Tensor:
    """Compute the rows of a step, and keep their states.

    Args:
        query: [T, G, K]; normalised and scaled by the caller.
        key: [T, G, K]; normalised by the caller.
        value: [T, H, V].
        decay: [T, H] or [T, H, K] logarithms, at most 0.
        beta: [T, H] share of a value that a delta rule stores; None: no delta rule.
        states: [P, H, K, V] float32; written.
        batches: the step's runs.

    Returns:
        [T, H, V] in the values' dtype; computed in float32.
    """
    groups, heads = key.shape[1], value.shape[1]
    split, out = (groups, heads // groups), torch.empty_like(value)
    for batch in batches:
        before = states[batch.sources].reshape(-1, *split, *states.shape[2:])  # [B, G, R, K, V]
        rows = batch.rows
        q = query[rows].float()
        if batch.slots is None:
            batch.put(out, torch.einsum("bgrkv,blgk->blgrv", before, q).flatten(2, 3))
            continue
        k, v, g = key[rows].float(), value[rows].float(), decay[rows].float()
        b = None if beta is None else beta[rows].float()
        if (padding := batch.padding) is not None:  # what neither decays nor stores changes no state
            g = g.masked_fill(padding.view(*padding.shape, *[1] * (g.ndim - 2)), 0)
            if b is None:
                v = v.masked_fill(padding[..., None, None], 0)
            else:
                b = b.masked_fill(padding[..., None], 0)
        v, g = v.view(*v.shape[:2], *split, -1), g.view(*g.shape[:2], *split, -1)
        values, after = (_update if rows.shape[1] == 1 else _chunks)(
            q, k, v, g, None if b is None else b.view(*b.shape[:2], *split, 1), before
        )
        batch.keep(states, after.flatten(1, 2))
        batch.put(out, values.flatten(2, 3))
    return out


def _update(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each run, as `_chunks`."""
    q, k, stored = q[:, 0], k[:, 0], v[:, 0]
    state = state * decay[:, 0, ..., None].exp()
    if beta is not None:
        stored = (stored - torch.einsum("bgrkv,bgk->bgrv", state, k)) * beta[:, 0]
    state = state + k[:, :, None, :, None] * stored[..., None, :]
    return torch.einsum("bgrkv,bgk->bgrv", state, q)[:, None], state


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute runs.

    Args:
        q: [B, L, G, K].
        k: [B, L, G, K].
        v: [B, L, G, R, V].
        decay: [B, L, G, R, 1] or [B, L, G, R, K].
        beta: [B, L, G, R, 1].
        state: [B, G, R, K, V].

    Returns:
        [B, L, G, R, V] and the states.
    """
    q, k = (x.transpose(1, 2)[:, :, None] for x in (q, k))  # [B, G, 1, L, K]
    v, decay = (x.permute(0, 2, 3, 1, 4) for x in (v, decay))  # [B, G, R, L, .]
    beta = None if beta is None else beta.permute(0, 2, 3, 1, 4)
    chunk = CHUNK if decay.shape[-1] == 1 else CHANNEL_CHUNK
    out = torch.empty_like(v)
    for at in range(0, q.shape[3], chunk):
        part = slice(at, at + chunk)
        queries, keys, stored = (x[..., part, :] for x in (q, k, v))
        total = decay[..., part, :].cumsum(-2)  # [B, G, R, C, 1 or K]
        between = total[..., :, None, :] - total[..., None, :, :]  # [B, G, R, C, C, 1 or K]
        later = torch.ones(between.shape[-3:-1], dtype=torch.bool, device=q.device).triu(1)
        between = between.masked_fill(later[..., None], -torch.inf).exp()
        begun, last = total.exp(), total[..., -1:, :]
        if beta is not None:
            share = beta[..., part, :]
            scaled = keys * share
            stored = torch.linalg.solve_triangular(
                _pairs(scaled, keys, between).tril(-1) + torch.eye(len(later), device=q.device),
                stored * share - (scaled * begun) @ state,
                upper=False,
                unitriangular=True,
            )  # [B, G, R, C, V]
        out[..., part, :] = (queries * begun) @ state + _pairs(queries, keys, between) @ stored
        state = state * last.exp().mT + (keys * (last - total).exp()).mT @ stored
    return out.permute(0, 3, 1, 2, 4), state


def _pairs(x: Tensor, keys: Tensor, decays: Tensor) -> Tensor:
    """Products of tokens with keys, decayed between them: [..., C, K] twice, [..., C, C, 1 or K] -> [..., C, C]."""
    if decays.shape[-1] == 1:
        return x @ keys.mT * decays[..., 0]
    return (x[..., :, None, :] * keys[..., None, :, :] * decays).sum(-1)


def naive_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for one row, token by token: [L, ...] as above and [H, K, V] -> [L, H, V] and [H, K, V]."""
    query, key = (x.repeat_interleave(value.shape[1] // x.shape[1], 1) for x in (query, key))
    out = []
    for at, (q, k, v) in enumerate(zip(query, key, value, strict=True)):
        state = state * decay[at].exp().view(len(state), -1, 1)
        if beta is not None:
            v = (v - (state * k[..., None]).sum(1)) * beta[at, :, None]
        state = state + k[..., None] * v[:, None]
        out.append((state * q[..., None]).sum(1))
    return torch.stack(out), state
