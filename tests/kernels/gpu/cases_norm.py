"""Ahead-of-time cases of the norm kernels: widths of real models, in every dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from batchgen.kernels.gpu.norm import add_rms_norm, rms_norm

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (576, 1024, 2048, 4096, 8192, 16384)
"""Hidden sizes; every size up to the largest uses the tile of the next power of 2."""


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for width in WIDTHS:
            x, delta = (torch.empty(7, width, dtype=dtype, device="meta") for _ in range(2))
            weight = torch.empty(width, dtype=dtype, device="meta")
            yield f"rms_norm[{name},H={width}]", partial(rms_norm, x, weight, 1e-6)
            yield f"add_rms_norm[{name},H={width}]", partial(add_rms_norm, x, delta, weight, 1e-6)
        heads = torch.empty(7, 48, 128, dtype=dtype, device="meta")[:, :32]
        yield f"rms_norm[{name},heads,D=128]", partial(rms_norm, heads, heads[0, 0], 1e-6)
