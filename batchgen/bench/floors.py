"""Floors (roofline): the least time that a workload's work takes on a machine, and the machine's measured peak rates.

`count_work` counts the work of a workload, and `FloorWork.seconds` gives its floors:

    arithmetic = 2 * parameters * tokens / flops
    overlap    = prefill + max(read, compute),  serial = prefill + read + compute
        prefill = (2 * parameters * distinct prompt tokens + attention) / flops
        compute = (2 * parameters * decoded tokens + attention) / flops
        read    = (steps * weights + cached positions read * bytes per position + states) / bandwidth

`flops` is the highest matrix multiplication rate measured on the machine, `bandwidth` its highest copy or read rate.
Each distinct prompt token is computed once. A step reads the weights once, and each cached position of the prefix tree
once for all rows below it; a decoded token reads the recurrent states of its row, and writes them. The arithmetic
floor contains neither attention nor memory; CPU goals refer to it.

Adapters add 2 r (I + O) operations per adapted layer and token; the reads of their weights are small and not counted.
Returned hidden states are written once. Logprobs and constraints add nothing: the head computes all logits anyway, and
processing them is cheap in comparison. What is computed to encode pictures is not counted.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from batchgen.bench.workloads import BenchRow
from batchgen.kernels.linear import forms
from batchgen.models.base import ModelSpec
from batchgen.plan.tree import build_tree

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
class FloorWork:
    """Counts of a workload's necessary work: each distinct prompt token and each decoded token once."""

    prompt_tokens: int
    """Number of tokens of all prompts."""
    distinct_prompt_tokens: int
    """Number of tokens in the exact prefix tree; rows of different adapters share nothing."""
    decode_rows: int
    """Number of output tokens that are decoded further: all but the last of each sample."""
    output_tokens: int
    flops: float
    """Operations of the arithmetic floor: 2 x parameters x tokens for the layers, 2 x V x H per row of the head."""
    prompt_flops: float
    """Operations of the prompts in the layers, including attention."""
    decode_flops: float
    """Operations of the decoded tokens in the layers, including attention, and of all rows of the head."""
    decode_bytes: float
    """Bytes of weights, keys and values read by the decode steps, and of hidden states written."""
    resident_bytes: int
    """Bytes of the weights and of all keys and values, each counted once."""

    def seconds(self, flops: float, bandwidth: float) -> dict[str, float]:
        """Seconds of the floors "arithmetic", "overlap" and "serial", at rates in FLOP/s and bytes/s."""
        prefill, compute = self.prompt_flops / flops, self.decode_flops / flops
        read = self.decode_bytes / bandwidth
        return {
            "arithmetic": self.flops / flops,
            "overlap": prefill + max(read, compute),
            "serial": prefill + read + compute,
        }


