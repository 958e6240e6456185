"""Floors (roofline): the least time that a workload's work takes on a machine.

`count_work` counts the work of a workload, and `FloorWork.seconds` gives its floors:

    arithmetic = 2 * parameters * tokens / flops
    overlap    = prefill + max(read, compute),  serial = prefill + read + compute
        prefill = (2 * parameters * distinct prompt tokens + attention) / flops
        compute = (2 * parameters * decoded tokens + attention) / flops
        read    = (steps * weights + cached positions read * bytes per position + states) / bandwidth

`flops` is the highest matrix multiplication rate measured on the machine, `bandwidth` its highest copy or read rate.
Each distinct prompt token is computed once. A step reads the weights once, and each cached position of the prefix tree
once for all rows below it. The arithmetic floor contains neither attention nor memory; CPU goals refer to it.

Adapters add 2 r (I + O) operations per adapted layer and token; the reads of their weights are small and not counted.
Returned hidden states are written once. Logprobs and constraints add nothing: the head computes all logits anyway, and
processing them is cheap in comparison. What is computed to encode pictures is not counted.

`device_floor` gives the overlap and serial floors of a bfloat16 model on a GPU of given rates, for a given number of
concurrent samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt

from batchgen.bench.shapes import Shape
from batchgen.bench.workloads import BenchRow
from batchgen.models.base import ModelSpec
from batchgen.plan.tree import PrefixTree, build_tree

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
    work = _tree_work(rows, new, concurrency)
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
    """Count the work of a workload for a dense model with full attention.

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
        part = _tree_work(members, decoded, sum(row.samples for row in members))
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
    states = spec.dtype.itemsize * spec.hidden_size * sum(_states(row) for row in rows)
    return FloorWork(
        prompt_tokens=sum(len(row.ids) for row in rows),
        distinct_prompt_tokens=distinct,
        decode_rows=decode_rows,
        output_tokens=output,
        flops=flops,
        prompt_flops=prompt_flops,
        decode_flops=decode_flops,
        decode_bytes=steps * stored + read + states,
        resident_bytes=stored + spec.kv_bytes_per_token * (distinct + decode_rows),
    )


@dataclass(frozen=True, slots=True)
class _TreeWork:
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


def _tree_work(rows: Sequence[BenchRow], decoded: npt.NDArray[np.int64], concurrency: int) -> _TreeWork:
    """Count rows that decode `decoded` tokens each, `concurrency` samples at a time."""
    lengths = np.array([len(row.ids) for row in rows], np.int64)
    tokens = np.fromiter(chain.from_iterable(row.keys or row.ids for row in rows), np.int32, int(lengths.sum()))
    tree = build_tree(tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    samples = np.array([row.samples for row in rows], np.int64)
    own = float((samples * decoded * (decoded - 1) // 2).sum())  # attended output tokens of the same sample
    attended = float((samples * decoded * lengths).sum())  # attended prompt tokens
    start, end = tree.start.astype(np.int64), tree.end.astype(np.int64)
    return _TreeWork(
        computed=float((end - start).sum()),
        decoded=int((samples * decoded).sum()),
        prompt_attended=float((end * (end + 1) // 2 - start * (start + 1) // 2).sum()),
        attended=attended + own,
        read=_prefix_kv_reads(tree, decoded, samples, concurrency) + own,
    )


def _prefix_kv_reads(
    tree: PrefixTree, new: npt.NDArray[np.int64], samples: npt.NDArray[np.int64], concurrency: int
) -> float:
    """Number of cached prompt positions read if a step reads each node once for all running rows below it."""
    below = np.concatenate([[0], np.cumsum(samples[tree.order])])
    rows = (below[tree.last_row + 1] - below[tree.first_row]).astype(np.float64)
    ordered = new[tree.order]
    steps = np.array([ordered[a : b + 1].max() for a, b in zip(tree.first_row, tree.last_row, strict=True)])
    # The rows of a subtree run together: if they are more than `concurrency`, they take several rounds.
    rounds = np.maximum(1.0, rows / concurrency)
    return float(((tree.end - tree.start) * steps * rounds).sum())


def _states(row: BenchRow) -> int:
    """Number of hidden states that a row returns: one per requested layer and output token."""
    requested = row.fields.get("return_hidden_states")
    return 0 if requested is None else len(requested["layers"]) * row.samples * row.max_new
