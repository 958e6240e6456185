"""A logit processor that the tests' rows name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def boost(logits: Tensor, rows: Sequence[Any]) -> Tensor:
    """Raise one token's logit, more with each output token; lower that of the prompt's first token."""
    for i, row in enumerate(rows):
        logits[i, row.params["token"]] += row.params["by"] * (1 + len(row.output_ids)) / 4
        if len(row.prompt_ids):
            logits[i, row.prompt_ids[0]] -= 2.0
    return logits
