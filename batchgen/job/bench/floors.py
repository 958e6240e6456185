"""The physical floor: what no engine can do without for a workload, and how long this machine needs for that at least.

    arithmetic = 2 * parameters * tokens / products
    overlap    = prompts + max(read, multiplied),  serial = prompts + read + multiplied
        prompts    = (2 * parameters * distinct prompt tokens + attention) / products
        multiplied = (2 * parameters * fed output tokens + attention) / products
        read       = (steps * weights + cached positions read * bytes a position + states) / bandwidth

`products` is the machine's best rate in any form, `bandwidth` what it copies or reads at best. Every distinct prompt
token is computed once, and a step reads the weights once and each cached position of the prefix tree once for all rows
below it. The arithmetic floor leaves attention and memory out: it is the one that goals on CPUs are set by.

Adapters add 2 r (I + O) operations for each adapted layer and token; their weights, read by the rows that have them,
are few. Returned hidden states are written once. Logprobs and constraints add nothing: the head computes every logit
anyway, and what is done to logits is small beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from batchgen.job.bench.device_floors import level_reads, prompt_work
from batchgen.job.bench.workloads import BenchRow
from batchgen.models.base import ModelSpec
from batchgen.plan.tree import build_tree

__all__ = ["FLOORS", "FloorWork", "count_work"]

FLOORS = ("arithmetic", "overlap", "serial")


@dataclass(frozen=True, slots=True)
class FloorWork:
    """What no engine can do without: every distinct prompt token and every fed output token, once."""

    prompt_tokens: int
    """Tokens of all prompts."""
    distinct_prompt_tokens: int
    """Nodes of the exact prefix tree; adapters share none."""
    decode_rows: int
    """Output tokens that are fed back: all but each sample's last."""
    output_tokens: int
    flops: float
    """2 x parameters x tokens of the layers, 2 x V x H per head row."""
    prompt_flops: float
    """Of the prompts' layers, attention included."""
    decode_flops: float
    """Of the fed tokens' layers and of all head rows, attention included."""
    decode_bytes: float
    """Weights, keys and values read by the decode steps, and states written."""
    resident_bytes: int
    """Weights, keys and values of the whole workload, once: what is gone over again and again."""

    def seconds(self, products: float, bandwidth: float) -> dict[str, float]:
        """The least time by each of `FLOORS`, at rates in FLOP/s and bytes/s."""
        prompts, multiplied = self.prompt_flops / products, self.decode_flops / products
        read = self.decode_bytes / bandwidth
        return {
            "arithmetic": self.flops / products,
            "overlap": prompts + max(read, multiplied),
            "serial": prompts + read + multiplied,
        }


def count_work(rows: Sequence[BenchRow], spec: ModelSpec, *, tied: bool, adapter: int = 0) -> FloorWork:
    """Count a workload for a dense model whose layers attend to everything before.

    Args:
        rows: the workload.
        spec: the model's sizes.
        tied: whether the head is the embedding. The embedding itself is looked up and costs nothing.
        adapter: numbers of one adapter, where rows have any.
    """
    by_adapter: dict[str | None, list[BenchRow]] = defaultdict(list)
    for row in rows:
        by_adapter[row.fields.get("lora_path")].append(row)
    head = spec.vocab_size * spec.hidden_size
    layers = spec.parameters - head * (1 if tied else 2)
    attention = 2 * spec.num_heads * sum(kv.key_dim + kv.value_dim for kv in spec.kv_layers)
    position = spec.dtype.itemsize * sum(kv.kv_heads * (kv.key_dim + kv.value_dim) for kv in spec.kv_layers)

    distinct = 0
    flops = prompt_flops = decode_flops = read = 0.0
    for name, members in by_adapter.items():
        part = _tree_work(members)
        weights = layers + (adapter if name is not None else 0)
        products = 2.0 * weights * part.fed + 2.0 * head * part.head_rows
        flops += 2.0 * weights * part.distinct + products
        prompt_flops += 2.0 * weights * part.distinct + attention * part.prompt_seen
        decode_flops += products + attention * part.seen
        read += position * part.read
        distinct += part.distinct
    output = sum(row.max_new * row.samples for row in rows)
    fed = output - sum(row.samples for row in rows)
    steps = max(row.max_new for row in rows) - 1
    stored = spec.dtype.itemsize * (layers + head)
    states = spec.dtype.itemsize * spec.hidden_size * sum(_states(row) for row in rows)
    return FloorWork(
        prompt_tokens=sum(len(row.ids) for row in rows),
        distinct_prompt_tokens=distinct,
        decode_rows=fed,
        output_tokens=output,
        flops=flops,
        prompt_flops=prompt_flops,
        decode_flops=decode_flops,
        decode_bytes=steps * stored + read + states,
        resident_bytes=stored + position * (distinct + fed),
    )


@dataclass(frozen=True, slots=True)
class _TreeWork:
    """Of rows that may share: counts of tokens and of cached positions."""

    distinct: int
    fed: int
    head_rows: int
    """A prompt's samples share the logits of its end."""
    prompt_seen: float
    """Positions that prompt tokens look back on, themselves included."""
    seen: float
    """Positions before them that fed tokens look back on."""
    read: float
    """The same, each node of the tree counted once a step."""


def _tree_work(rows: Sequence[BenchRow]) -> _TreeWork:
    lengths = np.array([len(row.ids) for row in rows], np.int64)
    tokens = np.fromiter(chain.from_iterable(row.ids for row in rows), np.int32, int(lengths.sum()))
    tree = build_tree(tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    samples = np.array([row.samples for row in rows], np.int64)
    fed: npt.NDArray[np.int64] = np.array([row.max_new for row in rows], np.int64) - 1
    own = float((samples * fed * (fed - 1) // 2).sum())  # earlier output tokens
    computed, prompt_seen = prompt_work(tree, lengths, samples, "levels")
    return _TreeWork(
        distinct=int(computed),
        fed=int((samples * fed).sum()),
        head_rows=int((1 + samples * fed).sum()),
        prompt_seen=prompt_seen,
        seen=float((samples * fed * lengths).sum()) + own,
        read=level_reads(tree, fed, samples, int(samples.sum())) + own,
    )


def _states(row: BenchRow) -> int:
    """Hidden states that a row returns: of each output token the one that its logits came from."""
    asked = row.fields.get("return_hidden_states")
    return 0 if asked is None else len(asked["layers"]) * row.samples * row.max_new
