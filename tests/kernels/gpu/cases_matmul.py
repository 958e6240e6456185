"""Ahead-of-time cases of the batch-invariant products, with the tiles of the chip compiled for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from batchgen.kernels.gpu.matmul import batched_matmul, linear

SHAPES = ((1024, 1024), (2048, 1024), (1024, 4096), (4096, 4096), (1024, 6144), (4096, 28672), (1024, 151_936))
"""Inputs and outputs of layers of 0.6B and 8B models, and of an output head."""


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        empty = partial(torch.empty, dtype=dtype, device="meta")
        for inputs, outputs in SHAPES if dtype == torch.bfloat16 else SHAPES[2:5]:
            x, weight = empty(256, inputs), empty(outputs, inputs)
            yield f"linear[{name},I={inputs},O={outputs}]", partial(linear, x, weight)
        x, weight = empty(256, 1024), empty(1024, 4096)
        yield f"linear[{name},bias]", partial(linear, x, weight.view(4096, 1024), empty(4096))
        yield f"linear[{name},transposed weight]", partial(linear, x, weight.T)
        yield f"linear[{name},odd sizes]", partial(linear, empty(256, 100), empty(1000, 100))
        yield f"batched_matmul[{name}]", partial(batched_matmul, empty(16, 256, 128), empty(16, 128, 512))
        yield f"batched_matmul[{name},transposed]", partial(batched_matmul, empty(16, 9, 64), empty(16, 512, 64).mT)
