"""From a step's logits to its tokens: shaping, masks, the draw, and the logprobs that rows asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from batchgen.engine.constraints import GrammarMasks
from batchgen.engine.readout import LogprobsMode, Readout, RowLogprobs
from batchgen.engine.sequence import Sequence
from batchgen.engine.shaping import Shaper
from batchgen.engine.stop_mask import StopMask
from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.kernels.device import device_for
from batchgen.kernels.ops import Ops
from batchgen.kernels.sampling import SamplingColumns
from batchgen.kernels.shaping import masked_draws
from batchgen.params import SamplingParams
from batchgen.processors import LoadedProcessor

__all__ = ["Sampled", "Sampler"]

_NAN = ErrorInfo(
    ErrorCode.NAN_LOGITS,
    "the model's logits held a not-a-number for this row; try --dtype float32 or check the weights",
)
_MASKING = ("allowed_token_ids", "bad_words", "custom_logit_processor")


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step's draws, on the host. Rows are those handed to the sampler, in order."""

    tokens: list[int]
    """[R]"""
    errors: dict[int, ErrorInfo] = field(default_factory=dict)
    """rows that end here, and why; their tokens mean nothing"""
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    """by row, for those that asked"""
    exhausted: frozenset[int] = frozenset()
    """constrained rows that have nothing left to draw; their tokens mean nothing"""


class Sampler:
    """Draws for all rows of a step at once. What depends on the rows alone is kept while they stay the same."""

    def __init__(
        self,
        device: torch.device,
        ops: Ops,
        processors: Mapping[str, LoadedProcessor] | None = None,
        logprobs_mode: LogprobsMode = "raw",
    ) -> None:
        """`processors`: those that rows may name."""
        self._device = device
        self._ops = ops
        self._processors = processors or {}
        self._mode: LogprobsMode = logprobs_mode
        self._rows: list[Sequence] = []
        self._columns: _Columns | None = None

    def __call__(self, logits: Tensor, rows: list[Sequence]) -> Sampled:
        """Draw one token per row.

        Args:
            logits: [R, V] as the model gave them. Not the caller's any more: they may be shaped and masked in place.
            rows: [R] the sequences the rows belong to.
        """
        columns = self._columns
        if columns is None or rows != self._rows:
            columns = self._columns = _Columns.of(rows, self._processors, self._mode, self._device, self._ops)
            self._rows = list(rows)
        if logits.device.type == "cpu":
            logits = logits.float()  # argmax of bfloat16 takes twice as long there, this included
        # First of all: a device still computes the logits while the host fills masks.
        masks = columns.grammars.fill(logits.shape[1]) if columns.grammars is not None else None
        errors = _spoilt(self._ops.nan_rows(logits)) if columns.edits else {}
        raw = columns.readout.before(logits) if columns.readout is not None else None
        if columns.edits:
            logits = logits.float()
        if columns.shaper is not None:
            errors |= columns.shaper(logits, errors)
        # Masks commute; the minimum's is last, since it gives way where they leave nothing.
        if columns.grammars is not None and masks is not None:
            columns.grammars.apply(logits, masks)
        positions = torch.tensor([len(row.output_ids) for row in rows], dtype=torch.int64, device=self._device)
        hidden = columns.minimums.hide(logits, positions) if columns.minimums is not None else None
        sampling = columns.at(positions, self._ops)
        drawn = self._ops.sample(logits, sampling)
        tokens = drawn.tokens  # [R]
        if not columns.edits:  # the draw may have seen already what else would take another reading of the logits
            errors = _spoilt(self._ops.nan_rows(logits) if drawn.bad is None else drawn.bad)
        exhausted: frozenset[int] = frozenset()
        if columns.masked is not None:
            empty = masked_draws(logits, columns.masked, tokens)
            if empty and hidden is not None:
                left = torch.zeros(len(rows), dtype=torch.bool)
                left[empty] = True
                hidden.lift(logits, left.to(self._device))
                tokens = self._ops.sample(logits, sampling).tokens
                empty = masked_draws(logits, columns.masked, tokens)
            exhausted = frozenset(row for row in empty if rows[row].grammar is not None)
            errors = {row: _nothing_left(rows[row].request.params) for row in empty if row not in exhausted} | errors
        logprobs = columns.readout.after(logits, tokens, raw) if columns.readout is not None else {}
        return Sampled(tokens.tolist(), errors, logprobs, exhausted)


def _spoilt(bad: Tensor) -> dict[int, ErrorInfo]:
    return dict.fromkeys(bad.nonzero().flatten().tolist(), _NAN)


def _nothing_left(params: SamplingParams) -> ErrorInfo:
    names = [name for name in _MASKING if getattr(params, name)]
    message = f"{' and '.join(f'`{name}`' for name in names)} left no token to draw; let the row draw another token"
    return ErrorInfo(ErrorCode.INVALID_FIELD, message, names[0])


@dataclass(frozen=True, slots=True)
class _Columns:
    """Everything about the rows that does not change from step to step."""

    seeds: Tensor
    samples: Tensor
    sampling: SamplingColumns
    readout: Readout | None
    """None: no row wants logprobs"""
    shaper: Shaper | None
    """None: no row shapes its logits"""
    minimums: StopMask | None
    """None: no row has ids to mask until its minimum is out"""
    grammars: GrammarMasks | None
    """None: no row is constrained"""
    masked: Tensor | None
    """[w] int64 rows that may be left with nothing; None: no row"""
    edits: bool
    """whether anything may be written to the logits, which takes float32"""

    @staticmethod
    def of(
        rows: list[Sequence],
        processors: Mapping[str, LoadedProcessor],
        mode: LogprobsMode,
        device: torch.device,
        ops: Ops,
    ) -> _Columns:
        params = [row.request.params for row in rows]

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        sampling = SamplingColumns.of(
            [p.temperature for p in params],
            [p.top_k for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            device,
        )
        shaped = [(i, row.shaping) for i, row in enumerate(rows) if row.shaping is not None]
        grammars = [(i, row.grammar) for i, row in enumerate(rows) if row.grammar is not None]
        masked = sorted({i for i, shaping in shaped if shaping.shape.masks}.union(i for i, _ in grammars))
        altered = frozenset(i for i, shaping in shaped if shaping.shape.alters)
        wanted = [(i, p) for i, p in enumerate(params) if p.needs_logprobs]
        minimums = [(i, row) for i, row in enumerate(rows) if row.masked_ids]
        return _Columns(
            seeds=ints([row.request.seed for row in rows]),
            samples=ints([row.sample_index for row in rows]),
            sampling=sampling,
            readout=Readout(wanted, altered, sampling, mode, device, ops) if wanted else None,
            shaper=Shaper(shaped, len(rows), processors, device, ops) if shaped else None,
            minimums=StopMask.of(minimums, device_for(device)) if minimums else None,
            grammars=GrammarMasks(grammars, ops) if grammars else None,
            masked=ints(masked) if masked else None,
            edits=bool(shaped or grammars or minimums),
        )

    def at(self, positions: Tensor, ops: Ops) -> SamplingColumns:
        """The columns with this step's noise keys."""
        if self.sampling.all_greedy:
            return self.sampling
        return self.sampling.with_keys(ops.row_keys(self.seeds, self.samples, positions))
