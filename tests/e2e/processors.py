"""A logit processor for rows that name one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["lean"]


def lean(logits: Tensor, rows: Sequence[Any]) -> Tensor:
    """Towards one token, the more so the longer the row; away from the prompt's first."""
    for i, row in enumerate(rows):
        logits[i, row.params["token"]] += row.params["by"] * (1 + len(row.output_ids)) / 4
        if len(row.prompt_ids):
            logits[i, row.prompt_ids[0]] -= 2.0
    return logits
