"""Short causal convolution, one filter a channel. Its state is the last K inputs of a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.mixers.states import RunBatch


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batches: Sequence[RunBatch], activation: str | None
) -> Tensor:
    """Convolve the rows of a step, and keep their last inputs.

    Args:
        x: [T, C] inputs.
        weight: [C, K] filters: the last number belongs to a token itself.
        bias: [C].
        states: [P, K, C] the last inputs, oldest first; written.
        batches: the step's runs.
        activation: "silu" or "swish", or None for none.

    Returns:
        [T, C] in the inputs' dtype; sums are in the weight's.
    """
    out = torch.empty_like(x)
    for batch in batches:
        seen = _seen(x, weight.shape[1], states, batch)
        values = F.conv1d(seen.to(weight.dtype).transpose(1, 2), weight[:, None], bias, groups=len(weight))
        values = values.transpose(1, 2)
        batch.put(out, values if activation is None else F.silu(values))
    return out


def recent_inputs(x: Tensor, width: int, states: Tensor, batches: Sequence[RunBatch]) -> Tensor:
    """The last K inputs of each token of a step, oldest first: [T, C] -> [T, K, C]; states as in `causal_conv`."""
    out = x.new_empty(len(x), width, x.shape[1])
    for batch in batches:
        batch.put(out, _seen(x, width, states, batch).unfold(1, width, 1).transpose(2, 3))
    return out


def _seen(x: Tensor, width: int, states: Tensor, batch: RunBatch) -> Tensor:
    """[B, K - 1 + L, C] inputs of runs, and those before them; keeps the last ones."""
    last = states[batch.sources]  # [B, K, C]
    if batch.slots is None:
        return last
    seen = torch.cat([last, x[batch.rows].to(last.dtype)], 1)
    at = batch.lengths[:, None] + torch.arange(width, device=x.device)  # [B, K]
    batch.keep(states, seen.take_along_dim(at[:, :, None], 1))
    return seen[:, 1:]


def naive_causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same for one row, token by token, without an activation: [L, C], [C, K], [C], [K, C] -> [L, C], [K, C]."""
    out = []
    for token in x:
        state = torch.cat([state[1:], token[None]])
        out.append((state * weight.T).sum(0) + (0 if bias is None else bias))
    return torch.stack(out), state
