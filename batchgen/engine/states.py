"""Hidden states and routed experts: which flat tokens of a step are kept, and what a finished sample is handed.

The state that produced an output token is that of the flat token it is drawn from, in whatever step, chunk or
recomputation that is. States of prompt tokens are kept by prefix-tree node (`PromptCapture`), so that shared ones are
computed, copied and held once; where only their mean is wanted their sum is kept.
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

from batchgen.engine.capture import Piece, PromptCapture
from batchgen.engine.output_ring import CHUNK_BYTES, OutputRing
from batchgen.engine.planning import Workload
from batchgen.engine.sample_states import Floats, SampleStates, Stored, Sums, Wanted, floats
from batchgen.kernels.device import Device
from batchgen.models.base import ModelSpec, Taps
from batchgen.params import SamplingParams
from batchgen.plan.types import SampleRow, SampleRows, StepPlan
from batchgen.request import Request, StateBlock

__all__ = ["PendingStates", "StateKeeper", "state_keeper"]

_EXPERTS: Final = "experts"


@dataclass(slots=True, eq=False)
class _Draw:
    """A sample that draws in a step."""

    sample: SampleStates
    row: int
    """Place of its token among those that are drawn from."""
    states: Stored | None = None
    """[L, H], once they are on the host; None where the sample wants none."""
    routed: npt.NDArray[np.int32] | None = None


@dataclass(slots=True, eq=False)
class PendingStates:
    """A step's taps and what is to be done with them, from its issue to its reading."""

    taps: Taps
    """For the model to fill; emptied when sent."""
    pieces: list[Piece]
    """Prompt positions, whose tapped rows come first, in order."""
    draws: list[_Draw]
    """Their tapped rows follow."""
    prompt_rows: int
    """Tapped rows of all pieces."""
    sums: dict[tuple[int, int], Sums] = field(default_factory=dict)
    """By node and layer: [H] of the step's positions."""
    ring: OutputRing | None = None
    sent: int = 0


@dataclass(frozen=True, slots=True)
class _NodeNeeds:
    """What is kept of a node for the requests at or below it."""

    rows: frozenset[int]
    sums: frozenset[int]
    experts: bool


