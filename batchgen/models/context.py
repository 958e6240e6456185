"""Context length of a checkpoint, from its configuration and without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MAX_FACTOR = 1e6


def scaled_context(model_type: str, longest: int, rope: Mapping[str, Any], original: int | None = None) -> int:
    """Most positions of a model whose rope settings may scale a shorter context, by vLLM's rule.

    `yarn` reaches its original context times its factor, `linear` the configured one times its factor. `llama3` and
    `longrope` checkpoints name the scaled context, as Gemma 3 ones do. `dynamic` is left at the configured context:
    past it, frequencies depend on a row's length.

    Args:
        model_type: `model_type` of the configuration.
        longest: its `max_position_embeddings`.
        rope: its rope settings.
        original: its own `original_max_position_embeddings`, which has precedence over that of the settings.
    """
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    if kind not in ("yarn", "linear") or not isinstance(factor, int | float) or "gemma3" in model_type:
        return longest
    if not 0 < factor < _MAX_FACTOR:
        return longest
    base = longest
    if kind == "yarn":
        named = original or rope.get("original_max_position_embeddings")
        base = named if type(named) is int else longest
    return max(longest, int(base * factor)) if longest >= base else longest  # less than unscaled is meant
