"""Measured peak rates of this machine: matrix multiplication and memory bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from batchgen.kernels.linear import forms

_SIZES: Final = {"decode": (64, 1024, 4096), "prompt": (512, 2048, 2048)}
"""(rows, in, out) of matrix multiplications as in a decode step and a prompt."""
_GPU_SIZES: Final = {"large": (8192, 8192, 8192)}
"""Additional size that saturates a GPU."""
_GIVE_UP_FACTOR: Final = 4
"""A form this many times slower than the fastest one is not measured at larger sizes."""
_SECONDS: Final = 0.05
_MAX_BYTES: Final = 256 << 20
_MIN_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class MatmulRate:
    """A rate of matrix multiplication, and how it was reached."""

    flops: float
    """FLOP/s."""
    form: str
    """Implementation, dtype and size."""


def measure_matmul(dtype: torch.dtype, device: torch.device) -> MatmulRate:
    """The highest rate of matrix multiplication of any implementation, with torch's number of threads.

    An engine may multiply weights in their dtype or in float32, so all implementations of both are measured, at the
    sizes of decode steps and prompts. The arithmetic floor uses this rate.
    """
    found = []
    sizes = _SIZES | _GPU_SIZES if device.type == "cuda" else _SIZES
    for kind in dict.fromkeys((dtype, torch.float32)):
        too_slow: set[str] = set()
        for size, (rows, inner, outer) in sizes.items():
            weight, x = (torch.randn(n, inner, device=device).to(kind) for n in (outer, rows))
            rates = {
                name: 2.0 * rows * inner * outer / _best_seconds(partial(product, x), device)
                for name, product in forms(weight).items()
                if name not in too_slow
            }
            too_slow |= {name for name, rate in rates.items() if rate < max(rates.values()) / _GIVE_UP_FACTOR}
            about = f"{str(kind).removeprefix('torch.')}, {size} size"
            found += [MatmulRate(rate, f"{name}, {about}") for name, rate in rates.items()]
    return max(found, key=lambda one: one.flops)


def measure_bandwidth(device: torch.device, size: int = _MAX_BYTES) -> float:
    """Bytes per second of copying (reads plus writes) or of reading, whichever is higher.

    Args:
        device: the device whose memory is measured.
        size: number of bytes that a workload reads repeatedly, clamped to 1 to 256 MiB. A small size measures a cache.
    """
    numbers = min(max(size, _MIN_BYTES), _MAX_BYTES) // 4
    source = torch.ones(numbers, device=device)
    target = torch.empty_like(source)
    copied = 8.0 * numbers / _best_seconds(lambda: target.copy_(source), device)
    return max(copied, 4.0 * numbers / _best_seconds(source.sum, device))


def _best_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of several calls; slower ones were disturbed by other programs."""
    times: list[float] = []
    call()
    end = time.perf_counter() + _SECONDS
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)
