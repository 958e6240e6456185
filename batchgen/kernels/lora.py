"""Low-rank changes of a linear layer, each row of the step by its own adapter.

out[t] += (x[t] A_a^T) B_a^T for the adapter a of token t, the adapter's scale folded into B. Tokens without one are
not touched; a step without any costs nothing, because nobody calls this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

__all__ = ["LoraPair", "LoraPairs", "LoraSegment", "LoraStep", "add_lora"]


@dataclass(frozen=True, slots=True)
class LoraPair:
    """One adapter's change of one linear layer."""

    down: Tensor
    """A [r, I]"""
    up: Tensor
    """B [O, r], scale included"""


@dataclass(frozen=True, slots=True)
class LoraSegment:
    """The tokens of a step that go through one adapter."""

    adapter: int
    """Index into a layer's `LoraPairs`."""
    rows: Tensor | None
    """[t] int64, ascending; None: every token of the step"""


LoraStep = Sequence[LoraSegment]
"""A step's segments; no token is in two of them."""
LoraPairs = Sequence[LoraPair | None]
"""A layer's pairs by adapter; None where an adapter leaves the layer as it is."""


def add_lora(out: Tensor, x: Tensor, step: LoraStep, pairs: LoraPairs) -> None:
    """Add every segment's change to `out` in place.

    Args:
        out: [T, O] the layer's product with `x`; may be a view with gaps between its rows.
        x: [T, I], in the pairs' dtype.
        step: which tokens go through which adapter.
        pairs: the layer's, by adapter.
    """
    for segment in step:
        pair = pairs[segment.adapter]
        if pair is None:
            continue
        if segment.rows is None:
            out += F.linear(F.linear(x, pair.down), pair.up)  # [T, O]
        else:
            out.index_add_(0, segment.rows, F.linear(F.linear(x[segment.rows], pair.down), pair.up))
