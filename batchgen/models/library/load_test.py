"""Test of a loaded library model: logits of packed steps, at first and at late positions, against the library's own.

Two sequences run in two steps, each in two chunks and in another order, so that state other than keys and values,
positions counted from a step's shape, and tokens that see those of another sequence show.
"""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from batchgen.kernels.ops import Ops
from batchgen.kernels.ranks import Ranks
from batchgen.models.base import Model, ModelInput, ModelSpec
from batchgen.models.library.probe import ProbeAttention

_TOKENS: Final = 7
_SPLIT: Final = 2
"""Tokens of the first chunk of a sequence."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Logits of the library's own model."""

    ids: Tensor
    """[7] int64: tokens of each sequence."""
    starts: tuple[int, ...]
    """First position of each sequence."""
    logits: tuple[Tensor, ...]
    """[7, V] float32 of each sequence: this rank's columns."""

    def to(self, device: torch.device) -> Expected:
        """The same on another device."""
        return Expected(self.ids.to(device), self.starts, tuple(each.to(device) for each in self.logits))

    def difference(self, model: Model, ops: Ops) -> float:
        """Relative difference of a token's logits: the maximum over tokens in float32, the median in lower precision.

        The largest of all sequences.
        """
        probe, got = ProbeAttention(), [torch.empty(0)] * len(self.starts)
        probe.starts = self.starts
        first = [(i, 0, _SPLIT) for i in range(len(self.starts))]
        last = [(i, _SPLIT, _TOKENS) for i in reversed(range(len(self.starts)))]
        for step in (first, last):
            probe.parts = tuple((i, end - start) for i, start, end in step)
            ids = torch.cat([self.ids[start:end] for _, start, end in step])
            at = [torch.arange(start, end, device=ids.device) + self.starts[i] for i, start, end in step]
            states = probe.states.on(ids.device, len(ids))
            inputs = ModelInput(ids, torch.cat(at), probe, ops=ops, states=states)
            logits = model.logits(model.hidden(inputs)).float()
            rows = torch.split(logits, [end - start for _, start, end in step])
            for (i, start, _), part in zip(step, rows, strict=True):
                got[i] = part if start == 0 else torch.cat((got[i], part))
        errors = [_relative(one, other, model.spec.ranks) for one, other in zip(got, self.logits, strict=True)]
        return max(float(e.median() if model.spec.dtype != torch.float32 else e.max()) for e in errors)


def _relative(got: Tensor, expected: Tensor, ranks: Ranks) -> Tensor:
    """[7]: relative differences, of the columns of all ranks together."""
    squares = ranks.sum(torch.stack([x.square().sum(-1) for x in (got - expected, expected)]))  # [2, 7]
    errors: Tensor = squares[0].sqrt() / squares[1].sqrt().clamp_min(1e-6)
    return errors


def library_logits(model: Any, spec: ModelSpec) -> Expected:
    """Logits of an unchanged library model, at the first positions and, if it can be asked, at the last ones."""
    ids = (torch.arange(_TOKENS, device=spec.device) * 7919 + 13) % spec.vocab_size  # [7]
    early = model(input_ids=ids[None], use_cache=False).logits[0].float()  # [7, V]
    start, keyword = spec.context_length - _TOKENS, cache_keyword(model)
    if start > 0 and keyword is not None:
        with contextlib.suppress(Exception):  # it may need another kind of cache
            past = {keyword: _late_cache(start, spec.num_layers)}
            late = model(input_ids=ids[None], use_cache=True, **past).logits[0].float()
            return Expected(ids, (0, start), (early, late))
    return Expected(ids, (0, 0), (early, early))


def cache_keyword(module: Any) -> str | None:
    """Name of the argument of a module's forward that takes the library's cache; None if it takes none."""
    names = inspect.signature(module.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), None)


def _late_cache(start: int, layers: int) -> Any:
    """A cache of the library that says that `start` tokens came before, and holds none of them."""
    from transformers.cache_utils import Cache, DynamicLayer  # the library is slow to import

    class _Late(DynamicLayer):  # type: ignore[misc]
        def get_seq_length(self, *_: Any) -> int:
            return start + int(super().get_seq_length())

        def get_mask_sizes(self, query: Any) -> tuple[int, int]:
            new = query if isinstance(query, int) else query.shape[0]
            return int(super().get_seq_length()) + new, start

    return Cache(layers=[_Late() for _ in range(layers)])
