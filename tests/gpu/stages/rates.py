"""The device's measured rates, from which the floors of microbenchmarks are computed."""

from __future__ import annotations

import torch

from tests.gpu.lab import Lab

__all__ = ["measure_rates"]


def measure_rates(lab: Lab) -> dict[str, float]:
    """Measure the lab's `copy_rate` (bytes per second, read plus written) and `matmul_rate` (bfloat16, per second)."""
    size, side = (1 << 16, 64) if lab.toy else (1 << 30, 8192)
    source = torch.zeros(size, dtype=torch.uint8, device=lab.device)
    target = torch.zeros_like(source)
    lab.copy_rate = 2 * size / lab.time(lambda: target.copy_(source)).p50 * 1e6
    a, b = (lab.randn(side, side, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    lab.matmul_rate = 2 * side**3 / lab.time(lambda: torch.matmul(a, b, out=product)).p50 * 1e6
    return {"copy_bytes_per_s": lab.copy_rate, "bfloat16_matmul_per_s": lab.matmul_rate}
