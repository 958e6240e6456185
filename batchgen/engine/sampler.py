"""From a step's logits to its tokens: shaping, masks, the draw, and the logprobs that rows asked for.

`Sampler.draw` queues work on the device and waits for nothing; `Draws.read` says a step later what came of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from batchgen.engine.constraints import GrammarMasks
from batchgen.engine.readout import LogprobsMode, Readout, StepLogprobs
from batchgen.engine.row_table import Rows
from batchgen.engine.sequence import Sequence
from batchgen.engine.shaping import Shaper
from batchgen.engine.stop_mask import StopMask
from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.kernels.device import Device, Download
from batchgen.kernels.ops import Ops
from batchgen.kernels.sampling import SamplingColumns
from batchgen.params import SamplingParams
from batchgen.processors import LoadedProcessor

__all__ = ["Draws", "PlainColumns", "Sampled", "Sampler"]

_NAN = ErrorInfo(
    ErrorCode.NAN_LOGITS,
    "the model's logits held a not-a-number for this row; try --dtype float32 or check the weights",
)
_MASKING = ("allowed_token_ids", "bad_words", "custom_logit_processor")


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step's draws, on the host. Rows are those handed to the sampler, in order."""

    tokens: npt.NDArray[np.int64]
    """[R]"""
    errors: dict[int, ErrorInfo] = field(default_factory=dict)
    """rows that end here, and why; their tokens mean nothing"""
    logprobs: tuple[StepLogprobs, ...] = ()
    """of the rows that asked, each once"""
    exhausted: frozenset[int] = frozenset()
    """constrained rows that have nothing left to draw; their tokens mean nothing"""


@dataclass(frozen=True, slots=True)
class PlainColumns:
    """All that the draws of rows depend on which take the logits as they are, and want no logprobs."""

    sampling: SamplingColumns
    seeds: Tensor
    """[R] int64"""
    samples: Tensor
    """[R] int64"""

    def at(self, drawn: Tensor, ops: Ops) -> SamplingColumns:
        """The columns with a step's noise keys; `drawn`: [R] int64 tokens that each row has drawn before."""
        if self.sampling.all_greedy:
            return self.sampling
        return self.sampling.with_keys(ops.row_keys(self.seeds, self.samples, drawn))


@dataclass(frozen=True, slots=True)
class Draws:
    """One step's draws, on the device and on their way to the host."""

    tokens: Tensor
    """[R] int64 on the device: what the next step may be fed with"""
    _columns: _Columns
    _errors: dict[int, ErrorInfo]
    _download: Download

    def read(self) -> Sampled:
        """Wait for the draws, which a step later is no wait."""
        arrays = iter(self._download.wait())
        tokens = next(arrays)
        bad = next(arrays)
        errors = self._errors
        if bad.any():
            errors = dict.fromkeys(np.flatnonzero(bad).tolist(), _NAN) | errors
        exhausted: frozenset[int] = frozenset()
        if self._columns.masked is not None:
            rows = self._columns.masked_rows
            empty = {row: rows[row] for row, spent in zip(rows, next(arrays), strict=True) if spent}
            exhausted = frozenset(row for row, sequence in empty.items() if sequence.grammar is not None)
            spent_rows = {row: _nothing_left(empty[row].request.params) for row in empty if row not in exhausted}
            errors = spent_rows | errors
        readout = self._columns.readout
        return Sampled(tokens, errors, () if readout is None else (readout.found(list(arrays)),), exhausted)


