"""The operations of a backend (all but attention): a table of functions that models and the engine call.

A backend is `replace(TORCH_OPS, ...)` with the operations that it computes better: `gpu.ops` (Triton), `cpu.ops` (C++),
`invariant` (batch-invariant). The default of a field is the operation's reference and documents it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from batchgen.kernels import (
    activation,
    counts,
    filtering,
    heads,
    logprobs,
    lora,
    moe,
    noise,
    norm,
    pooled,
    rope,
    sampling,
    shaping,
)
from batchgen.kernels.counts import CountLists, Penalties
from batchgen.kernels.heads import HeadNorms
from batchgen.kernels.layouts import Product
from batchgen.kernels.logprobs import GatheredLogprobs
from batchgen.kernels.lora import LoraPairs, LoraStep
from batchgen.kernels.mixers import conv, linear_attention, selective_scan
from batchgen.kernels.mixers.states import RunBatch
from batchgen.kernels.moe import Experts, Routing
from batchgen.kernels.sampling import SampleResult, SamplingColumns
from batchgen.kernels.types import KVPool


class _Route(Protocol):
    def __call__(self, logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]: ...


class _ApplyBitmask(Protocol):
    def __call__(self, logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> None: ...


class _TokenLogprobs(Protocol):
    def __call__(self, logits: Tensor, tokens: Tensor, normalizers: Tensor | None = None) -> Tensor: ...


class _TopLogprobs(Protocol):
    def __call__(self, logits: Tensor, k: int, normalizers: Tensor | None = None) -> tuple[Tensor, Tensor]: ...


class _Sample(Protocol):
    def __call__(self, logits: Tensor, columns: SamplingColumns, sample_rows: Tensor | None = None) -> SampleResult: ...


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations of a backend. Logits may be of any floating-point dtype unless they are written to."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = norm.rms_norm
    """Root-mean-square norm over the last dimension; see `norm.rms_norm`."""
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] = norm.add_rms_norm
    """Add to the residual in place and return the norm of the sum; see `norm.add_rms_norm`."""
    gated: Callable[[Tensor, str], Tensor] = activation.gated
    """Gated activation, act(gate) * up; see `activation.gated`."""
    rope_tables: Callable[[Tensor, float, Tensor, torch.dtype], tuple[Tensor, Tensor]] = rope.rope_tables
    """Cosines and signed sines of a step's positions; see `rope.rope_tables`."""
    qk_norm_rope_cache: Callable[[Tensor, HeadNorms | None, tuple[Tensor, Tensor], Tensor, Tensor, Tensor], Tensor] = (
        heads.qk_norm_rope_cache
    )
    """Normalise and rotate q and k, store k and v in the paged cache, return q; see `heads.qk_norm_rope_cache`."""
    linear: Product | None = None
    """Product that replaces those of a model's linear layers, such as `matmul.linear`; None: the layers keep theirs."""
    add_lora: Callable[[Tensor, Tensor, LoraStep, LoraPairs], None] = lora.add_lora
    """Add each token's LoRA update to a linear layer's output, in place; see `lora.add_lora`."""
    route: _Route = moe.route
    """Expert ids and weights of each token; see `moe.route`."""
    moe_experts: Callable[[Tensor, Tensor, Tensor, Experts], Tensor] = moe.moe_experts
    """Weighted sum of each token's experts; see `moe.moe_experts`."""
    causal_conv: Callable[[Tensor, Tensor, Tensor | None, Tensor, Sequence[RunBatch], str | None], Tensor] = (
        conv.causal_conv
    )
    """Short convolution of packed rows, which keeps their last inputs; see `conv.causal_conv`."""
    linear_attention: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Sequence[RunBatch]], Tensor] = (
        linear_attention.linear_attention
    )
    """Linear attention of packed rows, which keeps their states; see `linear_attention.linear_attention`."""
    selective_scan: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[RunBatch]], Tensor] = (
        selective_scan.selective_scan
    )
    """Selective scan of packed rows, which keeps their states; see `selective_scan.selective_scan`."""
    count_tokens: Callable[[CountLists, Tensor, Tensor, Tensor, int], None] = counts.count_tokens
    """Count one more token for each of some sequences, in place; see `counts.count_tokens`."""
    penalise: Callable[[Tensor, Tensor, Tensor, CountLists, Penalties, int], None] = counts.penalise
    """Apply repetition, frequency and presence penalties to the counted tokens, in place; see `counts.penalise`."""
    vocab_size: Callable[[Tensor], int] = logprobs.vocab_size
    """Number of tokens of the vocabulary of logits; see `logprobs.vocab_size`."""
    logits_at: Callable[[Tensor, Tensor, Tensor], Tensor] = logprobs.logits_at
    """Logits by row and token; see `logprobs.logits_at`."""
    set_logits: Callable[[Tensor, Tensor, Tensor, Tensor], None] = logprobs.set_logits
    """Set logits by row and token, in place; see `logprobs.set_logits`."""
    replace_rows: Callable[[Tensor, Tensor, Callable[[Tensor], Tensor | None]], Tensor | None] = logprobs.replace_rows
    """Replace some rows of logits by a function of them, in place; see `logprobs.replace_rows`."""
    add_bias: Callable[[Tensor, Tensor, Tensor, Tensor], None] = shaping.add_bias
    """Add biases by row and token, in place; see `shaping.add_bias`."""
    keep_only: Callable[[Tensor, Tensor, Tensor, Tensor], None] = shaping.keep_only
    """Mask whole rows except the given (row, token) pairs, in place; see `shaping.keep_only`."""
    drew_masked: Callable[[Tensor, Tensor, Tensor], Tensor] = shaping.drew_masked
    """Which of some rows drew a masked token; see `shaping.drew_masked`."""
    mask_tokens: Callable[[Tensor, Tensor, Tensor], None] = logprobs.mask_tokens
    """Mask (row, token) pairs, in place; see `logprobs.mask_tokens`."""
    log_normalizers: Callable[[Tensor], Tensor] = logprobs.log_normalizers
    """Log-sum-exp of each row; see `logprobs.log_normalizers`."""
    argmax_lse: Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]] = logprobs.argmax_lse
    """Argmax, largest logit and log-sum-exp of each row, and whether the row cannot be sampled; see
    `logprobs.argmax_lse`."""
    token_logprobs: _TokenLogprobs = logprobs.token_logprobs
    """Log-softmax at one token per row; see `logprobs.token_logprobs`."""
    top_logprobs: _TopLogprobs = logprobs.top_logprobs
    """Ids and log-probabilities of the k most likely tokens of each row; see `logprobs.top_logprobs`."""
    gather_logprobs: Callable[[Tensor, Tensor, int], GatheredLogprobs] = logprobs.gather_logprobs
    """Log-softmax at one token per row, and the k most likely tokens, in one pass; see `logprobs.gather_logprobs`."""
    apply_bitmask: _ApplyBitmask = shaping.apply_bitmask
    """Mask by packed bits, in place; see `shaping.apply_bitmask`."""
    row_keys: Callable[[Tensor, Tensor, Tensor], Tensor] = noise.row_keys
    """Noise keys of the rows' next draws; see `noise.row_keys`."""
    nan_rows: Callable[[Tensor], Tensor] = sampling.nan_rows
    """Which rows cannot be sampled (not-a-number, +inf, or all -inf); see `sampling.nan_rows`."""
    sample: _Sample = sampling.sample
    """Draw one token per row, or per entry of `sample_rows`; see `sampling.sample`."""
    filtered_scores: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = filtering.filtered_scores
    """Scores that each row's token was drawn by; see `filtering.filtered_scores`."""
    copy_pages: Callable[[KVPool, Tensor], None] = pooled.copy_pages
    """Copy positions between pages of the cache, in every layer; see `pooled.copy_pages`."""


TORCH_OPS = Ops()
"""Plain PyTorch, on any device: the reference of every operation."""
