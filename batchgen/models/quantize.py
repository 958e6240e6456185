"""Quantization of a native model to int8, and its effect on the next-token distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from batchgen.models.base import ModelInput
from batchgen.models.library.probe import ProbeAttention
from batchgen.models.native.decoder import NativeModel

_RANDOM_SHAPE: Final = (4, 48)
"""(sequences, tokens each) of random ids for the comparison."""
_MAX_TOKENS: Final = 128
"""Maximum number of tokens of a text for the comparison."""


@dataclass(frozen=True, slots=True)
class QuantizationLoss:
    """Difference of the next-token distributions of the full and the quantized model."""

    divergence: float
    """Kullback-Leibler divergence of the quantized from the full model, in nats, averaged over positions."""
    agreement: float
    """Fraction of positions with the same most likely token."""
    positions: int
    """Number of positions compared."""

    def __str__(self) -> str:
        same = f"the same likeliest token at {self.agreement:.1%} of {self.positions} positions"
        return f"{self.divergence:.2g} nats from the full weights' distributions, {same}"


def quantise(model: NativeModel, texts: Sequence[Sequence[int]]) -> QuantizationLoss:
    """Quantize a model's linear layers and head to int8, in place.

    Peak memory is the weights, a second copy of one layer, and the log-probabilities of the compared positions.

    Args:
        model: the full model, on a CPU.
        texts: token ids of texts to compare, in addition to some random ids.

    Returns:
        The difference to the full model.
    """
    vocab, longest = model.spec.vocab_size, min(_MAX_TOKENS, model.spec.context_length)
    generator = torch.Generator().manual_seed(0)
    count, length = _RANDOM_SHAPE
    random_ids = torch.randint(vocab, (count, min(length, longest)), generator=generator)
    known = ([token for token in ids[:longest] if token < vocab] for ids in texts)  # a tokenizer may have more
    sequences = [*random_ids, *(torch.tensor(ids) for ids in known if ids)]
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
