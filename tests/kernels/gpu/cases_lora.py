"""Ahead-of-time cases of the LoRA kernels: every launch that a model can need, on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from batchgen.kernels.gpu.lora import add_lora
from batchgen.kernels.lora import OUTPUT_BLOCK, LoraPairs, LoraStack, LoraStep, LoraTiles

_TOKENS, _INPUTS, _OUTPUTS, _ADAPTERS = 512, 4096, 6144, 3


def _run(dtype: torch.dtype, width: int, rows: int) -> None:
    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    ranks, blocks = _ADAPTERS * width, _OUTPUTS // OUTPUT_BLOCK
    pairs = LoraPairs([None] * _ADAPTERS)
    pairs._stack = LoraStack(
        empty(ranks, _INPUTS), empty(ranks, _OUTPUTS),
        empty(_ADAPTERS, 2, dtype=torch.int32), empty(_ADAPTERS, blocks, 2, dtype=torch.int32), width,
    )  # fmt: skip
    tiles = LoraTiles(empty(_TOKENS, dtype=torch.int64), empty(_TOKENS // rows, 3, dtype=torch.int64), rows)
    add_lora(empty(_TOKENS, _OUTPUTS), empty(_TOKENS, _INPUTS), LoraStep((), tiles), pairs)


def launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """Cases by dtype, the most ranks of a layer's adapters, and the tokens of a tile."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for width in (16, 32, 64):
            for rows in (16, 64):
                name = f"add_lora[{str(dtype).removeprefix('torch.')},ranks={width},rows={rows}]"
                yield name, lambda dtype=dtype, width=width, rows=rows: _run(dtype, width, rows)
