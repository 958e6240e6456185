"""Ahead-of-time cases of biases and masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from batchgen.kernels.gpu import shaping


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    logits = torch.empty(7, 151_936, dtype=torch.float32, device="meta")
    pairs = torch.empty(5, dtype=torch.int64, device="meta")
    numbers = torch.empty(5, dtype=torch.float32, device="meta")
    yield "add_bias[float32]", partial(shaping.add_bias, logits, pairs, pairs, numbers)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        typed = torch.empty(7, 151_936, dtype=dtype, device="meta")
        yield f"keep_only[{name}]", partial(shaping.keep_only, typed, pairs, pairs, pairs)
        yield f"drew_masked[{name}]", partial(shaping.drew_masked, typed, pairs, pairs)
