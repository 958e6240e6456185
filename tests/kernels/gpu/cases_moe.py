"""Ahead-of-time cases of the MoE kernels: every launch that a model can need, on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from batchgen.kernels.chips import GroupedTile, chip_tuning
from batchgen.kernels.gpu.moe import moe_experts, route
from batchgen.kernels.moe import Experts, Gating, Routing

_TOKENS, _HIDDEN, _INNER, _EXPERTS, _CHOSEN = 512, 2048, 768, 64, 8

_GATINGS = {
    "silu": Gating(),
    "gelu": Gating("gelu"),
    "gelu_pytorch_tanh": Gating("gelu_pytorch_tanh"),
    "relu": Gating("relu"),
    "gpt_oss": Gating("quick_gelu", interleaved=True, limit=7.0, shift=1.0),
    "limited": Gating(limit=10.0),
}
_ROUTINGS = {
    "mixtral,E=8": (8, Routing(2), False),
    "qwen3,E=128": (128, Routing(8), False),
    "qwen2,E=60": (60, Routing(4, renormalise=False), False),
    "deepseek_v2,E=160": (160, Routing(6, groups=8, top_groups=3, renormalise=False, scale=16.0), False),
    "deepseek_v3,E=256": (256, Routing(8, "sigmoid", 8, 4, "top2", scale=2.5), True),
    "softmax with a bias,E=64": (64, Routing(6), True),
}


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _experts(dtype: torch.dtype, gating: Gating, tile: GroupedTile) -> None:
    empty = partial(_empty, dtype=dtype)
    gate_up, down = empty(_EXPERTS, 2 * _INNER, _HIDDEN), empty(_EXPERTS, _HIDDEN, _INNER)
    biases: tuple[Tensor | None, Tensor | None] = (None, None)
    if gating.interleaved:  # such models keep their weights transposed
        gate_up, down = (
            empty(_EXPERTS, _HIDDEN, 2 * _INNER).transpose(1, 2),
            empty(_EXPERTS, _INNER, _HIDDEN).transpose(1, 2),
        )
        biases = (empty(_EXPERTS, 2 * _INNER), empty(_EXPERTS, _HIDDEN))
    ids, weights = (
        _empty(_TOKENS, _CHOSEN, dtype=torch.int64),
        _empty(_TOKENS, _CHOSEN, dtype=torch.float32),
    )
    moe_experts(empty(_TOKENS, _HIDDEN), ids, weights, Experts(gate_up, down, *biases, gating), tile)


def _route(dtype: torch.dtype, experts: int, routing: Routing, biased: bool) -> None:
    bias = _empty(experts, dtype=torch.float32) if biased else None
    route(_empty(_TOKENS, experts, dtype=dtype), routing, bias)


def launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """Experts by dtype, gating and tile of the chip compiled for; routing by dtype and the rules of models."""
    tuning = chip_tuning(torch.device("meta"))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        short = str(dtype).removeprefix("torch.")
        for rows, tile in tuning.grouped["float32" if dtype == torch.float32 else "half"].items():
            for name, gating in _GATINGS.items():
                if name in ("silu", "gpt_oss") or (dtype == torch.bfloat16 and rows == 64):
                    yield f"moe_experts[{short},{name},rows={rows}]", partial(_experts, dtype, gating, tile)
        for name, case in _ROUTINGS.items():
            if dtype != torch.float16:
                yield f"route[{short},{name}]", partial(_route, dtype, *case)