class Sampler:
    """Draws for all rows of a step at once. What depends on the rows alone is kept while they stay the same."""

    def __init__(
        self,
        device: Device,
        ops: Ops,
        processors: Mapping[str, LoadedProcessor] | None = None,
        logprobs_mode: LogprobsMode = "raw",
    ) -> None:
        """`processors`: those that rows may name."""
        self._device = device
        self._ops = ops
        self._processors = processors or {}
        self._mode: LogprobsMode = logprobs_mode
        self._numbers: npt.NDArray[np.int64] | None = None
        self._columns: _Columns | None = None

    def prepare(self, rows: Rows) -> bool:
        """Make ready for a step's rows; whether their draws need to know of each row's tokens so far, all of them."""
        return self._of(rows).needs_host

    def draw(self, logits: Tensor, rows: Rows, drawn: Tensor) -> Draws:
        """Draw one token per row.

        Args:
            logits: [R, V] as the model gave them. Not the caller's any more: they may be shaped and masked in place.
            rows: [R] the sequences the rows belong to.
            drawn: [R] int64 on the device, tokens that each has drawn before.
        """
        columns, ops = self._of(rows), self._ops
        # First of all: a device still computes the logits while the host fills masks.
        masks = columns.grammars.fill(logits.shape[1]) if columns.grammars is not None else None
        bad = ops.nan_rows(logits) if columns.edits else None
        raw = columns.readout.before(logits) if columns.readout is not None else None
        if columns.edits:
            logits = logits.float()
        errors = {} if columns.shaper is None else columns.shaper(logits, self._not_shown(columns.shaper, rows, bad))
        # Masks commute; the minimum's is last, since it gives way where they leave nothing.
        if columns.grammars is not None and masks is not None:
            columns.grammars.apply(logits, masks)
        hidden = columns.minimums.hide(logits, drawn) if columns.minimums is not None else None
        sampling = columns.draws.at(drawn, ops)
        result = ops.sample(logits, sampling)
        tokens = result.tokens  # [R]
        if bad is None:  # the draw may have seen already what else would take another reading of the logits
            bad = ops.nan_rows(logits) if result.bad is None else result.bad
        sent = [tokens, bad]
        if columns.masked is not None:
            empty = ops.drew_masked(logits, columns.masked, tokens)
            # Asking whether there is such a row would be a wait, drawing again is none.
            if hidden is not None and (self._device.asynchronous or bool(empty.any())):
                hidden.lift(logits, bad.new_zeros(bad.shape).index_copy_(0, columns.masked, empty))
                sent[0] = tokens = ops.sample(logits, sampling).tokens
                empty = ops.drew_masked(logits, columns.masked, tokens)
            sent.append(empty)
        if columns.readout is not None:
            sent += columns.readout.after(logits, tokens, raw)
        download = self._device.download(*sent)
        if columns.shaper is not None:  # last of all: what failed before is drawn again
            columns.shaper.count(tokens)
        return Draws(tokens, columns, errors, download)

    def plain(self, rows: Rows) -> PlainColumns | None:
        """What `draw` draws by, the same object for the same rows; None where it does more for some of them."""
        return self._of(rows).plain

    def took(self, tokens: Tensor, bad: Tensor, rows: Rows, download: Download | None = None) -> Draws:
        """Draws that somebody else made by `plain`.

        Args:
            tokens: [R] int64, which nobody writes to any more.
            bad: [R] bool, rows that nothing can be drawn from.
            rows: [R] the sequences the rows belong to.
            download: brings both to the host; None: the device's.
        """
        return Draws(tokens, self._of(rows), {}, download or self._device.download(tokens, bad))

    def _of(self, rows: Rows) -> _Columns:
        columns = self._columns
        if columns is None or self._numbers is None or not _same(rows.numbers, self._numbers):
            columns = self._columns = _Columns.of(rows, self._processors, self._mode, self._device, self._ops)
            self._numbers = rows.numbers
        return columns

    def _not_shown(self, shaper: Shaper, rows: Rows, bad: Tensor | None) -> frozenset[int]:
        """Rows whose logits no processor is shown: spoilt ones, which takes a wait, and ended ones."""
        if not shaper.processes or bad is None:
            return frozenset()
        spoilt = np.flatnonzero(self._device.download(bad).wait()[0]).tolist()
        return frozenset(spoilt).union(i for i in shaper.places if rows[i].ended)


def _same(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> bool:
    return one is other or np.array_equal(one, other)


def _nothing_left(params: SamplingParams) -> ErrorInfo:
    names = [name for name in _MASKING if getattr(params, name)]
    message = f"{' and '.join(f'`{name}`' for name in names)} left no token to draw; let the row draw another token"
    return ErrorInfo(ErrorCode.INVALID_FIELD, message, names[0])


@dataclass(frozen=True, slots=True)
class _Columns:
    """Everything about the rows that does not change from step to step."""

    draws: PlainColumns
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
    masked_rows: dict[int, Sequence]
    """[w], by place"""
    edits: bool
    """whether anything may be written to the logits, which takes float32"""
    needs_host: bool
    """whether a draw depends on what the host makes of the tokens before it"""

    @staticmethod
    def of(
        rows: Rows,
        processors: Mapping[str, LoadedProcessor],
        mode: LogprobsMode,
        device: Device,
        ops: Ops,
    ) -> _Columns:
        table, slots = rows.table, rows.slots
        sampling = SamplingColumns.of(
            table.temperature[slots], table.top_k[slots], table.top_p[slots], table.min_p[slots], device
        )
        special = [(i, rows[i]) for i in np.flatnonzero(table.special[slots]).tolist()]
        shaped = [(i, row.shaping) for i, row in special if row.shaping is not None]
        grammars = [(i, row) for i, row in special if row.grammar is not None]
        masks = {i for i, shaping in shaped if shaping.shape.masks}.union(i for i, _ in grammars)
        masked = {i: row for i, row in special if i in masks}
        altered = frozenset(i for i, shaping in shaped if shaping.shape.alters)
        wanted = table.logprobs[slots].nonzero()[0]
        minimums = [(i, row) for i, row in special if row.masked_ids]
        shaper = Shaper(shaped, processors, device, ops) if shaped else None
        seeds, samples, places = device.upload(
            table.seed[slots], table.sample[slots], np.fromiter(masked, np.int64, len(masked))
        )
        edits = bool(shaped or grammars or minimums)
        return _Columns(
            draws=PlainColumns(sampling, seeds, samples),
            readout=Readout(rows, wanted, altered, sampling, mode, device, ops) if len(wanted) else None,
            shaper=shaper,
            minimums=StopMask.of(minimums, device) if minimums else None,
            grammars=GrammarMasks(grammars, device, ops) if grammars else None,
            masked=places if masked else None,
            masked_rows=masked,
            edits=edits,
            needs_host=bool(grammars) or (shaper is not None and shaper.needs_host),
        )

    @property
    def plain(self) -> PlainColumns | None:
        """None: some row shapes its logits or wants logprobs."""
        return None if self.edits or self.readout is not None else self.draws
