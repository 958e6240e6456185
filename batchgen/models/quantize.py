"""A native model with its products in int8, and what that costs it: logits held against the full model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from batchgen.models.base import ModelInput
from batchgen.models.native import NativeModel
from batchgen.models.probe import ProbeAttention

__all__ = ["QuantizationLoss", "quantise"]

_RANDOM: Final = (4, 48)
"""Sequences of random ids, and their tokens."""
_LONGEST: Final = 128
"""Tokens of a given sequence that are looked at."""


@dataclass(frozen=True, slots=True)
class QuantizationLoss:
    """How far the next-token distributions of two models are apart."""

    divergence: float
    """Kullback-Leibler divergence of the quantised from the full model, in nats, averaged over positions."""
    agreement: float
    """Share of positions with the same likeliest token."""
    positions: int
    """Positions looked at."""

    def __str__(self) -> str:
        same = f"the same likeliest token at {self.agreement:.1%} of {self.positions} positions"
        return f"{self.divergence:.2g} nats from the full weights' distributions, {same}"


def quantise(model: NativeModel, texts: Sequence[Sequence[int]]) -> QuantizationLoss:
    """Turn a model's linear layers and its head into int8.

    Peak memory: the weights and one layer's once more, beside the log-probabilities of the positions looked at.

    Args:
        model: the full model, on a CPU.
        texts: token ids of text; some random ids are looked at beside them.

    Returns:
        What it has lost.
    """
    vocab, longest = model.spec.vocab_size, min(_LONGEST, model.spec.context_length)
    generator = torch.Generator().manual_seed(0)
    count, length = _RANDOM
    drawn = torch.randint(vocab, (count, min(length, longest)), generator=generator)
    known = ([token for token in ids[:longest] if token < vocab] for ids in texts)  # a tokenizer may have more
    sequences = [*drawn, *(torch.tensor(ids) for ids in known if ids)]
    full = [_log_probs(model, ids) for ids in sequences]
    model.quantise()
    divergence = agreement = positions = 0.0
    for ids, expected in zip(sequences, full, strict=True):
        got = _log_probs(model, ids)
        divergence += float((expected.exp() * (expected - got)).sum())
        agreement += float((got.argmax(-1) == expected.argmax(-1)).sum())
        positions += len(ids)
    return QuantizationLoss(divergence / positions, agreement / positions, int(positions))


def _log_probs(model: NativeModel, ids: Tensor) -> Tensor:
    """[T] -> [T, V] float32."""
    states = model.hidden(ModelInput(ids, torch.arange(len(ids)), ProbeAttention()))
    return model.logits(states).float().log_softmax(-1)
