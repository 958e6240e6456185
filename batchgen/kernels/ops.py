"""The operations that the models and the engine are built from, as one object that a backend chooses.

Two modules are such objects: `torch_ops` (plain PyTorch, on any device, and the oracle) and `gpu.ops` (Triton). What
each operation computes is written at its plain version, in the file named beside it here.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from batchgen.kernels.counts import CountLists
from batchgen.kernels.logprobs import ReadOut
from batchgen.kernels.lora import LoraPairs, LoraStep
from batchgen.kernels.moe import Experts, Routing
from batchgen.kernels.sampling import SampleResult, SamplingColumns

__all__ = ["Ops"]


class Ops(Protocol):
    """Tensors in, tensors out. Logits may be of any floating-point dtype where nothing is written to them."""

    # norm.py
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm of the last dimension."""
        ...

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The residual sum, in place, and its norm."""
        ...

    # activation.py
    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """An activation by name times the other half."""
        ...

    # rope.py
    def rope_tables(
        self, inv_freq: Tensor, scale: float, positions: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of a step's positions."""
        ...

    # heads.py
    def rotate_and_store(
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
        """Normalised and rotated queries; keys and values go to the paged cache."""
        ...

    # lora.py
    def add_lora(self, out: Tensor, x: Tensor, step: LoraStep, pairs: LoraPairs) -> None:
        """Each token's adapter's change of a linear layer, in place."""
        ...

    # moe.py
    def route(self, logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Each token's experts and their weights."""
        ...

    def moe_experts(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        """Each token through its experts."""
        ...

    # counts.py
    def count_tokens(self, lists: CountLists, slots: Tensor, rows: Tensor, tokens: Tensor, width: int) -> None:
        """One token more in each of some sequences' lists, in place."""
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
        """The three penalties on what stands in sequences' lists, in place."""
        ...

    # shaping.py
    def add_bias(self, logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
        """Biases by row and token, in place."""
        ...

    def keep_only(self, logits: Tensor, whole: Tensor, rows: Tensor, ids: Tensor) -> None:
        """Mask whole rows but for the pairs named, in place."""
        ...

    def drew_masked(self, logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        """Which of some rows drew a token that is masked."""
        ...

    # logprobs.py
    def mask_tokens(self, logits: Tensor, rows: Tensor, ids: Tensor) -> None:
        """Mask pairs of row and token, in place."""
        ...

    def log_normalizers(self, logits: Tensor) -> Tensor:
        """Log of the sum of exponentials of each row."""
        ...

    def argmax_lse(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Each row's largest: its id, logit and normaliser, and whether nothing can be drawn from the row."""
        ...

    def token_logprobs(self, logits: Tensor, tokens: Tensor, normalizers: Tensor | None = None) -> Tensor:
        """Log-softmax at one token per row."""
        ...

    def top_logprobs(self, logits: Tensor, k: int, normalizers: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The k most likely tokens of each row and their log-probabilities."""
        ...

    def read_out(self, logits: Tensor, targets: Tensor, k: int) -> ReadOut:
        """The log-softmax at one token per row, and the k most likely, from one reading."""
        ...

    # bitmask.py
    def apply_bitmask(self, logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> None:
        """Mask by packed bits, in place."""
        ...

    # noise.py
    def row_keys(self, seeds: Tensor, sample_indexes: Tensor, positions: Tensor) -> Tensor:
        """Keys of the rows' next draws."""
        ...

    # sampling.py
    def nan_rows(self, logits: Tensor) -> Tensor:
        """Rows that nothing can be drawn from."""
        ...

    def sample(self, logits: Tensor, columns: SamplingColumns, sample_rows: Tensor | None = None) -> SampleResult:
        """One token per row, or per one of `sample_rows`."""
        ...

    # filtering.py
    def filtered_scores(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, drawn: Tensor
    ) -> Tensor:
        """The scores that a row's token is drawn by."""
        ...
