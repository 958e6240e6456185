"""Ahead-of-time cases of token counts and penalties."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from batchgen.kernels.counts import CountLists, Penalties
from batchgen.kernels.gpu import counts


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    lists = CountLists.empty(16, 256, torch.device("meta"))
    logits = torch.empty(7, 151_936, dtype=torch.float32, device="meta")
    rows = torch.empty(5, dtype=torch.int64, device="meta")
    column = torch.empty(5, dtype=torch.float32, device="meta")
    yield "count_tokens", partial(counts.count_tokens, lists, rows, rows, rows, 100)
    yield (
        "penalise[float32]",
        partial(counts.penalise, logits, rows, rows, lists, Penalties(column, column, column), 100),
    )
