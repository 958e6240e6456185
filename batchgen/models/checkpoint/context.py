"""Context length of a checkpoint, from its configuration and without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.errors import ModelError

_MAX_FACTOR = 1e6
_SCALING = ("yarn", "linear", "dynamic", "llama3", "longrope")


@dataclass(frozen=True, slots=True)
class Contexts:
    """Context lengths of a model, in tokens."""

    default: int
    longest: int
    """Most that `--max-model-len` may ask for: what the rope settings scale the context to."""
    unscaled: int | None = None
    """Of rope settings with two sets of frequencies (longrope, dynamic): most positions of the first one."""
    can_scale: bool = True
    """Whether other rope settings would make it longer."""

    def chosen(self, requested: int | None) -> int:
        """The context of a job that asks for `requested` tokens.

        Raises:
            ModelError: the model has fewer positions.
        """
        if requested is None or requested <= self.longest:
            return requested or self.default
        factor, base = math.ceil(requested / self.longest), self.longest
        scaling = f'{{"rope_type": "yarn", "factor": {factor}, "original_max_position_embeddings": {base}}}'
        raise ModelError(
            f"--max-model-len {requested} is past the model's context of {self.longest}. Give less"
            f"{f', or scale it: --rope-scaling {scaling!r}' if self.can_scale else ''}."
        )

    def unscaled_of(self, context: int) -> int | None:
        """`unscaled`, if a context is longer."""
        return self.unscaled if self.unscaled is not None and context > self.unscaled else None


def contexts_of(model_type: str, longest: int, rope: Mapping[str, Any], original: int | None = None) -> Contexts:
    """Contexts of a model whose rope settings may scale a shorter one.

    The default is that of vLLM: `yarn` reaches its original context times its factor, `linear` the configured one times
    its factor. `llama3` and `longrope` checkpoints name the scaled context, as Gemma 3 ones do, and `dynamic` is left
    at the configured one. With `--max-model-len` these, too, reach the original context times the factor.

    Args:
        model_type: `model_type` of the configuration.
        longest: its `max_position_embeddings`.
        rope: its rope settings.
        original: its own `original_max_position_embeddings`, which has precedence over that of the settings.
    """
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    named = original or rope.get("original_max_position_embeddings")
    base = named if type(named) is int and kind not in ("linear", "dynamic") else longest
    unscaled = base if kind in ("longrope", "dynamic") else None
    if kind not in _SCALING or not isinstance(factor, int | float) or "gemma3" in model_type:
        return Contexts(longest, longest, unscaled)
    if not 0 < factor < _MAX_FACTOR:
        return Contexts(longest, longest, unscaled)
    scaled = max(longest, int(base * factor))
    # A configured context that is shorter than the unscaled one is meant.
    default = scaled if kind in ("yarn", "linear") and longest >= base else longest
    return Contexts(default, scaled, unscaled)
