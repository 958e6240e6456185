"""The numbers of a job's linear layers, and `--quantization int8`, whose loss is checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from batchgen.config.engine_config import EngineConfig
from batchgen.engine.machine import step_limits
from batchgen.engine.memory.offload import device_total
from batchgen.errors import UsageError
from batchgen.kernels.layouts import int8_is_faster, int8_refusal
from batchgen.kernels.measure import ProductStep, WeightSize, device_timer, grouped_weights_pay
from batchgen.kernels.quantization import FP8, INT4, INT8
from batchgen.kernels.vocab_parallel import WORD
from batchgen.models.base import Form, Model, ModelInput, ModelSpec, Numbers
from batchgen.models.check import CheckedModel
from batchgen.models.library.probe import ProbeAttention
from batchgen.models.native.decoder import NativeModel
from batchgen.models.native.own_integers import stored_sizes, weight_forms
from batchgen.text.tokens.tokenizer import Tokenizer

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
_RANDOM_SHAPE: Final = (4, 48)
"""(sequences, tokens each) of random ids for the comparison."""
_MAX_TOKENS: Final = 128
"""Maximum number of tokens of a text for the comparison."""
_DECODE_STEPS: Final = 16.0
"""Steps of a job that only decode, for each of its steps that is full of prompts: outputs of some hundred tokens."""
_FITS: Final = 0.9
"""Share of a GPU's free memory that weights may take."""


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


def choose_numbers(config: EngineConfig, checked: CheckedModel, spec: ModelSpec) -> Numbers:
    """The numbers of a checked model's linear layers, chosen before its weights are read.

    `auto` keeps the numbers that a checkpoint stores where products of them are measured to be at least as fast as
    others: on a CPU those of a checkpoint that is made for products of integers, on a GPU those of few bits. On a GPU
    it keeps them, too, if dequantised weights do not fit. For `--deterministic`, whose bits no timing may change,
    nothing is measured; on a GPU weights are dequantised then.

    Raises:
        UsageError: the quantisation is not supported here.
    """
    if config.quantization == "int8":
        _refuse_int8(config, spec)
        return Numbers("int8", "fixed")  # full weights are multiplied only a few times, so measuring does not pay
    form = "full" if config.quantization == "none" else _kept_form(config, checked, spec)
    if config.offload != "none" and spec.device.type == "cpu":
        return Numbers("full", "plain")  # so that results do not depend on which blocks are streamed
    return Numbers(form, "torch" if config.attention == "torch" else "fixed" if config.deterministic else "measured")


def _kept_form(config: EngineConfig, checked: CheckedModel, spec: ModelSpec) -> Form:
    if checked.native is None or config.attention == "torch":
        return "full"
    layout, folder = checked.native[1], checked.folder
    if spec.device.type == "cuda":
        forms, schemes = weight_forms(layout, folder), {(8, True): FP8, (8, False): INT8, (4, False): INT4}
        sizes = Counter(WeightSize(f.outer, f.inner, f.size, schemes[f.bits, f.floats]) for f in forms)
        return "weight-only" if sizes and not config.deterministic and _pays(sizes, config, spec) else "full"
    # A checkpoint made for products of integers has a description that rounds the inputs of its layers, too.
    if folder.quantisation is None or not folder.quantisation.integer_inputs:
        return "full"
    if int8_refusal(spec.dtype, spec.device) is not None or not stored_sizes(layout, folder, "integers"):
        return "full"
    return "integers" if config.deterministic or int8_is_faster(spec.dtype) else "full"


def _refuse_int8(config: EngineConfig, spec: ModelSpec) -> None:
    reason = None
    if spec.implementation != "native":
        reason = f"it needs the native decoder, but a {spec.name} model runs with the transformers library"
    elif config.offload != "none":
        reason = "`--offload` keeps weights in their own numbers"
    elif config.attention == "torch":
        reason = "it needs compiled kernels, but `--attention torch` only uses PyTorch"
    else:
        reason = int8_refusal(spec.dtype, spec.device)
    if reason is not None:
        raise UsageError(f"`--quantization {config.quantization}` is not supported: {reason}; leave the option out")


def _pays(sizes: Mapping[WeightSize, int], config: EngineConfig, spec: ModelSpec) -> bool:
    """Whether stored numbers are worth keeping on a GPU."""
    if spec.parameters * spec.dtype.itemsize > _FITS * device_total(config, spec.device):
        return True
    rows, tokens = step_limits(config, spec)
    step = ProductStep(spec.device, spec.dtype, device_timer(spec.device))
    pays = grouped_weights_pay(sizes, [(rows, _DECODE_STEPS), (tokens, 1.0)], step)
    torch.cuda.empty_cache()  # weights are read into it next
    return pays


def describe_weights(model: Model, loss: QuantizationLoss | None) -> str | None:
    """The products of a model in stored numbers or int8, for the footer; None for a model without such."""
    stored = model.stored_products if isinstance(model, NativeModel) else 0
    if loss is not None:
        own = f", {stored} layers in the checkpoint's own integers" if stored else ""
        return f"compiled int8{own} ({loss})"
    if not stored:
        return None
    if model.spec.device.type == "cuda":
        return f"triton over the checkpoint's own numbers of {stored} layers"
    return f"compiled int8 of {stored} layers in the checkpoint's own integers"


def quantize(model: Model, config: EngineConfig, tokenizer: Tokenizer) -> QuantizationLoss:
    """Quantise the model in place; returns the measured loss.

    Raises:
        UsageError: the loss is too large.
    """
    assert isinstance(model, NativeModel)
    loss = quantize_in_place(model, tokenizer.encode(_TEXTS))
    if not loss.divergence <= config.quantization_bound:
        raise UsageError(
            f"`--quantization {config.quantization}` changes this model too much: {loss}, but "
            f"`--quantization-bound` is {config.quantization_bound:g} nats; leave the option out or raise the bound"
        )
    return loss


def quantize_in_place(model: NativeModel, texts: Sequence[Sequence[int]]) -> QuantizationLoss:
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
    states, spec = model.hidden(ModelInput(ids, torch.arange(len(ids)), ProbeAttention())), model.spec
    return spec.ranks.whole(model.logits(states).float(), spec.vocab_size, WORD).log_softmax(-1)
