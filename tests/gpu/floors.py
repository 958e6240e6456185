"""Floors of a bfloat16 model on a GPU of known rates, for a given number of concurrent samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from batchgen.bench.floors import tree_work
from batchgen.bench.shapes import Shape
from batchgen.bench.workloads import BenchRow

_BF16_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Peak rates of a device."""

    name: str
    bandwidth: float
    """Bytes per second, reads plus writes."""
    flops: float
    """bfloat16 operations per second."""


H100: Final = DeviceRates("H100", 2.9e12, 792e12)
"""Rate at which attention reads its cache, and matrix multiplication rate, of an H100 of 80 GB with HBM3."""
H200: Final = DeviceRates("H200", 4.3e12, 790e12)
"""Copy bandwidth and matrix multiplication rate of an H200, constants to which the project's goals refer."""


@dataclass(frozen=True, slots=True)
class DeviceFloor:
    """Floors of a whole workload on a GPU."""

    output_tokens: int
    prefill: float
    """Seconds to compute the prompts."""
    memory: float
    """Seconds of memory traffic while decoding."""
    compute: float
    """Seconds of arithmetic while decoding."""

    @property
    def overlap(self) -> float:
        """Output tokens per second if memory traffic and arithmetic overlap completely."""
        return self.output_tokens / (self.prefill + max(self.memory, self.compute))

    @property
    def serial(self) -> float:
        """Output tokens per second if memory traffic and arithmetic do not overlap."""
        return self.output_tokens / (self.prefill + self.memory + self.compute)


def device_floor(rows: Sequence[BenchRow], shape: Shape, rates: DeviceRates, concurrency: int) -> DeviceFloor:
    """The floor of a workload on a GPU.

    Args:
        rows: the workload.
        shape: the model, in bfloat16.
        rates: the device's peak rates.
        concurrency: number of samples that run at the same time and share a step's read of the weights.
    """
    new = np.array([row.max_new for row in rows], np.int64)
    work = tree_work(rows, new, concurrency)
    steps = max(int(new.max()), -(-work.decoded // concurrency))
    head = shape.vocab * shape.hidden
    layers = shape.parameters - head * (1 if shape.tied else 2)
    position_flops = 4 * shape.layers * shape.heads * shape.head_dim  # attention to one cached position
    position_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * _BF16_BYTES
    return DeviceFloor(
        output_tokens=work.decoded,
        prefill=(2.0 * layers * work.computed + position_flops * work.prompt_attended) / rates.flops,
        memory=(steps * _BF16_BYTES * (layers + head) + position_bytes * work.read) / rates.bandwidth,
        compute=(2.0 * (layers + head) * work.decoded + position_flops * work.attended) / rates.flops,
    )
