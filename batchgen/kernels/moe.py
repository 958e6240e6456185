"""Mixture of experts: routing of tokens to experts, and the experts' computation.

out[t] = sum over j: weights[t, j] * expert(ids[t, j])(x[t]), where expert e(x) = down_e gate(gate_up_e x).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.activation import ACTIVATIONS


@dataclass(frozen=True, slots=True)
class Routing:
    """Rule by which a router's logits choose experts."""

    experts_per_token: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    """Number of equal groups that the experts are divided into; experts come from the best `top_groups` groups only."""
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    """A group's score: its best expert's, or the sum of its best two."""
    renormalise: bool = True
    """Whether a token's weights are normalised to sum to 1, before `scale`."""
    scale: float = 1.0

    def check(self, experts: int) -> None:
        """Assert that this rule fits the number of experts."""
        each, left = divmod(experts, self.groups)
        assert not left
        assert 0 < self.top_groups <= self.groups
        assert 0 < self.experts_per_token <= each * self.top_groups
        assert self.group_score == "max" or each > 1 or self.groups == 1

    def by_logit(self, biased: bool) -> bool:
        """Whether logits can be compared instead of scores: they have the same order and no scores are summed."""
        return not biased and (self.groups == 1 or self.group_score == "max")


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose each token's experts, best first, the lower id of equal ones.

    Args:
        logits: [T, E], any float dtype.
        routing: the rule.
        bias: [E] float32, added to the scores for the choice only.

    Returns:
        ids [T, k] int32 and weights [T, k] float32, those of the chosen scores.
    """
    routing.check(logits.shape[1])
    logits = logits.float()
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()  # [T, E]
    choice = logits if routing.by_logit(bias is not None) else scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = choice.reshape(len(choice), routing.groups, -1)  # [T, G, E / G]
        ranked = grouped.sort(dim=-1, descending=True).values
        value = ranked[..., 0] if routing.group_score == "max" else ranked[..., 0] + ranked[..., 1]  # [T, G]
        best = value.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
        allowed = torch.zeros_like(value, dtype=torch.bool).scatter_(1, best, True)
        choice = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.experts_per_token]  # [T, k]
    weights = scores.gather(1, ids)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.int(), weights * routing.scale


@dataclass(frozen=True, slots=True)
class Gating:
    """An expert's gated activation: activation(min(gate, limit)) * (clamp(up, -limit, limit) + shift)."""

    activation: str = "silu"
    """One of `ACTIVATIONS`."""
    interleaved: bool = False
    """Order gate_0, up_0, gate_1, up_1, ...; else all of gate, then all of up."""
    limit: float | None = None
    shift: float = 0.0

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[..., 2I] -> [..., I]."""
        if self.interleaved:
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        else:
            gate, up = gate_up.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return ACTIVATIONS[self.activation](gate) * (up + self.shift if self.shift else up)


@dataclass(frozen=True, slots=True)
class Experts:
    """Weights of a layer's experts, in any memory order: transposed weights may be transposed views."""

    gate_up: Tensor
    """[E, 2I, H]"""
    down: Tensor
    """[E, H, I]"""
    gate_up_bias: Tensor | None = None
    """[E, 2I]"""
    down_bias: Tensor | None = None
    """[E, H]"""
    gating: Gating = Gating()


@dataclass(frozen=True, slots=True)
class ExpertPairs:
    """Low-rank changes of a layer's experts: A [E, r, inputs] and B [E, outputs, r], scale included; None: none."""

    gate_up: tuple[Tensor, Tensor] | None = None
    down: tuple[Tensor, Tensor] | None = None


def moe_experts(
    x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, pairs: ExpertPairs = ExpertPairs()
) -> Tensor:
    """Compute each token's experts and their weighted sum.

    Args:
        x: [T, H], in the weights' dtype.
        ids: [T, k] int32 or int64; ids outside of [0, E) add nothing.
        weights: [T, k], any float dtype.
        experts: of the layer.
        pairs: changes of the experts.

    Returns:
        [T, H] in x's dtype; sums over a token's experts in float32.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)  # [T, H]
    for expert in range(len(experts.down)):
        token, place = torch.where(ids == expert)  # [n], [n]
        if len(token) == 0:
            continue
        bias = None if experts.gate_up_bias is None else experts.gate_up_bias[expert]
        gate_up = F.linear(x[token], experts.gate_up[expert], bias)  # [n, 2I]
        inner = experts.gating(_changed(gate_up, x[token], pairs.gate_up, expert))  # [n, I]
        bias = None if experts.down_bias is None else experts.down_bias[expert]
        made = _changed(F.linear(inner, experts.down[expert], bias), inner, pairs.down, expert)  # [n, H]
        out.index_add_(0, token, made.float() * weights[token, place, None].float())
    return out.to(x.dtype)


def _changed(out: Tensor, x: Tensor, pair: tuple[Tensor, Tensor] | None, expert: int) -> Tensor:
    """An expert's product with its low-rank change."""
    return out if pair is None else out + F.linear(F.linear(x, pair[0][expert]), pair[1][expert])
