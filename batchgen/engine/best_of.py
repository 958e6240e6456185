"""`best_of`: which of a prompt's samples are kept, and under which index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from batchgen.request import Completion

__all__ = ["keep_best"]


def keep_best(
    samples: Sequence[tuple[float, Completion]], keep: int, cached_tokens: Callable[[int], int]
) -> list[Completion]:
    """The `keep` samples with the highest mean logprob, best first, renumbered from 0.

    Args:
        samples: (mean logprob of its tokens, sample), all of one prompt, without errors. Equal means keep the order of
            the samples' indexes.
        keep: how many.
        cached_tokens: what a sample's `cached_tokens` are under its new index.

    Returns:
        The kept ones; the first says how many tokens the others had (`dropped_tokens`).
    """
    ranked = [sample for _, sample in sorted(samples, key=lambda pair: (-pair[0], pair[1].sample_index))]
    kept = [replace(s, sample_index=i, cached_tokens=cached_tokens(i)) for i, s in enumerate(ranked[:keep])]
    dropped = sum(sample.completion_tokens or 0 for sample in ranked[keep:])
    return [replace(kept[0], dropped_tokens=dropped), *kept[1:]]
