"""Decode steps as graphs: model, head and plain draws recorded once per padded size, then started as a whole.

A graph runs the launches that it was recorded with, on the tensors of that time. So each has inputs of its own at fixed
addresses, padded to one of a few sizes, which every step overwrites: two transfers or three, however many layers. A
token of padding reads token 0 and nothing else, is stored in the scratch page, and no one reads what comes of it.

A kind of step is run piece by piece the first time, which compiles what has to be compiled, and recorded the second
time. What cannot be recorded (a model that asks the host something, a device that runs out of memory) is run piece by
piece ever after.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.batch import StepArrays, fed
from batchgen.engine.halving import is_out_of_memory
from batchgen.engine.sampler import PlainColumns
from batchgen.kernels.device import Device, Graph
from batchgen.kernels.ops import Ops
from batchgen.kernels.sampling import SamplingColumns
from batchgen.kernels.types import DecodePlanner, DecodeWork
from batchgen.models.base import Model, ModelInput, Taps

__all__ = ["DecodeGraphs", "DecodeResult", "GraphCounts", "padded_rows"]

_SIZES: Final = ((64, 8), (256, 16), (512, 32))
"""(up to, step): numbers of rows that graphs are recorded for, above 8."""
_BEYOND: Final = 64
_MOST_GRAPHS: Final = 64
_DROPPED: Final = 4
"""Graphs kept although they are not used again, as the device may still be at them: two a step, and two steps are under
way at most."""
_MOST_DRAWS: Final = 8192
"""Draws of one step that the next may be fed with."""


def padded_rows(rows: int) -> int:
    """The size that a step of `rows` decode rows is padded to."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = next((step for most, step in _SIZES if rows <= most), _BEYOND)
    return -(-rows // step) * step


@dataclass(slots=True)
class GraphCounts:
    """What was done, in steps."""

    captures: int = 0
    replays: int = 0
    padded: int = 0
    """Rows of padding, over all steps."""
    first: int = 0
    """Steps run piece by piece because they were the first of their kind."""


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """What came of a step of R rows. Good until the next step, but for `tokens` and `bad`."""

    drawn: Tensor
    """[R] int64: tokens drawn before"""
    logits: Tensor | None
    """[R, V], which may be written to; None where tokens were drawn"""
    tokens: Tensor | None
    """[R] int64, the caller's"""
    bad: Tensor | None
    """[R] bool: rows that nothing can be drawn from; the caller's"""


class DecodeGraphs:
    """The graphs of one job."""

    def __init__(
        self, model: Model, planner: DecodePlanner, ops: Ops, device: Device, most: int = _MOST_GRAPHS
    ) -> None:
        """`most`: graphs kept; the one that was not used for longest goes."""
        self._planner = planner
        self._device = device
        self._most = most
        self._shared = _Shared(model, ops, device)
        self._steps: OrderedDict[Hashable, _StaticStep] = OrderedDict()
        self._dropped: deque[_StaticStep] = deque(maxlen=_DROPPED)
        self.counts = GraphCounts()
        self.refused: str | None = None
        """Why nothing is recorded any more."""

    @torch.inference_mode()
    def run(
        self, step: StepArrays, last: Tensor | None, plain: PlainColumns | None, taps: Taps | None
    ) -> DecodeResult | None:
        """Run a step.

        Args:
            step: decode rows alone (`StepArrays.decodes_alone`).
            last: [R'] int64, the last step's draws, where `step.source` names some.
            plain: how to draw; None leaves that to the caller, who gets logits.
            taps: what to keep; filled.

        Returns:
            None where the step has to be run otherwise; then nothing has happened that running it would not undo.
        """
        if self.refused is not None or (last is not None and len(last) > _MOST_DRAWS):
            return None
        try:
            return self._run(step, last, plain, taps)
        except RuntimeError as problem:
            if not isinstance(problem, _CannotCapture) and not is_out_of_memory(problem):
                raise
            self.refused = str(problem)
        self._device.download(self._shared.last[:1]).wait()  # no graph runs any more
        self._steps.clear()
        self._dropped.clear()
        self._shared.logits = None
        self._device.release_cache()
        return None

    def _run(
        self, step: StepArrays, last: Tensor | None, plain: PlainColumns | None, taps: Taps | None
    ) -> DecodeResult:
        rows = len(step.ids)
        padded = padded_rows(rows)
        work = self._planner.plan(step.attention, padded)
        kind = (padded, plain is not None, () if taps is None else (taps.layers, taps.experts))
        static = self._steps.get((kind, work.launches))
        if static is None or not static.attention.refill(work):
            static = _StaticStep(self._shared, self._planner, work, padded, plain is not None, taps)
        static.load(step, last, plain)
        if not static.ran:
            static.body()
            static.ran = True
            self.counts.first += 1
        else:
            if static.graph is None:
                static.graph = self._capture(static)
            static.graph.replay()
            self.counts.replays += 1
        # Where no layer had run before, only now is it known which launches there are.
        self._keep((kind, static.attention.launches), static)
        self.counts.padded += padded - rows
        return static.result(rows, taps)

    def _keep(self, key: Hashable, static: _StaticStep) -> None:
        before = self._steps.get(key)
        if before is not None and before is not static:
            self._dropped.append(before)
        self._steps[key] = static
        self._steps.move_to_end(key)
        while len(self._steps) > self._most:
            self._dropped.append(self._steps.popitem(last=False)[1])

    def _capture(self, static: _StaticStep) -> Graph:
        try:
            graph = self._device.capture(static.body)
        except RuntimeError as problem:
            if is_out_of_memory(problem):
                raise
            first: BaseException = problem
            while isinstance(first.__context__, RuntimeError):  # the end of a spoilt capture fails, too
                first = first.__context__
            why = str(first).strip().split("\n")[0]
            raise _CannotCapture(f"its decode steps cannot be recorded as graphs: {why}") from problem
        self.counts.captures += 1
        return graph


class _CannotCapture(RuntimeError):
    """The model does something that no graph can hold."""


class _Shared:
    """What all graphs of a job have in common: they never run at the same time."""

    def __init__(self, model: Model, ops: Ops, device: Device) -> None:
        self.model = model
        self.ops = ops
        self.device = device
        with torch.inference_mode():
            self.last = torch.zeros(_MOST_DRAWS, dtype=torch.int64, device=device.torch_device)
        self.logits: Tensor | None = None
        """[largest padded size yet, V]"""

    def room_for(self, logits: Tensor) -> Tensor:
        """Where logits [R, V] go that are drawn from outside of a graph: rows beyond count for much."""
        if self.logits is None or len(self.logits) < len(logits):
            self.logits = torch.empty_like(logits)
        return self.logits[: len(logits)]


class _StaticStep:
    """Inputs and outputs at fixed addresses, and what leads from the ones to the others."""

    def __init__(
        self, shared: _Shared, planner: DecodePlanner, work: DecodeWork, padded: int, draws: bool, taps: Taps | None
    ) -> None:
        device = shared.device.torch_device
        self.ran = False
        """Whether the body has run piece by piece."""
        self.graph: Graph | None = None
        self._shared = shared
        self._padded = padded
        # Rows of an even number of int64 begin at multiples of 16 bytes, as kernels like it.
        self._numbers = torch.zeros(5, max(2, padded), dtype=torch.int64, device=device)
        self._ids, self._source, self._positions, slots, self._drawn = self._numbers[:, :padded]
        self.attention = planner.attention(slots, work)
        self._columns = _StaticColumns(padded, device) if draws else None
        self._every = torch.arange(padded, device=device) if taps is not None else None
        self._wanted = None if taps is None else (taps.layers, taps.experts)
        self._logits: Tensor | None = None
        self._out: dict[str, Tensor] = {}

    def load(self, step: StepArrays, last: Tensor | None, plain: PlainColumns | None) -> None:
        """Overwrite the inputs, the lists of attention apart."""
        rows = len(step.ids)
        numbers = np.zeros(tuple(self._numbers.shape), np.int64)
        numbers[1] = -1
        given = (step.ids, step.source, step.positions, step.slots, step.drawn)
        for row, values in zip(numbers, given, strict=True):
            if values is not None:
                row[:rows] = values
        self._shared.device.upload_into(numbers.reshape(-1), self._numbers.view(-1))
        if last is not None and step.source is not None:
            self._shared.last[: len(last)].copy_(last)
        if self._columns is not None and plain is not None:
            self._columns.load(plain)

    def body(self) -> None:
        """The step: all of it work on the device."""
        shared, taps = self._shared, None
        if self._wanted is not None and self._every is not None:
            taps = Taps(self._every, self._padded, *self._wanted)
        ids = fed(self._ids, self._source, shared.last)
        hidden = shared.model.hidden(ModelInput(ids, self._positions, self.attention, taps, ops=shared.ops))
        logits = shared.model.logits(hidden)  # [padded, V]
        if self._columns is not None:
            drawn = shared.ops.sample(logits, self._columns.at(self._drawn, shared.ops))
            self._put("tokens", drawn.tokens)
            self._put("bad", shared.ops.nan_rows(logits) if drawn.bad is None else drawn.bad)
        else:
            if self._logits is None:
                self._logits = shared.room_for(logits)
            self._logits.copy_(logits)
        if taps is not None:
            for layer, states in taps.states.items():
                self._put(f"states {layer}", states)
            if taps.routed is not None:
                self._put("routed", taps.routed)

    def _put(self, name: str, value: Tensor) -> None:
        if name in self._out:
            self._out[name].copy_(value)
        else:
            self._out[name] = value

    def result(self, rows: int, taps: Taps | None) -> DecodeResult:
        """What came of the step, for its first `rows` rows."""
        if taps is not None:
            taps.states = {layer: self._out[f"states {layer}"][taps.rows] for layer in taps.layers}
            taps.routed = self._out["routed"][taps.rows] if "routed" in self._out else None
        return DecodeResult(
            drawn=self._drawn[:rows],
            logits=None if self._logits is None else self._logits[:rows],
            tokens=self._out["tokens"][:rows].clone() if "tokens" in self._out else None,
            bad=self._out["bad"][:rows].clone() if "bad" in self._out else None,
        )


class _StaticColumns:
    """Sampling parameters at fixed addresses. Rows of padding are greedy."""

    def __init__(self, padded: int, device: torch.device) -> None:
        self._loaded: PlainColumns | None = None
        floats = torch.zeros(3, max(4, padded), dtype=torch.float32, device=device)
        ints = torch.zeros(3, max(2, padded), dtype=torch.int64, device=device)
        self._temperature, self._top_p, self._min_p = floats[:, :padded]
        self._top_k, self._seeds, self._samples = ints[:, :padded]

    def load(self, plain: PlainColumns) -> None:
        """Take the rows' parameters, which are on the device already, if they are others than before."""
        if plain is self._loaded:
            return
        self._loaded = plain
        given = plain.sampling
        rows = len(plain.seeds)
        for mine, theirs in (
            (self._temperature, given.temperature),
            (self._top_p, given.top_p),
            (self._min_p, given.min_p),
            (self._top_k, given.top_k),
            (self._seeds, plain.seeds),
            (self._samples, plain.samples),
        ):
            mine[:rows].copy_(theirs)
        self._temperature[rows:].zero_()

    def at(self, drawn: Tensor, ops: Ops) -> SamplingColumns:
        """The columns with the keys of rows that have `drawn` [padded] tokens."""
        keys = ops.row_keys(self._seeds, self._samples, drawn)
        return SamplingColumns(
            self._temperature, self._top_k, self._top_p, self._min_p, keys, greedy_rows=None, draws=()
        )
