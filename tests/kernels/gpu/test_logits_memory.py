"""Kernels that read logits read them once and never copy them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from batchgen.kernels.gpu import logprobs as gpu
from batchgen.kernels.gpu import top
from batchgen.kernels.gpu.launch import recording


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [out] if isinstance(out, Tensor) else [t for t in out if isinstance(t, Tensor)]
        self.numbers = max([self.numbers, *(t.numel() for t in made)])
        return out


CALLS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "argmax_lse": lambda logits, tokens: gpu.argmax_lse(logits),
    "log_normalizers": lambda logits, tokens: gpu.log_normalizers(logits),
    "token_logprobs": lambda logits, tokens: gpu.token_logprobs(logits, tokens),
    "top_logprobs": lambda logits, tokens: gpu.top_logprobs(logits, 20),
    "gather_logprobs": lambda logits, tokens: gpu.gather_logprobs(logits, tokens, 20),
    "gather_logprobs of targets": lambda logits, tokens: gpu.gather_logprobs(logits, tokens, 0),
    "largest": lambda logits, tokens: top.largest(logits, 20),
}


@pytest.mark.parametrize("name", CALLS)
def test_logits_are_read_once_and_never_copied(name: str) -> None:
    logits = torch.empty(64, 151_936, dtype=torch.bfloat16, device="meta")
    tokens = torch.empty(64, dtype=torch.int64, device="meta")
    scans: list[int] = []

    def note(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        if kernel.__name__ == "_scan_kernel":
            scans.append(grid[0])

    with Largest() as largest, recording(note):
        CALLS[name](logits, tokens)
    assert scans == [64 * 38]
    assert largest.numbers <= logits.numel() // 16
