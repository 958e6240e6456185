"""Hidden states and routed experts: which flat tokens of a step are kept, and what a finished sample is handed.

The state that produced an output token is that of the flat token it is drawn from, in whatever step, chunk or
recomputation that is. States of prompt tokens are kept by prefix-tree node (`PromptCapture`), so that shared ones are
computed, copied and held once; where only their mean is wanted their sum is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.capture import Piece, PromptCapture
from batchgen.engine.planning import Workload
from batchgen.models.base import ModelSpec, Taps
from batchgen.params import HiddenStates, SamplingParams
from batchgen.plan.types import StepPlan
from batchgen.request import Request, StateBlock

__all__ = ["StateKeeper", "state_keeper"]

Floats = npt.NDArray[np.float32]
Sums = npt.NDArray[np.float64]
Stored = npt.NDArray[Any]
"""Values in the model's own format; numpy has no bfloat16, so its bits stand in uint16."""

Draws = Literal["none", "first", "last", "every", "sum"]

_EXPERTS: Final = "experts"


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What one set of parameters asks for."""

    states: HiddenStates | None
    experts: bool

    @property
    def layers(self) -> tuple[int, ...]:
        return () if self.states is None else self.states.layers

    @property
    def prompt(self) -> Literal["none", "rows", "sum"]:
        """What is kept of the prompt's states. The last token's is that of the first draw."""
        if self.states is None or self.states.tokens in ("output", "last") or self.states.pool == "last":
            return "none"
        return "sum" if self.states.pool == "mean" else "rows"

    @property
    def draws(self) -> Draws:
        """What is kept of the states that tokens are drawn from."""
        if self.states is None:
            return "none"
        tokens, pool = self.states.tokens, self.states.pool
        if tokens == "prompt":
            return "first" if pool == "last" else "none"
        if tokens == "last" or pool == "last":
            return "last"
        return "sum" if pool == "mean" else "every"


@dataclass(slots=True)
class _Kept:
    """What a running sample keeps of the tokens it draws from."""

    request: Request
    wanted: _Wanted
    count: int = 0
    """Draws kept, without the latest."""
    rows: dict[int, list[Stored]] = field(default_factory=dict)
    """By layer: [H] of every draw, or of a single one."""
    sums: dict[int, Sums] = field(default_factory=dict)
    """By layer: [H]; without the first draw, where the prompt's sum has it."""
    routed: list[npt.NDArray[np.int32]] = field(default_factory=list)
    """[MoE layers, K] of every draw"""
    latest: tuple[dict[int, Stored], npt.NDArray[np.int32] | None] | None = None
    """[H] by layer and choices of the latest draw, of which only the next step or the end tells whether it counts."""
    drawn: int = 0
    """C, once the sample has ended."""

    def take(self, states: dict[int, Stored], routed: npt.NDArray[np.int32] | None) -> None:
        """Take a draw: `states` [H] by layer."""
        self._keep_latest()
        needed = self.wanted.layers if self.wanted.draws != "none" else ()
        experts = routed.copy() if routed is not None and self.wanted.experts else None
        self.latest = {layer: states[layer].copy() for layer in needed}, experts

    def end(self, drawn: int) -> None:
        """The sample has ended with `drawn` tokens; a draw past them was dropped and does not count.

        The first draw's states do, also where no token came of it: they are those of the prompt's last token.
        """
        if self.count < max(1, drawn):
            self._keep_latest()
        self.drawn = drawn

    def _keep_latest(self) -> None:
        if self.latest is None:
            return
        states, routed = self.latest
        for layer, values in states.items():
            if self.wanted.draws == "sum":
                if self.count or self.wanted.prompt != "sum":
                    self.sums[layer] = self.sums.get(layer, 0.0) + _floats(values).astype(np.float64)
            elif self.wanted.draws == "every":
                self.rows.setdefault(layer, []).append(values)
            elif self.wanted.draws == "last" or not self.count:
                self.rows[layer] = [values]
        if routed is not None:
            self.routed.append(routed)
        self.count += 1


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
        self._wanted = [_Wanted(p.return_hidden_states, p.return_routed_experts) for p in table.params]
        self._params_id = table.params_id.data
        self._device, self._exact = spec.device, exact
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
        self._running: dict[int, _Kept] = {}
        self._pieces: list[Piece] = []
        self._draws: list[tuple[_Kept, int]] = []
        """Samples that draw in this step, with the places of their tokens among the tapped rows."""

    @property
    def nbytes(self) -> int:
        """Bytes kept of prompts now."""
        return self._capture.nbytes

    def begin(self, sequence: int, request: Request) -> None:
        """A sample has begun."""
        wanted = self._wanted[self._params_id[request.index]]
        if wanted.states is not None or wanted.experts:
            self._running[sequence] = _Kept(request, wanted)

    def taps(self, plan: StepPlan) -> Taps | None:
        """The taps of a step; None where nothing of it is wanted."""
        self._pieces = self._capture.pieces(plan)
        self._draws = []
        rows = [np.arange(piece.flat, piece.flat + len(piece)) for piece in self._pieces]
        count = sum(map(len, rows))
        place: dict[int, int] = {}
        for sample in plan.samples if self._running else ():
            kept = self._running.get(sample.sequence)
            if kept is not None:
                self._draws.append((kept, count + place.setdefault(sample.token, len(place))))
        rows.append(np.fromiter(place, np.int64, len(place)))
        index = torch.from_numpy(np.concatenate(rows).astype(np.int64))
        return Taps(index.to(self._device), plan.tokens, self._layers, self._experts) if len(index) else None

    def keep(self, taps: Taps) -> None:
        """Take what the model put into the step's taps."""
        states = {layer: _stored(values) for layer, values in taps.states.items()}
        self._formats = {layer: values.dtype for layer, values in taps.states.items()}
        routed = None if taps.routed is None else taps.routed.cpu().numpy()
        at = 0
        for piece in self._pieces:
            span = slice(at, at + len(piece))
            at = span.stop
            needs = self._needs(self._masks[piece.node])
            for layer in needs.rows:
                self._capture.put(piece, f"rows {layer}", states[layer][span])
            for layer in needs.sums:
                arrays = self._capture.node(piece.node).arrays
                total = _floats(states[layer][span]).sum(axis=0, dtype=np.float64)
                arrays[f"sum {layer}"] = total + arrays.get(f"sum {layer}", 0.0)
            if needs.experts and routed is not None:
                self._capture.put(piece, _EXPERTS, routed[span])
        for kept, row in self._draws:
            drawn = {layer: values[row] for layer, values in states.items()}
            kept.take(drawn, None if routed is None else routed[row])

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

    def _block(self, kept: _Kept, layer: int) -> StateBlock:
        asked = kept.wanted.states
        assert asked is not None
        length = len(kept.request.prompt_ids)
        start = length - 1 if asked.tokens == "output" else 0
        if kept.wanted.draws == "first":
            start = length - 1
        elif kept.wanted.draws == "last":
            start = max(length - 1, length + kept.drawn - 2)
        if asked.pool == "mean" and asked.tokens != "last":
            values = self._mean(kept, layer)
        else:
            values = _floats(self._rows(kept, layer))
        dtype = "float32" if self._exact else str(self._formats[layer]).removeprefix("torch.")
        return StateBlock(layer, asked.tokens, start, values, dtype)

    def _rows(self, kept: _Kept, layer: int) -> Stored:
        """[rows, H] of the span, or the one that a pool takes."""
        drawn = kept.rows.get(layer, [])
        if kept.wanted.draws == "every":
            drawn = drawn[1:] if kept.wanted.prompt == "rows" else drawn[: kept.drawn]
        parts = [np.stack(drawn)] if drawn else []
        if kept.wanted.prompt == "rows":
            parts.insert(0, self._capture.gather(kept.request.index, f"rows {layer}"))
        return np.concatenate(parts) if parts else np.zeros((0, self._hidden), np.float32)

    def _mean(self, kept: _Kept, layer: int) -> Floats:
        """[1, H], summed in float64; not-a-number for an output that ended before its first token."""
        total: Sums = np.zeros(self._hidden) + kept.sums.get(layer, 0.0)
        count = kept.drawn
        if kept.wanted.prompt == "sum":
            for rows, _ in self._capture.path(kept.request.index):
                total += rows.arrays[f"sum {layer}"].astype(np.float64, copy=False)
            count = len(kept.request.prompt_ids) + (max(0, kept.drawn - 1) if kept.wanted.draws == "sum" else 0)
        mean = torch.from_numpy(total / count if count else np.full_like(total, np.nan))[None]  # [1, H]
        rounded = mean.float() if self._exact else mean.to(self._formats[layer]).float()
        return rounded.numpy()

    def _mask(self, wanted: _Wanted) -> int:
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


def _stored(values: Tensor) -> Stored:
    """[S, H] on the host."""
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).cpu().numpy().view(np.uint16)
    found: Stored = values.cpu().numpy()
    return found


def _floats(values: Stored) -> Floats:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)
