"""The device's measured rates, from which the floors of microbenchmarks are computed."""

from __future__ import annotations

import torch

from tests.gpu.device import Gpu


def measure_rates(gpu: Gpu) -> dict[str, float]:
    """Measure the gpu's `copy_rate` (bytes per second, read plus written) and `matmul_rate` (bfloat16, per second)."""
    size, side = (1 << 16, 64) if gpu.toy else (1 << 30, 8192)
    source = torch.zeros(size, dtype=torch.uint8, device=gpu.device)
    target = torch.zeros_like(source)
    gpu.copy_rate = 2 * size / gpu.time(lambda: target.copy_(source)).p50 * 1e6
    a, b = (gpu.randn(side, side, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    gpu.matmul_rate = 2 * side**3 / gpu.time(lambda: torch.matmul(a, b, out=product)).p50 * 1e6
    return {"copy_bytes_per_s": gpu.copy_rate, "bfloat16_matmul_per_s": gpu.matmul_rate}
