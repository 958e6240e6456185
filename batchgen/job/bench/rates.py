"""What this machine can do: its rate of matrix products and its bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from batchgen.kernels.linear import forms

__all__ = ["Products", "measure_bandwidth", "measure_products"]

_SIZES: Final = {"decode": (64, 1024, 4096), "prompt": (512, 2048, 2048)}
"""(rows, in, out): a decode step's product and a prompt's."""
_LARGE: Final = {"large": (8192, 8192, 8192)}
"""What a GPU needs to be full: at a prompt's size it shows a part of its rate."""
_FAR_BEHIND: Final = 4
"""Times slower than the fastest form, at the first size, that keep a form from being measured at the next."""
_SECONDS: Final = 0.05
_MOST_BYTES: Final = 256 << 20
_LEAST_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Products:
    """The best rate of matrix products that was seen, and what reached it."""

    flops: float
    """FLOP/s."""
    form: str
    """How it was computed, in which format and at which size."""


def measure_products(dtype: torch.dtype, device: torch.device) -> Products:
    """The best matrix product in any form, with the threads in force.

    A model's weights may be multiplied in their own format or widened to float32, whichever is faster: both are tried
    in every form that there is, at the sizes of decode steps and of prompts. The arithmetic floor is at this rate.
    A form that is far behind at the smaller size, as a number format that the processor lacks is, costs no more time.
    """
    found = []
    sizes = _SIZES | _LARGE if device.type == "cuda" else _SIZES
    for kind in dict.fromkeys((dtype, torch.float32)):
        far_behind: set[str] = set()
        for size, (rows, inner, outer) in sizes.items():
            weight, x = (torch.randn(n, inner, device=device).to(kind) for n in (outer, rows))
            rates = {
                name: 2.0 * rows * inner * outer / _best_seconds(partial(product, x), device)
                for name, product in forms(weight).items()
                if name not in far_behind
            }
            far_behind |= {name for name, rate in rates.items() if rate < max(rates.values()) / _FAR_BEHIND}
            about = f"{str(kind).removeprefix('torch.')}, {size} size"
            found += [Products(rate, f"{name}, {about}") for name, rate in rates.items()]
    return max(found, key=lambda one: one.flops)


def measure_bandwidth(device: torch.device, size: int = _MOST_BYTES) -> float:
    """Bytes per second of a copy, read and written bytes together, or of reading alone, whichever is more.

    Args:
        device: whose memory.
        size: bytes that a workload goes over again and again; 1 to 256 MiB are measured. What fits into a cache comes
            faster than from memory, and the floor is to say so.
    """
    numbers = min(max(size, _LEAST_BYTES), _MOST_BYTES) // 4
    source = torch.ones(numbers, device=device)
    target = torch.empty_like(source)
    copied = 8.0 * numbers / _best_seconds(lambda: target.copy_(source), device)
    return max(copied, 4.0 * numbers / _best_seconds(source.sum, device))


def _best_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Time of the fastest call in a twentieth of a second: a floor is what the machine can do undisturbed."""
    taken: list[float] = []
    call()
    end = time.perf_counter() + _SECONDS
    while len(taken) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begin)
    return min(taken)
