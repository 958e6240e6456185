"""Ahead-of-time cases of the gated activations: every formula in every dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from batchgen.kernels.gpu.activation import gated

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAMES = ("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu")
"""The other names are aliases of these formulas."""


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype in DTYPES:
        gate_up = torch.empty(7, 2 * 3072, dtype=dtype, device="meta")
        for name in NAMES:
            yield f"gated[{str(dtype).removeprefix('torch.')},{name}]", partial(gated, gate_up, name)
