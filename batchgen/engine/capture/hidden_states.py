"""`HiddenStateCollector`: captures hidden states and routed experts in each step and returns them with the samples.

The state of an output token is that of the flat token it is sampled from. States of prompt tokens are stored per
prefix-tree node (`NodeBuffers`), so that shared ones are computed, copied and stored once. If only their mean is
returned, their sum is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.capture.node_buffers import NodeBuffers, Span
from batchgen.engine.capture.sample_states import Floats, SampleStates, StateArray, StateNeeds, Sums
from batchgen.engine.memory.d2h_queue import D2HQueue
from batchgen.engine.workload import JobWorkload
from batchgen.kernels.device import Device, to_float32
from batchgen.models.base import CaptureSpec, ModelSpec
from batchgen.plan.step_plan import SampleRow, SampleRows, StepPlan
from batchgen.request.completion import StateBlock
from batchgen.request.table.request_table import Request

_EXPERTS: Final = "experts"


@dataclass(slots=True, eq=False)
class _SampledRow:
    """A sampled row of a step whose sample stores states or experts."""

    sample: SampleStates
    row: int
    """Captured row of its flat token, counted from the first sampled row"""
    states: StateArray | None = None
    """[L, H] states, once they are on the host; None: not stored"""
    routed: npt.NDArray[np.int32] | None = None
    """[MoE layers, K] experts, once they are on the host; None: not stored"""


@dataclass(slots=True, eq=False)
class PendingStates:
    """Captured states and experts of a step, from its issue until it is read."""

    capture: CaptureSpec
    """Filled by the model, emptied by `send`"""
    spans: list[Span]
    """Prompt positions; their captured rows come first, in order"""
    samples: list[_SampledRow]
    """Sampled rows; their captured rows follow"""
    prompt_rows: int
    """Number of captured rows of all spans"""
    sums: dict[tuple[int, int], Sums] = field(default_factory=dict)
    """(node, layer) -> [H] sum over the step's positions"""
    d2h_queue: D2HQueue | None = None
    sent: int = 0
    """Number of the last result sent to the queue"""


@dataclass(frozen=True, slots=True)
class _NodeNeeds:
    """What is stored for a tree node, for the requests at or below it."""

    rows: frozenset[int]
    """Layers whose states are stored"""
    sums: frozenset[int]
    """Layers whose sum of states is stored"""
    experts: bool


