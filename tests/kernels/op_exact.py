"""Exact results of the operations of `Ops` and of other launchers, by their formulas, from arguments in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from batchgen.kernels.counts import CountLists, Penalties
from batchgen.kernels.heads import HeadNorms
from batchgen.kernels.logprobs import GatheredLogprobs
from batchgen.kernels.lora import LoraPairs, LoraStep
from batchgen.kernels.merge import PartLists
from batchgen.kernels.mixers.conv import naive_causal_conv
from batchgen.kernels.mixers.linear_attention import naive_linear_attention
from batchgen.kernels.mixers.selective_scan import naive_selective_scan
from batchgen.kernels.mixers.states import RunBatch
from batchgen.kernels.moe import Experts, Routing
from batchgen.kernels.moe import route as plain_route


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm(x + delta, weight, eps)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    x, up = gate_up.chunk(2, -1)
    if activation == "relu":
        return x.clamp(min=0) * up
    if activation == "gelu":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2))) * up
    if activation in ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) * up
    return x / (1 + torch.exp((-1.702 if activation == "quick_gelu" else -1.0) * x)) * up


def heads(
    qkv: Tensor, norms: HeadNorms | None, tables: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, slots: Tensor
) -> Tensor:
    q, k, v = qkv.split([qkv.shape[1] - 2 * keys.shape[2], *[keys.shape[2]] * 2], 1)
    if norms is not None:
        q, k = norm(q, norms.query, norms.eps), norm(k, norms.key, norms.eps)
    q, k = (x * tables[0] + x.roll(x.shape[-1] // 2, -1) * tables[1] for x in (q, k))
    keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots] = k, v
    return q


def rope(inv_freq: Tensor, scale: float, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Angles are float32 products, as in the models' code."""
    angles = (positions[:, None].float() * inv_freq.float()).double()[:, None]
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.einsum("ti,oi->to", x, weight) + bias


def lse(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1)


def argmax(logits: Tensor) -> tuple[Tensor, ...]:
    largest = logits.amax(-1)
    return logits.argmax(-1), largest, logits.logsumexp(-1), ~largest.isfinite()


def tokens(logits: Tensor, tokens: Tensor, normalizers: Tensor | None) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def top(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return ids[:, :k], values[:, :k] - logits.logsumexp(-1)[:, None]


def gather(logits: Tensor, targets: Tensor, k: int) -> Any:
    return GatheredLogprobs(logits.logsumexp(-1), tokens(logits, targets, None), *top(logits, k))


def bias(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    added = values.new_zeros(logits.numel()).scatter_add_(0, rows * logits.shape[1] + ids, values)
    logits += added.view_as(logits)


def penalise(logits: Tensor, rows: Tensor, slots: Tensor, lists: CountLists, penalties: Penalties, width: int) -> None:
    each = (x.tolist() for x in (rows, slots.clamp(min=0), *penalties))
    for row, slot, r, f, p in zip(*each, strict=True):
        ids, counts = (x[slot, : int(lists.used[slot])] for x in (lists.ids, lists.counts))
        old = logits[row, ids.long()]
        logits[row, ids.long()] = torch.where(old > 0, old / r, old * r) - f * counts - p * (counts > 0)


def lora(out: Tensor, x: Tensor, step: LoraStep, pairs: LoraPairs) -> None:
    """One token after the other, by the adapter's dense matrix."""
    for segment in step.segments:
        pair = pairs[segment.adapter]
        if pair is not None:
            dense = pair.up @ pair.down
            for token in range(len(x)) if segment.rows is None else segment.rows.tolist():
                out[token] += dense @ x[token]


def route(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    ids = plain_route(logits.float(), routing, None if bias is None else bias.float())[0]
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    weights = scores.gather(-1, ids.long())
    return ids, (weights / weights.sum(-1, keepdim=True) if routing.renormalise else weights) * routing.scale


def experts(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """One expert after the other, in float64."""
    out = torch.zeros_like(x)
    for expert, (up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
        token, place = torch.where(ids == expert)
        both = x[token] @ up.T + (0.0 if experts.gate_up_bias is None else experts.gate_up_bias[expert])
        made = experts.gating(both) @ down.T + (0.0 if experts.down_bias is None else experts.down_bias[expert])
        out.index_add_(0, token, made * weights[token, place, None])
    return out


def parts(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, dtype: torch.dtype, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _merged(torch.stack((out_a, out_b)), torch.stack((lse_a, lse_b)), sinks)


def lists(part_out: Tensor, part_lse: Tensor, lists: PartLists, out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    for token, start, count in zip(lists.tokens.tolist(), lists.starts.tolist(), lists.counts.tolist(), strict=True):
        if token >= 0:
            chosen = lists.parts[start : start + count].long()
            out[token], lse[token] = _merged(part_out[chosen], part_lse[chosen], sinks)


def _merged(values: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge [n, ..., N, D] values and [n, ..., N] log-sum-exps over the first dimension, in float64."""
    total = lse.logsumexp(0) if len(lse) else lse.new_full(lse.shape[1:], -math.inf)
    joined = total if sinks is None else torch.logaddexp(total, sinks.expand_as(total))
    weights = torch.where(lse == -torch.inf, 0.0, (lse - joined).exp())[..., None]
    return torch.where(weights > 0, weights * values, 0.0).sum(0), total


def conv_runs(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batches: list[RunBatch], activation: str | None
) -> Tensor:
    """Short convolution, token by token."""

    def run(rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return naive_causal_conv(x[rows], weight, bias, state)

    def again(rows: Tensor, state: Tensor) -> Tensor:
        return (state * weight.T).sum(0, keepdim=True) + (0 if bias is None else bias)

    out = _by_run(torch.empty_like(x), states, batches, run, again)
    return out if activation is None else torch.nn.functional.silu(out)


def linear_attention_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    states: Tensor,
    batches: list[RunBatch],
) -> Tensor:
    """Linear attention, token by token."""

    def run(rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        share = None if beta is None else beta[rows]
        return naive_linear_attention(query[rows], key[rows], value[rows], decay[rows], share, state)

    def again(rows: Tensor, state: Tensor) -> Tensor:
        return torch.einsum("hkv,lhk->lhv", state, query[rows].repeat_interleave(len(state) // query.shape[1], 1))

    return _by_run(torch.empty_like(value), states, batches, run, again)


def scan_runs(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor, batches: list[RunBatch]
) -> Tensor:
    """Selective scan, token by token."""

    def run(rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return naive_selective_scan(x[rows], dt[rows], a, b[rows], c[rows], state)

    def again(rows: Tensor, state: Tensor) -> Tensor:
        return c[rows] @ state.T

    return _by_run(torch.empty_like(x), states, batches, run, again)


def _by_run(
    out: Tensor,
    states: Tensor,
    batches: list[RunBatch],
    run: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    again: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Fill `out` and `states` run by run; `again`: a token whose state is stored."""
    for batch in batches:
        before = states.clone()  # no run reads what another one of its round writes
        for number, (rows, length, source) in enumerate(zip(batch.rows, batch.lengths, batch.sources, strict=True)):
            rows = rows[: int(length)]
            if batch.slots is None:
                out[rows] = again(rows, before[source])
                continue
            out[rows], after = run(rows, before[source])
            if (slot := int(batch.slots[number])) > 0:
                states[slot] = after
    return out
