"""The model seam: tokens of one step in, hidden states and logits out. Knows nothing of requests or sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from batchgen.kernels.types import Attention, LayerKV

__all__ = ["Model", "ModelInput", "ModelSpec"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the engine must know of a model before it runs."""

    name: str
    """`model_type` of its configuration."""
    implementation: str
    """"native" or "transformers"."""
    vocab_size: int
    """Width of the logits, V (may exceed the tokenizer's)."""
    hidden_size: int
    num_layers: int
    context_length: int
    """`max_position_embeddings`, rope scaling included."""
    kv_layers: tuple[LayerKV, ...]
    dtype: torch.dtype
    device: torch.device
    parameters: int
    digest: str
    """sha256 over configuration, weight files' names, sizes and headers, and samples of the weights: enters the run's
    fingerprint."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Tensors of one step, packed without padding."""

    input_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64"""
    attention: Attention


class Model(Protocol):
    """A decoder behind the seam."""

    @property
    def spec(self) -> ModelSpec:
        """Sizes and identity."""
        ...

    def hidden(self, inputs: ModelInput) -> Tensor:
        """States after the final norm, [T, H] in the model's dtype."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] float32."""
        ...