class StateKeeper:
    """Keeps the inner values that rows of a job ask for.

    Args:
        workload: the job; what cannot run is set aside already.
        spec: the model's.
        exact: means stay float32 instead of being rounded to the model's dtype.
    """

    def __init__(self, workload: Workload, spec: ModelSpec, *, exact: bool) -> None:
        table = workload.table
        self._wanted = [Wanted(p.return_hidden_states, p.return_routed_experts) for p in table.params]
        self._params_id = table.params_id.data
        self._exact = exact
        self._hidden = spec.hidden_size
        self._formats: dict[int, torch.dtype] = {}
        """By layer: what the model computes it in; some keep their states in float32 whatever their weights are in."""
        self._layers = tuple(sorted({layer for wanted in self._wanted for layer in wanted.layers}))
        self._experts = any(wanted.experts for wanted in self._wanted)
        by_params = np.array([w.prompt != "none" or w.experts for w in self._wanted], np.bool_)
        asking = by_params[table.params_id] & (workload.samples > 0)
        self._capture = PromptCapture(
            workload.tree, np.zeros(len(table), np.int64), np.where(asking, np.diff(table.offsets), 0)
        )
        self._masks = _node_masks(workload, [self._mask(w) for w in self._wanted], asking)
        self._needs = cache(self._decode)
        self._running: dict[int, SampleStates] = {}

    @property
    def nbytes(self) -> int:
        """Bytes kept of prompts now."""
        return self._capture.nbytes

    def begin(self, sequence: int, request: Request) -> None:
        """A sample has begun."""
        wanted = self._wanted[self._params_id[request.index]]
        if wanted.states is not None or wanted.experts:
            places = np.array([self._layers.index(layer) for layer in wanted.layers], np.int64)
            self._running[sequence] = SampleStates(request, wanted, places)

    def taps(self, plan: StepPlan, device: Device) -> PendingStates | None:
        """What is wanted of a step that is about to be issued; None where that is nothing.

        The model is to fill the taps in it, then `send` takes it, and, when the step before has been read, `keep`.
        """
        pieces = self._capture.pieces(plan)
        rows = [np.arange(piece.flat, piece.flat + len(piece)) for piece in pieces]
        count = sum(map(len, rows))
        draws: list[_Draw] = []
        place: dict[int, int] = {}
        for sample in self._kept(plan.samples):
            draws.append(_Draw(self._running[sample.sequence], place.setdefault(sample.token, len(place))))
        rows.append(np.fromiter(place, np.int64, len(place)))
        index = np.concatenate(rows).astype(np.int64, copy=False)
        if not len(index):
            return None
        try:
            (uploaded,) = device.upload(index)
        except BaseException:
            self._capture.undo(pieces)
            raise
        return PendingStates(Taps(uploaded, plan.tokens, self._layers, self._experts), pieces, draws, count)

    def _kept(self, samples: SampleRows) -> Iterable[SampleRow]:
        """Draws of samples that want something of it."""
        if not self._running:
            return ()
        wanted = np.isin(samples.numbers, np.fromiter(self._running, np.int64, len(self._running)))
        return SampleRows(samples.numbers[wanted], samples.tokens[wanted])

    def send(self, pending: PendingStates, ring: OutputRing) -> None:
        """Begin to copy what the model has put into the taps to the host."""
        taps = pending.taps
        self._formats.update((layer, values.dtype) for layer, values in taps.states.items())
        pending.ring = ring
        batch: list[tuple[Tensor, Callable[[Stored], None]]] = []
        size = 0
        for values, take in self._wanted_of(pending):
            step = max(1, CHUNK_BYTES // max(1, values[:1].nbytes))
            for first, part in enumerate(torch.split(values, step)):
                if batch and size + part.nbytes > CHUNK_BYTES:
                    pending.sent = _send(ring, batch)
                    batch, size = [], 0
                batch.append((part, partial(take, first * step)))
                size += part.nbytes
        if batch:
            pending.sent = _send(ring, batch)
        taps.states, taps.routed = {}, None

    def keep(self, pending: PendingStates) -> None:
        """Take a step's values, in the order of the steps. What a sample drew after its end goes nowhere: `finish` has
        let go of it.
        """
        if pending.ring is not None:
            pending.ring.read(pending.sent)
        for (node, layer), total in pending.sums.items():
            if self._capture.users(node):
                arrays = self._capture.node(node).arrays
                before = arrays.get(f"sum {layer}")
                arrays[f"sum {layer}"] = total if before is None else total + before.astype(np.float64, copy=False)
        for draw in pending.draws:
            draw.sample.take(draw.states, draw.routed)

    def withdraw(self, pending: PendingStates) -> None:
        """The latest step that `taps` was called for has failed and will be issued anew; it is not to be kept.

        Rows of it that come in all the same are overwritten by the new ones.
        """
        self._capture.undo(pending.pieces)
        # What is on its way holds on to `pending`, but nothing on the device that the next try needs room for.
        pending.taps.states, pending.taps.routed = {}, None

    def _wanted_of(self, pending: PendingStates) -> Iterator[tuple[Tensor, Callable[[int, Stored], None]]]:
        """What somebody wants of the filled taps, each with what takes it: a first row, and the rows from there."""
        states, routed, count = pending.taps.states, pending.taps.routed, pending.prompt_rows
        needs = [self._needs(self._masks[piece.node]) for piece in pending.pieces]
        for layer in self._layers:
            if any(layer in need.rows or layer in need.sums for need in needs):
                yield states[layer][:count], partial(self._take_prompt, pending, layer)
        if routed is not None and any(need.experts for need in needs):
            yield routed[:count], partial(self._take_prompt_experts, pending)
        if any(draw.sample.wanted.draws != "none" for draw in pending.draws):
            drawn = [states[layer][count:] for layer in self._layers]
            # Layers may differ in their format; the widest holds all of them exactly.
            widest = reduce(torch.promote_types, (values.dtype for values in drawn))
            stacked = torch.stack([values.to(widest) for values in drawn], dim=1)  # [D, L, H]
            yield stacked, partial(_take_drawn, pending)
        if routed is not None and any(draw.sample.wanted.experts for draw in pending.draws):
            yield routed[count:], partial(_take_drawn_experts, pending)

    def _take_prompt(self, pending: PendingStates, layer: int, first: int, values: Stored) -> None:
        """Keep rows or sums of the tapped rows [first, first + len(values)) of a layer."""
        for piece, needs, rows in self._overlapped(pending, first, values):
            if layer in needs.rows:
                self._capture.put(piece, f"rows {layer}", rows)
            if layer in needs.sums:
                total = floats(rows).sum(axis=0, dtype=np.float64)
                key = piece.node, layer
                pending.sums[key] = total + pending.sums.get(key, 0.0)

    def _take_prompt_experts(self, pending: PendingStates, first: int, values: Stored) -> None:
        for piece, needs, rows in self._overlapped(pending, first, values):
            if needs.experts:
                self._capture.put(piece, _EXPERTS, rows)

    def _overlapped(
        self, pending: PendingStates, first: int, values: Stored
    ) -> Iterator[tuple[Piece, _NodeNeeds, Stored]]:
        """The parts of pieces whose tapped rows are among [first, first + len(values)), as far as still wanted."""
        at = -first
        for piece in pending.pieces:
            low, high = max(0, at), min(len(values), at + len(piece))
            if low < high and self._capture.users(piece.node):
                start = piece.start + low - at
                part = Piece(piece.node, start, start + high - low, piece.flat + low - at)
                yield part, self._needs(self._masks[piece.node]), values[low:high]
            at += len(piece)

    def finish(self, sequence: int, drawn: int) -> tuple[list[StateBlock] | None, npt.NDArray[np.int32] | None]:
        """A sample has ended with `drawn` tokens.

        Returns:
            Its states by layer, and its routed experts, flat; None for what it did not ask for.
        """
        kept = self._running.pop(sequence, None)
        if kept is None:
            return None, None
        kept.end(drawn)
        blocks = None if kept.wanted.states is None else [self._block(kept, n) for n in kept.wanted.layers]
        routed = None
        if kept.wanted.experts:
            prompt = self._capture.gather(kept.request.index, _EXPERTS)
            routed = np.concatenate([prompt.reshape(-1), *(one.reshape(-1) for one in kept.routed[1:])])
        return blocks, routed

    def drop(self, sequence: int) -> None:
        """A sample has ended in an error: nothing of it is returned."""
        self._running.pop(sequence, None)

    def release(self, request: int) -> None:
        """All samples of a request have ended."""
        if self._capture.wants(request):
            self._capture.release(request)

    def _block(self, kept: SampleStates, layer: int) -> StateBlock:
        asked = kept.wanted.states
        assert asked is not None
        length = len(kept.request.prompt_ids)
        start = length - 1 if asked.tokens == "output" else 0
        if kept.wanted.draws == "first":
            start = length - 1
        elif kept.wanted.draws == "last":
            start = max(length - 1, length + kept.drawn - 2)
        pooled = asked.pool == "mean" and asked.tokens != "last"
        values = self._mean(kept, layer) if pooled else self._rows(kept, layer)
        dtype = "float32" if self._exact else str(self._formats[layer]).removeprefix("torch.")
        return StateBlock(layer, asked.tokens, start, values, dtype)

    def _rows(self, kept: SampleStates, layer: int) -> Floats:
        """[rows, H] of the span, or the one that a pool takes."""
        drawn, place = kept.rows, kept.wanted.layers.index(layer)
        if kept.wanted.draws == "every":
            drawn = drawn[1:] if kept.wanted.prompt == "rows" else drawn[: kept.drawn]
        parts = [np.stack([one[place] for one in drawn])] if drawn else []
        if kept.wanted.prompt == "rows":
            parts.insert(0, self._capture.gather(kept.request.index, f"rows {layer}"))
        if len({part.dtype for part in parts}) > 1:
            parts = [floats(part) for part in parts]
        return floats(np.concatenate(parts)) if parts else np.zeros((0, self._hidden), np.float32)

    def _mean(self, kept: SampleStates, layer: int) -> Floats:
        """[1, H], summed in float64; not-a-number for an output that ended before its first token."""
        total: Sums = np.zeros(self._hidden)
        if kept.sums is not None:
            total += kept.sums[kept.wanted.layers.index(layer)]
        count = kept.drawn
        if kept.wanted.prompt == "sum":
            for rows, _ in self._capture.path(kept.request.index):
                total += rows.arrays[f"sum {layer}"].astype(np.float64, copy=False)
            count = len(kept.request.prompt_ids) + (max(0, kept.drawn - 1) if kept.wanted.draws == "sum" else 0)
        mean = torch.from_numpy(total / count if count else np.full_like(total, np.nan))[None]  # [1, H]
        rounded = mean.float() if self._exact else mean.to(self._formats[layer]).float()
        return rounded.numpy()

    def _mask(self, wanted: Wanted) -> int:
        """What is kept of prompts, as bits: rows by layer, sums by layer, experts."""
        bits = 0
        shift = {"none": -1, "rows": 0, "sum": len(self._layers)}[wanted.prompt]
        for layer in wanted.layers if shift >= 0 else ():
            bits |= 1 << (self._layers.index(layer) + shift)
        return bits | wanted.experts << 2 * len(self._layers)

    def _decode(self, mask: int) -> _NodeNeeds:
        count = len(self._layers)
        rows = frozenset(layer for i, layer in enumerate(self._layers) if mask >> i & 1)
        sums = frozenset(layer for i, layer in enumerate(self._layers) if mask >> (i + count) & 1)
        return _NodeNeeds(rows, sums, bool(mask >> 2 * count & 1))


def state_keeper(workload: Workload, spec: ModelSpec, *, exact: bool) -> StateKeeper | None:
    """A keeper, where some row asks for anything."""
    if not any(_asks(params) for params in workload.table.params):
        return None
    return StateKeeper(workload, spec, exact=exact)


def _asks(params: SamplingParams) -> bool:
    return params.return_hidden_states is not None or params.return_routed_experts


def _node_masks(workload: Workload, by_params: list[int], asking: npt.NDArray[np.bool_]) -> list[int]:
    """[nodes] what the requests at or below each node ask for."""
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


def _send(ring: OutputRing, batch: list[tuple[Tensor, Callable[[Stored], None]]]) -> int:
    """Send tensors together, each to be handed to its own taker."""
    takers = [take for _, take in batch]

    def take(arrays: list[npt.NDArray[Any]]) -> None:
        for taker, values in zip(takers, arrays, strict=True):
            taker(values)

    return ring.send([values for values, _ in batch], take)


def _take_drawn(pending: PendingStates, first: int, values: Stored) -> None:
    """Hand the samples their layers of [d, L, H], the states of the draws from row `first` on."""
    for draw in pending.draws:
        if first <= draw.row < first + len(values) and draw.sample.wanted.draws != "none":
            draw.states = values[draw.row - first][draw.sample.places]  # a copy


def _take_drawn_experts(pending: PendingStates, first: int, values: Stored) -> None:
    for draw in pending.draws:
        if first <= draw.row < first + len(values) and draw.sample.wanted.experts:
            draw.routed = values[draw.row - first].copy()
