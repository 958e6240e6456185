"""Batch-invariant `Ops` in plain PyTorch: a row's result depends on that row only, bit for bit.

Operations over whole rows of logits process one row per call, so that their sums cannot depend on other rows. A model's
layers get tiles of a fixed number of tokens (`models.deterministic`), for which PyTorch's own operations are
deterministic; the operations here would split a tile's tokens into groups of other sizes or between threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels import activation, filtering, logprobs, moe, sampling
from batchgen.kernels.logprobs import GatheredLogprobs
from batchgen.kernels.lora import LoraPair, LoraPairs, LoraStep
from batchgen.kernels.moe import Experts
from batchgen.kernels.ops import TORCH_OPS
from batchgen.kernels.sampling import SampleResult, SamplingColumns

_SERIAL = 1 << 15
"""Tensors with fewer elements than this are computed by one thread, whose vectors then start at row boundaries."""
_EXPERT_ROWS = 16
"""Tokens per product of an expert."""


def _gated(gate_up: Tensor, name: str) -> Tensor:
    """See `activation.gated`. Few rows at a time, as threads would cut rows and compute the cut ends differently."""
    if torch.get_num_threads() <= 2:
        return activation.gated(gate_up, name)
    rows = max(1, (_SERIAL - 1) // (gate_up.shape[1] // 2))
    return torch.cat([activation.gated(part, name) for part in torch.split(gate_up, rows)])


def _add_lora(out: Tensor, x: Tensor, step: LoraStep, pairs: LoraPairs) -> None:
    """See `lora.add_lora`. Applies every adapter to all of the tile's tokens and keeps its own tokens' results."""
    for segment in step.segments:
        pair: LoraPair | None = pairs[segment.adapter]
        if pair is None:
            continue
        change = F.linear(F.linear(x, pair.down), pair.up)  # [T, O]
        if segment.rows is None:
            out += change
        else:
            out[segment.rows] += change[segment.rows]


def _moe_experts(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """See `moe.moe_experts`. Each expert computes its tokens in batches of 16, the last padded with zeros."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)  # [T, H]
    for expert in range(len(experts.down)):
        token, place = torch.where(ids == expert)  # [n], [n]
        for first in range(0, len(token), _EXPERT_ROWS):
            some = slice(first, first + _EXPERT_ROWS)
            rows = x.new_zeros(_EXPERT_ROWS, x.shape[1])
            rows[: len(token[some])] = x[token[some]]
            one = torch.arange(_EXPERT_ROWS)[:, None]
            made = moe.moe_experts(rows, torch.zeros_like(one), torch.ones_like(one), _single_expert(experts, expert))
            out[token[some]] += made[: len(token[some])].float() * weights[token[some], place[some], None].float()
    return out.to(x.dtype)


def _single_expert(experts: Experts, number: int) -> Experts:
    def part(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[number : number + 1]

    one = slice(number, number + 1)
    biases = part(experts.gate_up_bias), part(experts.down_bias)
    return Experts(experts.gate_up[one], experts.down[one], *biases, experts.gating)


def _log_normalizers(logits: Tensor) -> Tensor:
    """See `logprobs.log_normalizers`."""
    return _by_row(logprobs.log_normalizers, logits)


def _argmax_lse(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `logprobs.argmax_lse`."""
    largest = logits.amax(dim=-1).float()
    return logits.argmax(dim=-1), largest, _log_normalizers(logits), ~torch.isfinite(largest)


def _token_logprobs(logits: Tensor, tokens: Tensor, normalizers: Tensor | None = None) -> Tensor:
    """See `logprobs.token_logprobs`."""
    return logprobs.token_logprobs(logits, tokens, _log_normalizers(logits) if normalizers is None else normalizers)


def _top_logprobs(logits: Tensor, k: int, normalizers: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `logprobs.top_logprobs`."""
    return logprobs.top_logprobs(logits, k, _log_normalizers(logits) if normalizers is None else normalizers)


def _gather_logprobs(logits: Tensor, targets: Tensor, k: int) -> GatheredLogprobs:
    """See `logprobs.gather_logprobs`."""
    return logprobs.gather_logprobs(logits, targets, k, _log_normalizers(logits))


def _sample(logits: Tensor, columns: SamplingColumns, sample_rows: Tensor | None = None) -> SampleResult:
    """See `sampling.sample`."""
    return sampling.sample(logits, columns, sample_rows, rows_at_once=1)


def _filtered_scores(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, drawn: Tensor
) -> Tensor:
    """See `filtering.filtered_scores`."""
    return _by_row(filtering.filtered_scores, logits, temperature, top_k, top_p, min_p, drawn)


def _by_row(operation: Callable[..., Tensor], *columns: Tensor) -> Tensor:
    """Apply the operation to one row at a time of tensors [R, ...]."""
    if len(columns[0]) <= 1:
        return operation(*columns)
    parts = zip(*(torch.split(column, 1) for column in columns), strict=True)
    return torch.cat([operation(*part) for part in parts])


INVARIANT_OPS = replace(
    TORCH_OPS,
    gated=_gated,
    add_lora=_add_lora,
    moe_experts=_moe_experts,
    log_normalizers=_log_normalizers,
    argmax_lse=_argmax_lse,
    token_logprobs=_token_logprobs,
    top_logprobs=_top_logprobs,
    gather_logprobs=_gather_logprobs,
    sample=_sample,
    filtered_scores=_filtered_scores,
)
"""PyTorch's operations, those that sum over a row or a batch replaced."""
