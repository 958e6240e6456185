"""Ahead-of-time cases of top-k: every capacity for k, in every dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from batchgen.kernels.gpu import top

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VOCAB = 151_936
"""Wide enough for groups; rows without groups use the same kernels."""


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for room in top.GROUPS:
            logits = torch.empty(7, VOCAB, dtype=dtype, device="meta")
            yield f"largest[{name},k={room}]", partial(top.largest, logits, room)