def count_work(rows: Sequence[BenchRow], spec: ModelSpec, *, tied: bool, adapter: int = 0) -> FloorWork:
    """Count the work of a workload for a dense model whose layers have full attention or a recurrent state.

    Args:
        rows: the workload.
        spec: the model's sizes.
        tied: whether the head shares the embedding's weights. The embedding lookup itself is not counted.
        adapter: number of parameters of one adapter, if rows have adapters.
    """
    by_adapter: dict[str | None, list[BenchRow]] = defaultdict(list)
    for row in rows:
        by_adapter[row.fields.get("lora_path")].append(row)
    head = spec.vocab_size * spec.hidden_size
    layers = spec.parameters - head * (1 if tied else 2)
    attention = 2 * spec.num_heads * sum(kv.key_dim + kv.value_dim for kv in spec.kv_layers)

    distinct = 0
    flops = prompt_flops = decode_flops = read = 0.0
    for name, members in by_adapter.items():
        decoded = np.array([row.max_new - 1 for row in members], np.int64)
        part = tree_work(members, decoded, sum(row.samples for row in members))
        weights = layers + (adapter if name is not None else 0)
        head_rows = len(members) + part.decoded  # a prompt's samples share its last logits
        decode_matmul = 2.0 * weights * part.decoded + 2.0 * head * head_rows
        flops += 2.0 * weights * part.computed + decode_matmul
        prompt_flops += 2.0 * weights * part.computed + attention * part.prompt_attended
        decode_flops += decode_matmul + attention * part.attended
        read += spec.kv_bytes_per_token * part.read
        distinct += int(part.computed)
    output = sum(row.max_new * row.samples for row in rows)
    decode_rows = output - sum(row.samples for row in rows)
    steps = max(row.max_new for row in rows) - 1
    stored = spec.dtype.itemsize * (layers + head)
    returned = ((row, row.fields.get("return_hidden_states")) for row in rows)
    states = sum(len(asked["layers"]) * row.samples * row.max_new for row, asked in returned if asked)
    return FloorWork(
        prompt_tokens=sum(len(row.ids) for row in rows),
        distinct_prompt_tokens=distinct,
        decode_rows=decode_rows,
        output_tokens=output,
        flops=flops,
        prompt_flops=prompt_flops,
        decode_flops=decode_flops,
        decode_bytes=steps * stored
        + read
        + 2 * spec.state_bytes * decode_rows
        + spec.dtype.itemsize * spec.hidden_size * states,
        resident_bytes=stored + spec.kv_bytes_per_token * (distinct + decode_rows) + spec.state_bytes * len(rows),
    )


@dataclass(frozen=True, slots=True)
class TreeWork:
    """Numbers of tokens and positions of rows that can share prefixes."""

    computed: float
    """Number of prompt tokens computed."""
    decoded: int
    """Number of decoded tokens."""
    prompt_attended: float
    """Number of positions that computed prompt tokens attend to, including themselves."""
    attended: float
    """Number of earlier positions that decoded tokens attend to."""
    read: float
    """`attended`, but each node of the prefix tree is counted once per step."""


def tree_work(rows: Sequence[BenchRow], decoded: npt.NDArray[np.int64], concurrency: int) -> TreeWork:
    """Count rows that decode `decoded` tokens each, `concurrency` samples at a time."""
    lengths = np.array([len(row.ids) for row in rows], np.int64)
    tokens = np.fromiter(chain.from_iterable(row.keys or row.ids for row in rows), np.int32, int(lengths.sum()))
    tree = build_tree(tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    samples = np.array([row.samples for row in rows], np.int64)
    own = float((samples * decoded * (decoded - 1) // 2).sum())  # attended output tokens of the same sample
    start, end = tree.start.astype(np.int64), tree.end.astype(np.int64)
    below = np.concatenate([[0], np.cumsum(samples[tree.order])])
    below_node = (below[tree.last_row + 1] - below[tree.first_row]).astype(np.float64)
    ordered = decoded[tree.order]
    steps = np.array([ordered[a : b + 1].max() for a, b in zip(tree.first_row, tree.last_row, strict=True)])
    # The rows of a subtree run together: if they are more than `concurrency`, they take several rounds.
    rounds = np.maximum(1.0, below_node / concurrency)
    return TreeWork(
        computed=float((end - start).sum()),
        decoded=int((samples * decoded).sum()),
        prompt_attended=float((end * (end + 1) // 2 - start * (start + 1) // 2).sum()),
        attended=float((samples * decoded * lengths).sum()) + own,
        read=float(((tree.end - tree.start) * steps * rounds).sum()) + own,
    )


def measure_matmul(dtype: torch.dtype, device: torch.device) -> tuple[float, str]:
    """The highest rate of matrix multiplication of any implementation, with torch's number of threads.

    An engine may multiply weights in their dtype or in float32, so all implementations of both are measured, at the
    sizes of decode steps and prompts. The arithmetic floor uses this rate.

    Returns:
        FLOP/s, and the implementation, dtype and size that reached them.
    """
    measured = []
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
            measured += [(rate, f"{name}, {about}") for name, rate in rates.items()]
    return max(measured)


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
