"""`TaskHeads`: makes embeddings and scores of a row's states, on the host and in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchgen.errors import ErrorCode, ModelError, RowError
from batchgen.models.checkpoint.folder import ModelFolder
from batchgen.models.checkpoint.safetensors_header import read_header
from batchgen.models.checkpoint.weights import WeightReader
from batchgen.models.embed.files import head_labels
from batchgen.request.tasks import Mode, SentenceFiles

Floats = npt.NDArray[np.float32]
Step = Callable[[Tensor], Tensor]

_LEAST_NORM: Final = 1e-12
"""Norm below which vectors are not made longer."""


def _pooled(mode: Mode, states: Tensor, tokens: int) -> Tensor:
    """[P, H] states of all tokens, or [1, H] what is already pooled, -> [H]."""
    if mode == "max":
        return states.amax(0)
    if mode == "weightedmean":
        weights = torch.arange(1.0, len(states) + 1)
        return weights @ states / weights.sum()
    if mode in ("mean", "mean_sqrt_len_tokens"):
        return states.mean(0) * (tokens**0.5 if mode == "mean_sqrt_len_tokens" else 1.0)
    return states[0 if mode == "cls" else -1]


class TaskHeads:
    """What follows the model in rows that return an embedding or scores.

    Args:
        files: how embeddings are made.
        folder: the checkpoint with the weights; None: there are none.

    Raises:
        ModelError: weights are missing or cannot be read.
    """

    def __init__(self, files: SentenceFiles, folder: ModelFolder | None = None) -> None:
        self._modes, self._normalize = files.modes, files.normalize
        self._dense: list[Step] = []
        for place, _, activation in files.dense:
            held, _ = read_header(place / "model.safetensors")
            self._dense += [
                _linear(_read(held, {name: name for name in held}), "linear"),
                _activation(activation, place),
            ]
        self._config = {} if folder is None else folder.config
        self._labels = head_labels(self._config)
        self._head = _head(folder) if folder is not None and self._labels else []

    @torch.inference_mode()
    def embedding(self, states: Floats, tokens: int, dimensions: int | None) -> Floats:
        """[P, H] states, or what they are already pooled to, -> [E], or the first `dimensions` of them.

        Args:
            states: as the row returns them.
            tokens: number of its tokens, P.
            dimensions: how many leading numbers to keep; a norm is that of these.

        Raises:
            RowError: `nan_logits`: they are not finite.
        """
        rows = torch.from_numpy(states)
        x = torch.cat([_pooled(mode, rows, tokens) for mode in self._modes])
        for step in self._dense:
            x = step(x)
        x = x[:dimensions]
        return _finite(x / x.norm().clamp_min(_LEAST_NORM) if self._normalize else x)

    @torch.inference_mode()
    def scores(self, states: Floats, *, rerank: bool) -> list[tuple[str, float]]:
        """[1, H] the state that the head reads -> (label, score) of each label.

        Scores are those of a pipeline of transformers, or of a cross encoder of sentence-transformers for `rerank`.

        Raises:
            RowError: `nan_logits`: they are not finite.
        """
        x = torch.from_numpy(states[0])
        for step in self._head:
            x = step(x)
        scores = _finite(self._ranked(x) if rerank else self._classified(x))
        return list(zip(self._labels, scores.tolist(), strict=True))

    def _classified(self, logits: Tensor) -> Tensor:
        kind = self._config.get("problem_type")
        if kind == "regression":
            return logits
        alone = len(logits) == 1 or kind == "multi_label_classification"
        return logits.sigmoid() if alone else logits.softmax(-1)

    def _ranked(self, logits: Tensor) -> Tensor:
        about = self._config.get("sentence_transformers")
        named = about.get("activation_fn") if isinstance(about, dict) else None
        named = named or self._config.get("sbert_ce_default_activation_function") or "Sigmoid"
        return _activation(str(named).rpartition(".")[2], "config.json")(logits)


def _finite(values: Tensor) -> Floats:
    if not torch.isfinite(values).all():
        raise RowError(ErrorCode.NAN_LOGITS, "the model's states are not finite numbers; try --dtype float32")
    made: Floats = values.numpy()
    return made


def _linear(weights: Mapping[str, Tensor], name: str) -> Step:
    return partial(F.linear, weight=weights[f"{name}.weight"], bias=weights.get(f"{name}.bias"))


def _activation(name: str, place: object) -> Step:
    """A function by the name of its class in `torch.nn`."""
    cls = getattr(nn, name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        problem = f"{place} names the activation {name[:80]!r}, which torch.nn does not have"
        raise ModelError(f"{problem}. Use another model.")
    made: Step = cls()
    return made


def _read(held: Any, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors by the name they have here, given their stored names."""
    with WeightReader(held) as reader:
        return {name: reader.read(stored, torch.float32).float() for name, stored in names.items()}


_HEADS: Final = (
    (("pooler.dense", "Tanh"), ("classifier", "")),
    (("head.dense", "GELU"), ("head.norm", ""), ("classifier", "")),
    (("classifier.dense", "Tanh"), ("classifier.out_proj", "")),
    (("pre_classifier", "ReLU"), ("classifier", "")),
    (("score", ""),),
)
"""Classification heads, each by its layers' names and the function behind each of them, a class of `torch.nn`."""
_SET: Final = {"gelu": "GELU", "relu": "ReLU", "tanh": "Tanh"}


def has_known_head(folder: ModelFolder) -> bool:
    """Whether a checkpoint has a classification head, and one that is known here."""
    return bool(head_labels(folder.config)) and bool(_known(folder)[0])


def _known(folder: ModelFolder) -> tuple[tuple[tuple[str, str], ...], dict[str, str]]:
    """The layers of its head, and the stored names of their tensors, in any outer scope but that of blocks."""
    outer = [name for name in folder.tensors if name.count(".") <= 3]
    for steps in _HEADS:
        ends = [f"{layer}.{kind}" for layer, _ in steps for kind in ("weight", "bias")]
        found = {end: name for name in outer for end in ends if f".{name}".endswith(f".{end}")}
        if all(f"{layer}.weight" in found for layer, _ in steps):
            return steps, found
    return (), {}


def _head(folder: ModelFolder) -> list[Step]:
    steps, names = _known(folder)
    weights, made = _read(folder.tensors, names), list[Step]()
    for layer, function in steps:
        if layer == "head.norm":
            scale, bias = weights[f"{layer}.weight"], weights.get(f"{layer}.bias")
            eps = float(folder.config.get("norm_eps", 1e-5))
            made.append(partial(F.layer_norm, normalized_shape=scale.shape, weight=scale, bias=bias, eps=eps))
        else:
            made.append(_linear(weights, layer))
        if layer == "head.dense":
            named = str(folder.config.get("classifier_activation", "gelu"))
            function = _SET.get(named, named)
        if function:
            function = "GELU" if folder.model_type == "electra" else function
            made.append(_activation(function, folder.path))
    return made
