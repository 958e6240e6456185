"""`--quantization`: quantises a model and checks that it does not change too much."""

from __future__ import annotations

from typing import Final

from batchgen.config.engine_config import EngineConfig
from batchgen.errors import UsageError
from batchgen.kernels.layouts import int8_is_faster, int8_refusal
from batchgen.models.base import Model, ModelSpec
from batchgen.models.check import CheckedModel
from batchgen.models.native import NativeModel
from batchgen.models.own_integers import Weights, count_integers, has_integer_inputs
from batchgen.models.quantize import QuantizationLoss, quantise
from batchgen.text.tokenizer import Tokenizer

_TEXTS: Final = (
    "The old lighthouse stood at the end of the pier. Every evening the keeper climbed its ninety steps, lit the lamp, "
    "and wrote the weather into a book that nobody else had ever read.",
    "Question: A train leaves at 9:40 and arrives at 13:05. How long does the journey take?\nAnswer: 3 hours and 25 "
    "minutes, because from 9:40 to 12:40 it is three hours, and 25 minutes more to 13:05.",
    'def mean(values: list[float]) -> float:\n    """The average; 0 for none."""\n'
    "    return sum(values) / len(values) if values else 0.0\n",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"], "address": {"city": "London"}}',
)
"""Sample texts of several kinds, on which the quantisation loss is measured."""


def computed_weights(config: EngineConfig, checked: CheckedModel, spec: ModelSpec) -> Weights:
    """How the weights of a checked model are computed, before they are read.

    `auto` keeps the integers of a checkpoint that is made for products of integers, where those products are measured
    to be at least as fast as others. Nothing is measured for `--deterministic`, whose bits no timing may change.
    """
    if config.quantization != "auto":
        return config.quantization
    if checked.native is None or config.attention == "torch" or not has_integer_inputs(checked.folder):
        return "none"
    if int8_refusal(spec.dtype, spec.device) is not None or not count_integers(checked.native[1], checked.folder):
        return "none"
    return "stored" if config.deterministic or int8_is_faster(spec.dtype) else "none"


def describe_weights(model: Model, loss: QuantizationLoss | None) -> str | None:
    """The products of a model in integers, for the footer; None for a model without such."""
    stored = model.stored_products if isinstance(model, NativeModel) else 0
    if loss is not None:
        own = f", {stored} layers in the checkpoint's own integers" if stored else ""
        return f"compiled int8{own} ({loss})"
    return f"compiled int8 of {stored} layers in the checkpoint's own integers" if stored else None


def refuse_quantization(config: EngineConfig, spec: ModelSpec) -> None:
    """Reject a quantisation that is not supported here, before the weights are read.

    Raises:
        UsageError: with the reason.
    """
    if config.quantization != "int8":
        return
    reason = None
    if spec.implementation != "native":
        reason = f"it needs the native decoder, but a {spec.name} model runs with the transformers library"
    elif config.attention == "torch":
        reason = "it needs compiled kernels, but `--attention torch` only uses PyTorch"
    else:
        reason = int8_refusal(spec.dtype, spec.device)
    if reason is not None:
        raise UsageError(f"`--quantization {config.quantization}` is not supported: {reason}; leave the option out")


def quantize(model: Model, config: EngineConfig, tokenizer: Tokenizer) -> QuantizationLoss:
    """Quantise the model in place; returns the measured loss.

    Raises:
        UsageError: the loss is too large, or the quantisation is not supported here.
    """
    refuse_quantization(config, model.spec)
    assert isinstance(model, NativeModel)
    loss = quantise(model, tokenizer.encode(_TEXTS))
    if not loss.divergence <= config.quantization_bound:
        raise UsageError(
            f"`--quantization {config.quantization}` changes this model too much: {loss}, but "
            f"`--quantization-bound` is {config.quantization_bound:g} nats; leave the option out or raise the bound"
        )
    return loss