class HiddenStateCollector:
    """Collects the hidden states and routed experts that rows of a job return."""

    def __init__(self, workload: JobWorkload, spec: ModelSpec, *, exact: bool) -> None:
        """`exact`: return means in float32 instead of rounding them to the model's dtype."""
        table = workload.table
        self._needs_by_params = needs = [
            StateNeeds(p.return_hidden_states, p.return_routed_experts) for p in table.params
        ]
        self._params_id = table.params_id.data
        self._exact = exact
        self._hidden = spec.hidden_size
        self._layer_dtypes: dict[int, torch.dtype] = {}
        """Layer -> dtype of its states, which may be float32 even if the weights are not."""
        self._layers = tuple(sorted({layer for needs in self._needs_by_params for layer in needs.layers}))
        self._experts = any(needs.experts for needs in self._needs_by_params)
        by_params = np.array([w.prompt != "none" or w.experts for w in self._needs_by_params], np.bool_)
        asking = by_params[table.params_id] & (workload.samples > 0)
        firsts = table.by_params([w.states is not None and w.states.pool == "first" for w in needs], np.bool_)
        lengths = np.where(asking, np.where(firsts, 1, np.diff(table.offsets)), 0)
        self._buffers = NodeBuffers(workload.tree, np.zeros_like(lengths), lengths)
        self._masks = _node_masks(workload, [self._need_mask(w) for w in self._needs_by_params], asking)
        self._needs = cache(self._node_needs)
        self._running: dict[int, SampleStates] = {}

    @property
    def nbytes(self) -> int:
        """Bytes stored for prompts."""
        return self._buffers.nbytes

    @property
    def num_samples(self) -> int:
        """Number of running samples whose values are stored."""
        return len(self._running)

    def add(self, sequence: int, request: Request) -> None:
        """Add a sample, if its row returns states or experts."""
        needs = self._needs_by_params[self._params_id[request.index]]
        if needs.states is not None or needs.experts:
            places = np.array([self._layers.index(layer) for layer in needs.layers], np.int64)
            self._running[sequence] = SampleStates(request, needs, places)

    def capture(self, plan: StepPlan, device: Device) -> PendingStates | None:
        """Select the rows to capture in a step that is about to be issued; None if there are none.

        The model fills the result's `capture`; then call `send`, and `collect` when the step is read.
        """
        spans = self._buffers.spans(plan)
        rows = [np.arange(span.flat, span.flat + len(span)) for span in spans]
        count = sum(map(len, rows))
        samples: list[_SampledRow] = []
        place: dict[int, int] = {}
        for sample in self._capturing_rows(plan.samples):
            samples.append(_SampledRow(self._running[sample.sequence], place.setdefault(sample.token, len(place))))
        rows.append(np.fromiter(place, np.int64, len(place)))
        index = np.concatenate(rows).astype(np.int64, copy=False)
        if not len(index):
            return None
        try:
            (uploaded,) = device.upload(index)
        except BaseException:
            self._buffers.undo(spans)
            raise
        return PendingStates(CaptureSpec(uploaded, plan.tokens, self._layers, self._experts), spans, samples, count)

    def _capturing_rows(self, samples: SampleRows) -> Iterable[SampleRow]:
        """Sampled rows of samples that store states or experts."""
        if not self._running:
            return ()
        mask = np.isin(samples.sequence_ids, np.fromiter(self._running, np.int64, len(self._running)))
        return SampleRows(samples.sequence_ids[mask], samples.tokens[mask])

    def send(self, pending: PendingStates, d2h_queue: D2HQueue) -> None:
        """Start copying the captured tensors to the host."""
        capture = pending.capture
        self._layer_dtypes.update((layer, values.dtype) for layer, values in capture.states.items())
        pending.d2h_queue = d2h_queue
        batch: list[tuple[Tensor, Callable[[StateArray], None]]] = []
        size = 0
        for values, store in self._tensors_to_send(pending):
            step = max(1, d2h_queue.chunk_bytes // max(1, values[:1].nbytes))
            for first, part in enumerate(torch.split(values, step)):
                if batch and size + part.nbytes > d2h_queue.chunk_bytes:
                    pending.sent = _send(d2h_queue, batch)
                    batch, size = [], 0
                batch.append((part, partial(store, first * step)))
                size += part.nbytes
        if batch:
            pending.sent = _send(d2h_queue, batch)
        capture.states, capture.routed = {}, None

    def collect(self, pending: PendingStates) -> None:
        """Store a step's values; steps must be collected in order. Values of finished samples are discarded."""
        if pending.d2h_queue is not None:
            pending.d2h_queue.read(pending.sent)
        for (node, layer), total in pending.sums.items():
            if self._buffers.num_users(node):
                arrays = self._buffers.node(node).arrays
                before = arrays.get(f"sum {layer}")
                arrays[f"sum {layer}"] = total if before is None else total + before.astype(np.float64, copy=False)
        for sampled in pending.samples:
            sampled.sample.append(sampled.states, sampled.routed)

    def cancel(self, pending: PendingStates) -> None:
        """Cancel the last call of `capture`, because its step has failed and will be issued again.

        Rows that were already sent are overwritten by those of the next try.
        """
        self._buffers.undo(pending.spans)
        # The queue still references `pending`, which must not hold device memory that the next try needs.
        pending.capture.states, pending.capture.routed = {}, None

    def _tensors_to_send(self, pending: PendingStates) -> Iterator[tuple[Tensor, Callable[[int, StateArray], None]]]:
        """Captured tensors to copy, each with a function that stores them: it takes a first row and the values."""
        states, routed, count = pending.capture.states, pending.capture.routed, pending.prompt_rows
        needs = [self._needs(self._masks[span.node]) for span in pending.spans]
        for layer in self._layers:
            if any(layer in need.rows or layer in need.sums for need in needs):
                yield states[layer][:count], partial(self._store_prompt_states, pending, layer)
        if routed is not None and any(need.experts for need in needs):
            yield routed[:count], partial(self._store_prompt_experts, pending)
        if any(sampled.sample.needs.output != "none" for sampled in pending.samples):
            by_layer = [states[layer][count:] for layer in self._layers]
            # Layers may differ in dtype; the widest one represents all of them exactly.
            widest = reduce(torch.promote_types, (values.dtype for values in by_layer))
            stacked = torch.stack([values.to(widest) for values in by_layer], dim=1)  # [D, L, H]
            yield stacked, partial(_store_sample_states, pending)
        if routed is not None and any(sampled.sample.needs.experts for sampled in pending.samples):
            yield routed[count:], partial(_store_sample_experts, pending)

    def _store_prompt_states(self, pending: PendingStates, layer: int, first: int, values: StateArray) -> None:
        """Store rows or sums of the captured rows [first, first + len(values)) of a layer."""
        for span, needs, rows in self._overlapping_spans(pending, first, values):
            if layer in needs.rows:
                self._buffers.put(span, f"rows {layer}", rows)
            if layer in needs.sums:
                total = to_float32(rows).sum(axis=0, dtype=np.float64)
                key = span.node, layer
                pending.sums[key] = total + pending.sums.get(key, 0.0)

    def _store_prompt_experts(self, pending: PendingStates, first: int, values: StateArray) -> None:
        for span, needs, rows in self._overlapping_spans(pending, first, values):
            if needs.experts:
                self._buffers.put(span, _EXPERTS, rows)

    def _overlapping_spans(
        self, pending: PendingStates, first: int, values: StateArray
    ) -> Iterator[tuple[Span, _NodeNeeds, StateArray]]:
        """Parts of spans with captured rows in [first, first + len(values)) that unfinished requests still need."""
        at = -first
        for span in pending.spans:
            low, high = max(0, at), min(len(values), at + len(span))
            if low < high and self._buffers.num_users(span.node):
                start = span.start + low - at
                part = Span(span.node, start, start + high - low, span.flat + low - at)
                yield part, self._needs(self._masks[span.node]), values[low:high]
            at += len(span)

    def finish(self, sequence: int, num_tokens: int) -> tuple[list[StateBlock] | None, npt.NDArray[np.int32] | None]:
        """Remove a sample that has ended with `num_tokens` tokens.

        Returns:
            Its states by layer, and its routed experts, flat; None for what its row does not return.
        """
        sample = self._running.pop(sequence, None)
        if sample is None:
            return None, None
        sample.end(num_tokens)
        blocks = None if sample.needs.states is None else [self._block(sample, n) for n in sample.needs.layers]
        routed = None
        if sample.needs.experts:
            prompt = self._buffers.gather(sample.request.index, _EXPERTS)
            routed = np.concatenate([prompt.reshape(-1), *(one.reshape(-1) for one in sample.routed[1:])])
        return blocks, routed

    def drop(self, sequence: int) -> None:
        """Remove a sample that has failed."""
        self._running.pop(sequence, None)

    def release(self, request: int) -> None:
        """Free the prompt values of a request whose samples have all ended."""
        self._buffers.release(request)

    def _block(self, sample: SampleStates, layer: int) -> StateBlock:
        requested = sample.needs.states
        assert requested is not None
        length = len(sample.request.prompt_ids)
        start = length - 1 if requested.tokens == "output" else 0
        if sample.needs.output == "first":
            start = length - 1
        elif sample.needs.output == "last":
            start = max(length - 1, length + sample.num_tokens - 2)
        pooled = requested.pool == "mean" and requested.tokens != "last"
        values = self._mean(sample, layer) if pooled else self._rows(sample, layer)
        dtype = "float32" if self._exact else str(self._layer_dtypes[layer]).removeprefix("torch.")
        return StateBlock(layer, requested.tokens, start, values, dtype)

    def _rows(self, sample: SampleStates, layer: int) -> Floats:
        """[rows, H] states of the requested tokens, or the single state of `pool: last`."""
        rows, place = sample.rows, sample.needs.layers.index(layer)
        if sample.needs.output == "every":
            rows = rows[1:] if sample.needs.prompt == "rows" else rows[: sample.num_tokens]
        parts = [np.stack([one[place] for one in rows])] if rows else []
        if sample.needs.prompt == "rows":
            parts.insert(0, self._buffers.gather(sample.request.index, f"rows {layer}"))
        if len({part.dtype for part in parts}) > 1:
            parts = [to_float32(part) for part in parts]
        return to_float32(np.concatenate(parts)) if parts else np.zeros((0, self._hidden), np.float32)

    def _mean(self, sample: SampleStates, layer: int) -> Floats:
        """[1, H] mean of the states, summed in float64; NaN for an output without tokens."""
        total: Sums = np.zeros(self._hidden)
        if sample.sums is not None:
            total += sample.sums[sample.needs.layers.index(layer)]
        count = sample.num_tokens
        if sample.needs.prompt == "sum":
            for rows, _ in self._buffers.path(sample.request.index):
                total += rows.arrays[f"sum {layer}"].astype(np.float64, copy=False)
            count = len(sample.request.prompt_ids) + max(0, count - 1) * (sample.needs.output == "sum")
        mean = torch.from_numpy(total / count if count else np.full_like(total, np.nan))[None]  # [1, H]
        exact = self._exact or sample.request.params.task is not None
        rounded = mean.float() if exact else mean.to(self._layer_dtypes[layer]).float()
        return rounded.numpy()

    def _need_mask(self, needs: StateNeeds) -> int:
        """What is stored for prompts, as bits: rows by layer, sums by layer, experts."""
        bits = 0
        shift = {"none": -1, "rows": 0, "sum": len(self._layers)}[needs.prompt]
        for layer in needs.layers if shift >= 0 else ():
            bits |= 1 << (self._layers.index(layer) + shift)
        return bits | needs.experts << 2 * len(self._layers)

    def _node_needs(self, mask: int) -> _NodeNeeds:
        count = len(self._layers)
        rows = frozenset(layer for i, layer in enumerate(self._layers) if mask >> i & 1)
        sums = frozenset(layer for i, layer in enumerate(self._layers) if mask >> (i + count) & 1)
        return _NodeNeeds(rows, sums, bool(mask >> 2 * count & 1))


def hidden_state_collector(workload: JobWorkload, spec: ModelSpec, *, exact: bool) -> HiddenStateCollector | None:
    """The collector of a job; None if no row returns hidden states or routed experts."""
    asked = any(p.return_hidden_states is not None or p.return_routed_experts for p in workload.table.params)
    return HiddenStateCollector(workload, spec, exact=exact) if asked else None


def _node_masks(workload: JobWorkload, by_params: list[int], asking: npt.NDArray[np.bool_]) -> list[int]:
    """[nodes] needs of the requests at or below each node, as bits."""
    tree = workload.tree
    masks = [0] * len(tree)
    requests = np.flatnonzero(asking)
    leaves, params = tree.node_of_request[requests], workload.table.params_id[requests]
    for leaf, params_id in zip(leaves.tolist(), params.tolist(), strict=True):
        masks[leaf] |= by_params[params_id]
    parents = tree.parent.tolist()
    for node in range(len(masks) - 1, -1, -1):
        if parents[node] >= 0:
            masks[parents[node]] |= masks[node]
    return masks


def _send(d2h_queue: D2HQueue, batch: list[tuple[Tensor, Callable[[StateArray], None]]]) -> int:
    """Send tensors in one transfer; each is passed to its own consumer."""
    consumers = [store for _, store in batch]

    def store(arrays: list[npt.NDArray[Any]]) -> None:
        for consumer, values in zip(consumers, arrays, strict=True):
            consumer(values)

    return d2h_queue.send([values for values, _ in batch], store)


def _store_sample_states(pending: PendingStates, first: int, values: StateArray) -> None:
    """Assign states [d, L, H] of the sampled rows from `first` on to their samples."""
    for sampled in pending.samples:
        if first <= sampled.row < first + len(values) and sampled.sample.needs.output != "none":
            sampled.states = values[sampled.row - first][sampled.sample.layer_indexes]  # a copy


def _store_sample_experts(pending: PendingStates, first: int, values: StateArray) -> None:
    for sampled in pending.samples:
        if first <= sampled.row < first + len(values) and sampled.sample.needs.experts:
            sampled.routed = values[sampled.row - first].copy()
