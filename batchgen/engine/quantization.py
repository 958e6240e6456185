"""`--quantization`: what can be quantised here, and whether the model bears it."""

from __future__ import annotations

from typing import Final

from batchgen.config import EngineConfig
from batchgen.errors import UsageError
from batchgen.kernels.layouts import int8_refusal
from batchgen.models.base import Model, ModelSpec
from batchgen.models.native import NativeModel
from batchgen.models.quantize import QuantizationLoss, quantise
from batchgen.text.tokenizer import Tokenizer

__all__ = ["quantize", "refuse_quantization"]

_TEXTS: Final = (
    "The old lighthouse stood at the end of the pier. Every evening the keeper climbed its ninety steps, lit the lamp, "
    "and wrote the weather into a book that nobody else had ever read.",
    "Question: A train leaves at 9:40 and arrives at 13:05. How long does the journey take?\nAnswer: 3 hours and 25 "
    "minutes, because from 9:40 to 12:40 it is three hours, and 25 minutes more to 13:05.",
    'def mean(values: list[float]) -> float:\n    """The average; 0 for none."""\n'
    "    return sum(values) / len(values) if values else 0.0\n",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"], "address": {"city": "London"}}',
)
"""What models read, of several kinds."""


def refuse_quantization(config: EngineConfig, spec: ModelSpec) -> None:
    """Refuse a quantisation that cannot be had here, before a weight is read.

    Raises:
        UsageError: with the reason.
    """
    if config.quantization == "none":
        return
    reason = None
    if spec.implementation != "native":
        reason = f"it is for our own decoder, and a {spec.name} model runs by the transformers library"
    elif config.attention == "torch":
        reason = "it computes by compiled kernels, and `--attention torch` by PyTorch alone"
    else:
        reason = int8_refusal(spec.dtype, spec.device)
    if reason is not None:
        raise UsageError(f"`--quantization {config.quantization}` cannot be had: {reason}; leave the option out")


def quantize(model: Model, config: EngineConfig, tokenizer: Tokenizer) -> QuantizationLoss:
    """Quantise the model in place, and say how far it is from what it was.

    Raises:
        UsageError: that is too far, or it cannot be had.
    """
    refuse_quantization(config, model.spec)
    assert isinstance(model, NativeModel)
    loss = quantise(model, tokenizer.encode(_TEXTS))
    if not loss.divergence <= config.quantization_bound:
        raise UsageError(
            f"`--quantization {config.quantization}` changes this model too much: {loss}, where "
            f"`--quantization-bound` is {config.quantization_bound:g} nats; leave the option out, or raise the bound"
        )
    return loss
