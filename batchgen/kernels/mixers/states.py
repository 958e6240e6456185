"""Recurrent states: the pool of slots, and the runs of a step's tokens that go on from them.

A run is consecutive tokens of one row: it reads the state of its source slot, and writes that after its last token to
its own slot. Slot 0 holds zeros, the state before any token. A step has *rounds*: no run of a round reads what another
run of it writes. Runs of a round with similar lengths are computed together, padded to the longest.

Shape letters: T tokens of the step, B runs computed together, L their longest length, P slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.device import HOST, Device


@dataclass(frozen=True, slots=True)
class StateSize:
    """Size of one state."""

    shape: tuple[int, ...]
    exact: bool = True
    """Whether it is stored in float32; else in the model's dtype."""

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of one state; `dtype`: the model's."""
        return int(np.prod(self.shape)) * (4 if self.exact else dtype.itemsize)


@dataclass(frozen=True, slots=True)
class StatePool:
    """The recurrent states of every layer: for each, a list of tensors [P, ...], which may be empty."""

    layers: list[list[Tensor]]

    @staticmethod
    def allocate(
        layers: Sequence[Sequence[StateSize]], slots: int, dtype: torch.dtype, device: torch.device
    ) -> StatePool:
        """A zeroed pool of `slots` slots, the first included; `dtype`: the model's."""

        def make(size: StateSize) -> Tensor:
            return torch.zeros(slots, *size.shape, dtype=torch.float32 if size.exact else dtype, device=device)

        return StatePool([[make(size) for size in sizes] for sizes in layers])

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(state.nbytes for states in self.layers for state in states)


@dataclass(frozen=True, slots=True)
class Run:
    """Flat tokens [start, end) that go on from the state in `source`."""

    start: int
    end: int
    source: int
    slot: int | None
    """Where the state after them goes; None: the state in `source` is that after the run's one token, whose result is
    computed once more."""


@dataclass(frozen=True, slots=True)
class RunBatch:
    """Runs that are computed together."""

    rows: Tensor
    """[B, L] int64 flat tokens; those behind the end of a run repeat its last one."""
    lengths: Tensor
    """[B] int64."""
    sources: Tensor
    """[B] int64."""
    slots: Tensor | None
    """[B] int64; 0: the state is not kept, as that of padding; None: the runs only read."""
    inside: Tensor | None
    """[n] int64 places in [B * L] of the tokens of the runs, without those behind their ends; None: all."""

    @property
    def padding(self) -> Tensor | None:
        """[B, L] whether a token is behind the end of its run; None: no token is."""
        if self.inside is None:
            return None
        return torch.arange(self.rows.shape[1], device=self.rows.device) >= self.lengths[:, None]

    def tile(self, start: int, end: int) -> RunBatch | None:
        """The runs, on the CPU, of flat tokens [start, end), which count from `start`; None: there are none."""
        runs = []
        slots = [None] * len(self.rows) if self.slots is None else self.slots.tolist()
        each = zip(self.rows[:, 0].tolist(), self.lengths.tolist(), self.sources.tolist(), slots, strict=True)
        for begin, length, source, slot in each:
            low, high = max(begin, start), min(begin + length, end)
            if low < high:  # behind its first part, a run goes on from its own slot
                runs.append(Run(low - start, high - start, source if low == begin else slot, slot))
        return _batch(runs, HOST) if runs else None

    def keep(self, states: Tensor, after: Tensor) -> None:
        """Store the states [B, ...] after the runs in `states` [P, ...]."""
        states[self.slots] = after
        states[:1].zero_()

    def put(self, out: Tensor, values: Tensor) -> None:
        """Store the runs' results [B, L, ...] in `out` [T, ...]."""
        rows, values = self.rows.flatten(), values.flatten(0, 1)
        if self.inside is not None:
            rows, values = rows[self.inside], values[self.inside]
        out[rows] = values.to(out.dtype)


def chunk_batches(chunks: Iterable[Sequence[Run]], device: Device) -> list[RunBatch]:
    """The batches of a step's chunks, in order, given the runs of each.

    The k-th runs of all chunks are a round: a run may read what the one before it in its chunk writes, and nothing else
    that the step writes.
    """
    groups: dict[tuple[int, bool, int], list[Run]] = {}
    for runs in chunks:
        for number, run in enumerate(runs):
            groups.setdefault((number, run.slot is None, (run.end - run.start - 1).bit_length()), []).append(run)
    return [_batch(group, device) for _, group in sorted(groups.items(), key=lambda item: item[0])]


def decode_batch(first: int, states: Tensor) -> RunBatch:
    """The decode rows of a step, from flat token `first` on; `states`: [2, R] int64 sources and slots, as in `Run`."""
    sources, slots = states
    rows = torch.arange(first, first + len(slots), device=states.device)
    return RunBatch(rows[:, None], torch.ones_like(slots), sources, slots, None)


def _batch(runs: Sequence[Run], device: Device) -> RunBatch:
    starts, ends, sources = np.array([(run.start, run.end, run.source) for run in runs], np.int64).T
    lengths = ends - starts
    longest = int(lengths.max())
    rows = np.minimum(starts[:, None] + np.arange(longest), ends[:, None] - 1)
    stored = runs[0].slot is not None
    more = [np.array([run.slot for run in runs], np.int64)] if stored else []
    if (lengths < longest).any():
        more.append(np.flatnonzero(np.arange(longest) < lengths[:, None]))
    flat, *columns = device.upload(rows.ravel(), lengths, sources, *more)
    slots, inside = columns[2] if stored else None, columns[2 + stored] if len(columns) > 2 + stored else None
    return RunBatch(flat.view(len(runs), longest), columns[0], columns[1], slots, inside)


class States(Protocol):
    """The recurrent states of a step."""

    def of(self, layer: int, index: int, size: StateSize) -> tuple[Tensor, Sequence[RunBatch]]:
        """A state of a layer [P, ...] and the step's runs; `index`: which of the layer's states."""


@dataclass(frozen=True, slots=True)
class PooledStates:
    """The states of a step, in a pool."""

    pool: StatePool
    batches: Sequence[RunBatch]

    def of(self, layer: int, index: int, size: StateSize) -> tuple[Tensor, Sequence[RunBatch]]:
        """See `States.of`."""
        return self.pool.layers[layer][index], self.batches

    def tile(self, start: int, end: int) -> PooledStates:
        """The states of flat tokens [start, end) of the step, which count from `start`."""
        parts = (batch.tile(start, end) for batch in self.batches)
        return PooledStates(self.pool, [part for part in parts if part is not None])
