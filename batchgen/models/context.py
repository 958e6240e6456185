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


def longrope_note(config: Mapping[str, Any], context: int) -> str | None:
    """What to say of a model whose rope settings have two sets of factors, of which one is used for all rows.

    transformers takes the short factors for a row that ends within the original context. Here the context decides, so
    that a row does not depend on the others. None if both are the same.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, Mapping) or (rope.get("rope_type") or rope.get("type")) not in ("longrope", "su"):
        return None
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    if type(original) is not int or context <= original:
        return None
    return (
        f"the context of {context} is past the {original} of longrope's short factors: all rows get the long ones, "
        f"also short rows; --max-model-len {original} takes the short ones"
    )
