"""The least time that a GPU needs for a workload: bytes over its bandwidth, operations over its rate of products.

    decode  mem  = (steps * weights + cached positions read * bytes a position) / bandwidth
            flop = (2 * parameters * tokens + attention) / products
    prefill flop = (2 * parameters * prompt tokens + attention) / products

*Overlap*: decoding takes the longer of its two; *serial*: their sum. Prompts are computed at the rate of products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from batchgen.job.bench.shapes import Shape
from batchgen.job.bench.workloads import BenchRow
from batchgen.plan.tree import PrefixTree, build_tree

__all__ = ["H200", "DeviceFloor", "DeviceRates", "Sharing", "device_floor", "level_reads", "prompt_work"]

Sharing = Literal["none", "cached", "levels"]
"""What prompts that begin alike save: nothing; computing the beginning again; reading it again in every row as well."""

_WIDE: Final = 2
"""Bytes of a bfloat16 number."""


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What a device can do at best."""

    name: str
    bandwidth: float
    """Bytes per second, read and written together."""
    products: float
    """bfloat16 operations per second."""


H200: Final = DeviceRates("H200", 4.3e12, 790e12)
"""Given, not measured by this program: the copy bandwidth and rate of products that the project's goals are set by."""


@dataclass(frozen=True, slots=True)
class DeviceFloor:
    """Seconds and tokens of a whole workload."""

    output_tokens: int
    prefill: float
    """Seconds of the prompts."""
    memory: float
    """Seconds that decoding reads for."""
    products: float
    """Seconds that decoding multiplies for."""

    @property
    def overlap(self) -> float:
        """Output tokens per second where reading and multiplying overlap wholly."""
        return self.output_tokens / (self.prefill + max(self.memory, self.products))

    @property
    def serial(self) -> float:
        """Output tokens per second where they do not overlap at all."""
        return self.output_tokens / (self.prefill + self.memory + self.products)


def device_floor(
    rows: Sequence[BenchRow], shape: Shape, rates: DeviceRates, concurrency: int, sharing: Sharing = "levels"
) -> DeviceFloor:
    """The floor of a workload.

    Args:
        rows: the workload.
        shape: the model, bfloat16.
        rates: the device.
        concurrency: samples that run at a time: what shares a step's read of the weights.
        sharing: what prompts that begin alike save.
    """
    tokens = np.concatenate([np.asarray(row.ids, np.int32) for row in rows])
    lengths = np.array([len(row.ids) for row in rows], np.int64)
    tree = build_tree(tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    new = np.array([row.max_new for row in rows], np.int64)
    samples = np.array([row.samples for row in rows], np.int64)
    output = int((new * samples).sum())
    steps = max(int(new.max()), -(-output // concurrency))

    head = shape.vocab * shape.hidden
    layers = shape.parameters - head * (1 if shape.tied else 2)
    position = 4 * shape.layers * shape.heads * shape.head_dim  # operations of attention on one cached position
    cached = 2 * shape.layers * shape.kv_heads * shape.head_dim * _WIDE  # its bytes

    own = float((samples * new * (new - 1) // 2).sum())  # output tokens that later ones look back on
    looked = float((samples * new * lengths).sum())
    read = looked if sharing != "levels" else level_reads(tree, new, samples, concurrency)
    computed, seen = prompt_work(tree, lengths, samples, sharing)
    return DeviceFloor(
        output_tokens=output,
        prefill=(2.0 * layers * computed + position * seen) / rates.products,
        memory=(steps * _WIDE * (layers + head) + cached * (read + own)) / rates.bandwidth,
        products=(2.0 * (layers + head) * output + position * (looked + own)) / rates.products,
    )


def level_reads(
    tree: PrefixTree, new: npt.NDArray[np.int64], samples: npt.NDArray[np.int64], concurrency: int
) -> float:
    """Cached positions read where a step reads each node once for all rows that run below it."""
    below = np.concatenate([[0], np.cumsum(samples[tree.order])])
    rows = (below[tree.last_row + 1] - below[tree.first_row]).astype(np.float64)
    ordered = new[tree.order]
    steps = np.array([ordered[a : b + 1].max() for a, b in zip(tree.first_row, tree.last_row, strict=True)])
    # Subtrees run together: one of more rows than run at a time is read by as many rounds as it takes.
    rounds = np.maximum(1.0, rows / concurrency)
    return float(((tree.end - tree.start) * steps * rounds).sum())


def prompt_work(
    tree: PrefixTree, lengths: npt.NDArray[np.int64], samples: npt.NDArray[np.int64], sharing: Sharing
) -> tuple[float, float]:
    """Prompt tokens computed, and positions that they look back on, themselves included."""
    if sharing == "none":
        return float((samples * lengths).sum()), float((samples * lengths * (lengths + 1) // 2).sum())
    start, end = tree.start.astype(np.int64), tree.end.astype(np.int64)
    return float((end - start).sum()), float((end * (end + 1) // 2 - start * (start + 1) // 2).sum())
