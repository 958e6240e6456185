"""Selective scan of Mamba-1: every channel has a state [N], whose numbers decay by themselves.

s = exp(dt A) s + dt x B, and a token's result is s C. Source: Mamba (arXiv:2312.00752).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from batchgen.kernels.mixers.states import RunBatch

CHUNK: Final = 16
"""Tokens whose decays are in memory at the same time."""


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor, batches: Sequence[RunBatch]
) -> Tensor:
    """Compute the rows of a step, and keep their states.

    Args:
        x: [T, C] inputs.
        dt: [T, C] lengths of a token's step, at least 0.
        a: [C, N] decays of a step of length 1, at most 0.
        b: [T, N] shares of an input that a state takes.
        c: [T, N] shares of a state that a result takes.
        states: [P, C, N] float32; written.
        batches: the step's runs.

    Returns:
        [T, C] float32.
    """
    out = torch.empty_like(x, dtype=torch.float32)
    a = a.float()
    for batch in batches:
        state, rows = states[batch.sources], batch.rows  # [B, C, N]
        if batch.slots is None:
            batch.put(out, (state @ c[rows].float().mT).mT)
            continue
        steps = dt[rows].float()
        if (padding := batch.padding) is not None:  # a step of length 0 changes no state
            steps = steps.masked_fill(padding[..., None], 0)
        values = steps.new_empty(steps.shape)
        for at in range(0, rows.shape[1], CHUNK):
            part = slice(at, at + CHUNK)
            tokens, step = rows[:, part], steps[:, part]
            decays = (step[..., None] * a).exp()  # [B, L, C, N]
            taken = (step * x[tokens].float())[..., None] * b[tokens].float()[:, :, None]
            reads = c[tokens].float()[..., None]  # [B, L, N, 1]
            for i in range(tokens.shape[1]):
                state = torch.addcmul(taken[:, i], decays[:, i], state)
                values[:, at + i] = (state @ reads[:, i])[..., 0]
        batch.keep(states, state)
        batch.put(out, values)
    return out


def naive_selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for one row, token by token: [L, C] twice, [C, N], [L, N] twice and [C, N] -> [L, C] and [C, N]."""
    out = []
    for at in range(len(x)):
        state = state * (dt[at, :, None] * a).exp() + (dt[at] * x[at])[:, None] * b[at]
        out.append((state * c[at]).sum(1))
    return torch.stack(out), state
