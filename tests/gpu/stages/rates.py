"""The device's measured rates, from which the floors of microbenchmarks are computed."""

from __future__ import annotations

import torch

from tests.gpu.device import Gpu


def measure_rates(gpu: Gpu) -> dict[str, float]:
    """Measure the gpu's `memory_rate` (bytes per second, the faster of a copy and a sum, since kernels that mostly read
    beat a copy) and `matmul_rate` (bfloat16, per second).
    """
    size, side = (1 << 16, 64) if gpu.toy else (1 << 30, 8192)
    source = torch.zeros(size, dtype=torch.uint8, device=gpu.device)
    target = torch.zeros_like(source)
    copy_rate = 2 * size / gpu.time(lambda: target.copy_(source)).p50 * 1e6
    numbers = source.view(torch.float32)
    read_rate = size / gpu.time(lambda: numbers.sum()).p50 * 1e6
    gpu.memory_rate = max(copy_rate, read_rate)
    a, b = (gpu.randn(side, side, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    gpu.matmul_rate = 2 * side**3 / gpu.time(lambda: torch.matmul(a, b, out=product)).p50 * 1e6
    rates = {"copy_bytes_per_s": copy_rate, "read_bytes_per_s": read_rate}
    return {**rates, "bfloat16_matmul_per_s": gpu.matmul_rate}
