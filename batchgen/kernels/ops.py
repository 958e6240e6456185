"""The interface of the operations (all but attention) that models and the engine call, implemented by each backend.

Modules implement it: `torch_ops` (plain PyTorch, on any device, the reference), `gpu.ops` (Triton), `cpu.ops` (C++) and
their `deterministic_ops`. The PyTorch implementation, in the file named above each group, documents the operation.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from batchgen.kernels.counts import CountLists
from batchgen.kernels.logprobs import GatheredLogprobs
from batchgen.kernels.lora import LoraPairs, LoraStep
from batchgen.kernels.moe import Experts, Routing
from batchgen.kernels.sampling import SampleResult, SamplingColumns

__all__ = ["Ops"]


class Ops(Protocol):
    """The operations of a backend. Logits may be of any floating-point dtype unless they are written to."""

    # norm.py
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension."""
        ...

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add to the residual in place and return the norm of the sum."""
        ...

    # activation.py
    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """Gated activation: act(gate) * up."""
        ...

    # rope.py
    def rope_tables(
        self, inv_freq: Tensor, scale: float, positions: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of a step's positions."""
        ...

    # heads.py
    def qk_norm_rope_cache(
        self,
        qkv: Tensor,
        heads: int,
        kv_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """Normalise and rotate q and k, store k and v in the paged cache, return q."""
        ...

    # lora.py
    def add_lora(self, out: Tensor, x: Tensor, step: LoraStep, pairs: LoraPairs) -> None:
        """Add each token's LoRA update to a linear layer's output, in place."""
        ...

    # moe.py
    def route(self, logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Expert ids and weights of each token."""
        ...

    def moe_experts(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        """Weighted sum of each token's experts."""
        ...

    # counts.py
    def count_tokens(self, lists: CountLists, slots: Tensor, rows: Tensor, tokens: Tensor, width: int) -> None:
        """Count one more token for each of some sequences, in place."""
        ...

    def penalise(
        self,
        logits: Tensor,
        rows: Tensor,
        slots: Tensor,
        lists: CountLists,
        repetition: Tensor,
        frequency: Tensor,
        presence: Tensor,
        width: int,
    ) -> None:
        """Apply repetition, frequency and presence penalties to the counted tokens, in place."""
        ...

    # shaping.py
    def add_bias(self, logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
        """Add biases by row and token, in place."""
        ...

    def keep_only(self, logits: Tensor, whole: Tensor, rows: Tensor, ids: Tensor) -> None:
        """Mask whole rows except the given (row, token) pairs, in place."""
        ...

    def drew_masked(self, logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        """Which of some rows drew a masked token."""
        ...

    # logprobs.py
    def mask_tokens(self, logits: Tensor, rows: Tensor, ids: Tensor) -> None:
        """Mask (row, token) pairs, in place."""
        ...

    def log_normalizers(self, logits: Tensor) -> Tensor:
        """Log-sum-exp of each row."""
        ...

    def argmax_lse(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Argmax, largest logit and log-sum-exp of each row, and whether the row cannot be sampled."""
        ...

    def token_logprobs(self, logits: Tensor, tokens: Tensor, normalizers: Tensor | None = None) -> Tensor:
        """Log-softmax at one token per row."""
        ...

    def top_logprobs(self, logits: Tensor, k: int, normalizers: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Ids and log-probabilities of the k most likely tokens of each row."""
        ...

    def gather_logprobs(self, logits: Tensor, targets: Tensor, k: int) -> GatheredLogprobs:
        """Log-softmax at one token per row, and the k most likely tokens, in one pass."""
        ...

    # bitmask.py
    def apply_bitmask(self, logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> None:
        """Mask by packed bits, in place."""
        ...

    # noise.py
    def row_keys(self, seeds: Tensor, sample_indexes: Tensor, positions: Tensor) -> Tensor:
        """Noise keys of the rows' next draws."""
        ...

    # sampling.py
    def nan_rows(self, logits: Tensor) -> Tensor:
        """Which rows cannot be sampled (not-a-number, +inf, or all -inf)."""
        ...

    def sample(self, logits: Tensor, columns: SamplingColumns, sample_rows: Tensor | None = None) -> SampleResult:
        """Draw one token per row, or per entry of `sample_rows`."""
        ...

    # filtering.py
    def filtered_scores(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, drawn: Tensor
    ) -> Tensor:
        """Scores that each row's token was drawn by."""
        ...
