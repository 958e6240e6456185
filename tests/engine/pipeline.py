"""Reference of the logits pipeline, row by row: processed logits, sampling and both kinds of logprobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchgen.request.fields.params import SamplingParams
from tests.engine.reference import eager_model
from tests.kernels.references import filtered_distribution

Floats = npt.NDArray[np.float32]
Processor = Callable[[Floats, Sequence[int], Sequence[int]], Floats]


def processed_logits(
    logits: Floats,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    scope: str = "output",
    stops: Sequence[int] = (),
    processor: Processor | None = None,
) -> Floats:
    """[V] processed logits before the sampling filters, from the model's logits [V] after `prompt` and `output`.

    `stops` are masked until `min_new_tokens`. Bad words are lists of ids.
    """
    values = logits.astype(np.float32).copy()
    counts = Counter(output)
    seen = set(output) | (set(prompt) if scope == "prompt+output" else set())
    r = np.float32(params.repetition_penalty)
    for token in seen:
        values[token] = values[token] / r if values[token] > 0 else values[token] * r
    for token, count in counts.items():
        values[token] -= np.float32(params.frequency_penalty * count)
        values[token] -= np.float32(params.presence_penalty)
    for token, bias in params.logit_bias:
        values[token] += np.float32(bias)
    if processor is not None:
        values = processor(values, prompt, output)
    for word in params.bad_words:
        if len(word) == 1 or list(output[1 - len(word) :]) == list(word[:-1]):
            values[word[-1]] = -np.inf
    values[list(params.suppress_tokens)] = -np.inf
    if params.allowed_token_ids is not None:
        masked = np.full_like(values, -np.inf)
        kept = list(params.allowed_token_ids)
        masked[kept] = values[kept]
        values = masked
    early = [*(stops if len(output) < params.min_new_tokens else ()), *(() if output else params.begin_suppress_tokens)]
    if early:
        held = values.copy()
        held[early] = -np.inf
        values = held if np.isfinite(held).any() else values
    return values


def distribution(values: Floats, params: SamplingParams) -> npt.NDArray[np.float64]:
    """[V] probabilities of the distribution sampled from."""
    if params.greedy:
        weights = np.exp(values.astype(np.float64) - float(values.max()))
        return weights / weights.sum()
    return filtered_distribution(values, params.temperature, params.top_k, params.top_p, params.min_p)


@dataclass(frozen=True, slots=True)
class Position:
    """Reference distributions of one output token."""

    token: int
    logits: Floats
    """[V] logits of the model"""
    raw: npt.NDArray[np.float64]
    """[V] log-softmax of the model's logits"""
    values: Floats
    """[V] processed logits"""
    processed: npt.NDArray[np.float64]
    """[V] logs of the probabilities sampled from"""


class Oracle:
    """transformers' eager model in float32, evaluated on finished outputs."""

    def __init__(self, folder: Path) -> None:
        self._model = eager_model(folder)

    def positions(self, prompt: list[int], output: list[int], params: SamplingParams, **how: Any) -> list[Position]:
        """Every output token with its distributions, given the tokens before it."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :].float()
        raw = logits.double().log_softmax(-1).numpy()
        found = []
        for i, token in enumerate(output):
            values = processed_logits(logits[i].numpy(), prompt, output[:i], params, **how)
            with np.errstate(divide="ignore"):
                found.append(Position(token, logits[i].numpy(), raw[i], values, np.log(distribution(values, params))))
        return found
