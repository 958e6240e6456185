"""Sampler: turns a step's logits into tokens and logprobs, with logits processing and masks.

`SamplingMetadata.sample` queues work on the device without waiting. `SampledTokens.read` returns the results one step
later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.sampling.logits_processor import LogitsProcessor
from batchgen.engine.sequence import Sequence
from batchgen.engine.step.input_batch import BatchView
from batchgen.engine.step.logprobs import LogprobsGatherer, LogprobsMode, StepLogprobs
from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.kernels.device import Device, Download
from batchgen.kernels.ops import Ops
from batchgen.kernels.sampling import SampleResult, SamplingColumns
from batchgen.kernels.shaping import bitmask_width
from batchgen.request.fields.params import SamplingParams
from batchgen.request.processors import LoadedProcessor

_NAN = ErrorInfo(
    ErrorCode.NAN_LOGITS, "the model's logits contain NaN for this row; try --dtype float32 or check the weights"
)
_MOST_FILL_THREADS = 8
_LEAST_FILLED = 16
"""Fewest masks for which a thread is woken."""
_SLOW_FILL_SECONDS = 0.25
"""Time to fill one step's masks after which the next step fills and times each mask separately."""
_MASKING_FIELDS = ("allowed_token_ids", "bad_words", "suppress_tokens", "custom_logit_processor")


@dataclass(frozen=True, slots=True)
class StepSamples:
    """One step's sampled tokens on the host. Rows are in the order in which they were passed to the sampler."""

    tokens: npt.NDArray[np.int64]
    """[R] sampled token of each row"""
    errors: dict[int, ErrorInfo] = field(default_factory=dict)
    """Row -> error that ends it; the row's token is meaningless"""
    logprobs: tuple[StepLogprobs, ...] = ()
    """Logprobs of the rows that return them"""
    exhausted: frozenset[int] = frozenset()
    """Constrained rows with no token left to sample; their tokens are meaningless"""

    @staticmethod
    def join(parts: Iterable[StepSamples]) -> StepSamples:
        """The tokens of all parts of a step, with rows numbered in order."""
        joined = StepSamples(np.zeros(0, np.int64))
        for part in parts:
            at = len(joined.tokens)
            joined = StepSamples(
                np.concatenate([joined.tokens, part.tokens]),
                joined.errors | {at + row: error for row, error in part.errors.items()},
                (*joined.logprobs, *(replace(each, rows=each.rows + at) for each in part.logprobs)),
                joined.exhausted.union(at + row for row in part.exhausted),
            )
        return joined


@dataclass(frozen=True, slots=True)
class PlainColumns:
    """Sampling parameters of plain rows: rows without logits processing, which return no logprobs or simple ones."""

    sampling: SamplingColumns
    seeds: Tensor
    """[R] int64 seed of each row"""
    samples: Tensor
    """[R] int64 sample index of each row"""
    top_logprobs: int | None = None
    """K of the `plain_logprobs` that the step returns; None: no row returns logprobs"""

    def at(self, num_sampled: Tensor, ops: Ops) -> SamplingColumns:
        """The columns with a step's noise keys; `num_sampled`: [R] int64 tokens sampled for each row so far."""
        if self.sampling.all_greedy:
            return self.sampling
        return self.sampling.with_keys(ops.row_keys(self.seeds, self.samples, num_sampled))


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One step's sampled tokens on the device, with their copy to the host."""

    tokens: Tensor
    """[R] int64 on the device: input ids of the next step"""
    _columns: SamplingMetadata
    _errors: dict[int, ErrorInfo]
    _download: Download

    def read(self) -> StepSamples:
        """Wait for the copy to the host, which is complete one step later."""
        tokens, bad, *arrays = self._download.wait()
        errors = self._errors
        if bad.any():
            errors = dict.fromkeys(np.flatnonzero(bad).tolist(), _NAN) | errors
        exhausted: frozenset[int] = frozenset()
        if self._columns.masked is not None:
            rows = self._columns.masked_rows
            empty = {row: rows[row] for row in compress(rows, arrays.pop(0).tolist())}
            exhausted = frozenset(row for row, sequence in empty.items() if sequence.grammar is not None)
            empty_errors = {row: _no_token_left(empty[row].request.params) for row in empty if row not in exhausted}
            errors = empty_errors | errors
        gatherer = self._columns.logprobs_gatherer
        return StepSamples(tokens, errors, () if gatherer is None else (gatherer.to_host(arrays),), exhausted)


@dataclass(frozen=True, slots=True)
class MaskedLogits:
    """The logits that a mask has overwritten, so that it can be undone."""

    rows: Tensor
    """[m] int64 masked rows"""
    ids: Tensor
    """[m] int64 masked ids"""
    logits: Tensor
    """[m] original logits"""

    def undo(self, logits: Tensor, empty: Tensor, ops: Ops) -> None:
        """Restore the original logits in the rows of `logits` [R, V] where `empty` [R] is true, in place."""
        masked = ops.logits_at(logits, self.rows, self.ids)
        ops.set_logits(logits, self.rows, self.ids, torch.where(empty[self.rows], self.logits, masked))


class EarlyMask:
    """The masks of first tokens of a fixed set of rows, by `min_new_tokens` and `begin_suppress_tokens`.

    The device compares lengths with the number of tokens for which an id is masked.
    """

    def __init__(self, masked: list[Sequence], ops: Ops, rows: Tensor, ids: Tensor, until: Tensor) -> None:
        self._masked = masked
        self._ops = ops
        self._rows = rows
        self._ids = ids
        self._until = until

    @staticmethod
    def of(rows: list[tuple[int, Sequence]], device: Device, ops: Ops) -> EarlyMask | None:
        """The mask of the rows whose next token has one; None if there are none. `rows`: numbers and sequences."""
        masked = [(place, row) for place, row in rows if row.masks_early]
        if not masked:
            return None
        pairs = [(place, token, until) for place, row in masked for token, until in row.masked_ids.items()]
        return EarlyMask([row for _, row in masked], ops, *device.upload(*np.array(pairs, np.int64).T.copy()))

    def apply(self, logits: Tensor, positions: Tensor) -> MaskedLogits | None:
        """Mask the ids of rows whose next token has a mask in `logits` [R, V]; returns None once there are none.

        `positions`: [R] int64 tokens sampled for each row, including those that are not on the host yet.
        """
        if self._masked and not self._masked[-1].masks_early:
            self._masked = [row for row in self._masked if row.masks_early]
        if not self._masked:
            return None
        original = MaskedLogits(self._rows, self._ids, self._ops.logits_at(logits, self._rows, self._ids))
        masked = original.logits.masked_fill(positions[self._rows] < self._until, -torch.inf)
        self._ops.set_logits(logits, self._rows, self._ids, masked)
        return original


class GrammarMasks:
    """Fills the masks of a fixed set of constrained rows in every step, together and on several threads."""

    def __init__(self, rows: list[tuple[int, Sequence]], device: Device, ops: Ops) -> None:
        """`rows`: (row of the step, sample) of the constrained rows."""
        self._device = device
        self._ops = ops
        self._rows = [(row, row.grammar) for _, row in rows if row.grammar is not None]
        (self._places,) = device.upload(np.array([i for i, _ in rows], np.int64))
        # The threads of a device that has returned from its work may still wait actively.
        self._threads = torch.get_num_threads() // (1 if device.asynchronous else 2)
        self._slow = False

    def fill(self, vocab: int) -> Tensor:
        """[M, ceil(V / 32)] int32 packed mask of the tokens that each row allows next.

        Ended rows allow all tokens, because their token is discarded.
        """
        staged = self._device.staging(len(self._rows), bitmask_width(vocab))
        words, began = staged.numpy(), time.perf_counter()
        waiting: dict[int, Any] = {}
        for i, (row, state) in enumerate(self._rows):
            if row.ended:
                words[i] = -1
            elif (matcher := state.batch_matcher) is not None:
                waiting[i] = matcher
            else:
                state.fill(words[i])
        if not (len(waiting) > 1 and not self._slow and _fill_together(waiting, staged, self._threads)):
            for i in waiting:
                self._rows[i][1].fill(words[i])
        self._slow = time.perf_counter() - began > _SLOW_FILL_SECONDS
        return self._device.upload_staged(staged)

    def apply(self, logits: Tensor, masks: Tensor) -> None:
        """Mask the tokens of `logits` [R, V] float32 that `masks` (of `fill`) do not allow, in place."""
        self._ops.apply_bitmask(logits, masks, self._places)


def _fill_together(matchers: Mapping[int, Any], words: Tensor, threads: int) -> bool:
    """Fill the rows of `words` that are given with their matchers; False if one fails, whose row is then to be found.

    xgrammar's own threads receive each row alone, which takes longer than a mask.
    """
    pool, fillers = _fill_threads(max(1, min(_MOST_FILL_THREADS, threads)))
    places, size = list(matchers), max(_LEAST_FILLED, -(-len(matchers) // len(fillers)))
    parts = [
        pool.submit(_fill, filler, matchers, words, places[at : at + size])
        for filler, at in zip(fillers, range(size, len(places), size), strict=False)
    ]
    filled = [_fill(fillers[-1], matchers, words, places[:size])]
    filled += [part.result() for part in parts]
    return all(filled)


def _fill(filler: Any, matchers: Mapping[int, Any], words: Tensor, places: list[int]) -> bool:
    try:
        filler.batch_fill_next_token_bitmask([matchers[place] for place in places], words, places)
    except Exception:
        return False
    return True


@lru_cache(maxsize=1)
def _fill_threads(count: int) -> tuple[ThreadPoolExecutor, list[Any]]:
    # Imported here, because importing xgrammar takes seconds.
    import xgrammar

    return ThreadPoolExecutor(count, "masks"), [xgrammar.BatchGrammarMatcher(1) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """Sampling of R rows, which stays the same from step to step while the rows do."""

    _rows: BatchView
    _device: Device
    _ops: Ops
    columns: PlainColumns
    logprobs_gatherer: LogprobsGatherer | None
    """None: no row returns logprobs"""
    logits_processor: LogitsProcessor | None
    """None: no row has logits rules"""
    early: EarlyMask | None
    """None: no row's next token has such a mask"""
    grammars: GrammarMasks | None
    """None: no row is constrained"""
    masked: Tensor | None
    """[w] int64 rows whose masks may leave no token; None: no such row"""
    masked_rows: dict[int, Sequence]
    """Row -> sequence of these [w] rows"""
    edits_logits: bool
    """Whether logits may be changed, which needs them in float32"""
    needs_host: bool
    """Whether sampling needs all earlier tokens of a row on the host"""

    @staticmethod
    def of(
        rows: BatchView,
        processors: Mapping[str, LoadedProcessor],
        mode: LogprobsMode,
        top_logprobs: int,
        device: Device,
        ops: Ops,
    ) -> SamplingMetadata:
        """The sampling of `rows`; `processors`: custom logit processors by name; `top_logprobs`: most of a row."""
        table, slots = rows.batch, rows.slots
        sampling = SamplingColumns.of(
            table.temperature[slots], table.top_k[slots], table.top_p[slots], table.min_p[slots], device
        )
        edited = [(i, rows[i]) for i in np.flatnonzero(table.edits_logits[slots]).tolist()]
        ruled = [(i, row.logits_state) for i, row in edited if row.logits_state is not None]
        grammars = [(i, row) for i, row in edited if row.grammar is not None]
        masks = {i for i, logits_state in ruled if logits_state.rules.masks}.union(i for i, _ in grammars)
        masked = {i: row for i, row in edited if i in masks}
        changed = frozenset(i for i, logits_state in ruled if logits_state.rules.changes_logits)
        logprob_rows = table.wants_logprobs[slots].nonzero()[0]
        early = [(i, row) for i, row in edited if row.masked_ids]
        logits_processor = LogitsProcessor(ruled, processors, device, ops) if ruled else None
        seeds, samples, places = device.upload(
            table.seed[slots], table.sample[slots], np.fromiter(masked, np.int64, len(masked))
        )
        gatherer = None
        if len(logprob_rows):
            gatherer = LogprobsGatherer(rows, logprob_rows, changed, sampling, mode, device, ops)
        return SamplingMetadata(
            rows,
            device,
            ops,
            columns=PlainColumns(sampling, seeds, samples, None if gatherer is None else top_logprobs),
            logprobs_gatherer=gatherer,
            logits_processor=logits_processor,
            early=EarlyMask.of(early, device, ops) if early else None,
            grammars=GrammarMasks(grammars, device, ops) if grammars else None,
            masked=places if masked else None,
            masked_rows=masked,
            edits_logits=bool(ruled or grammars or early),
            needs_host=bool(grammars) or (logits_processor is not None and logits_processor.needs_host),
        )

    @property
    def plain(self) -> PlainColumns | None:
        """Parameters that sample all rows; None if a row has logits rules or returns others than `plain_logprobs`."""
        gatherer, columns = self.logprobs_gatherer, self.columns
        if self.edits_logits or (gatherer is not None and not gatherer.fits_graph(columns.top_logprobs or 0)):
            return None
        return columns

    def collect(
        self, sampled: SampleResult, logprobs: Iterable[Tensor] = (), download: Download | None = None
    ) -> SampledTokens:
        """Tokens that were sampled with the parameters of `plain`; the tensors must not be written to any more.

        `logprobs`: `plain_logprobs`, if a row returns any; `download` copies tokens [R], rows with NaN logits and
        logprobs to the host; None: start a copy.
        """
        assert sampled.bad is not None
        download = download or self._device.download(sampled.tokens, sampled.bad, *logprobs)
        return SampledTokens(sampled.tokens, self, {}, download)

    def sample(
        self, logits: Tensor, num_sampled: Tensor, read_last: Callable[[], None] = lambda: None
    ) -> SampledTokens:
        """Sample one token per row from the model's logits [R, V], which are changed in place.

        `num_sampled`: [R] int64 on the device, tokens sampled for each row so far; `read_last`: reads the last step, if
        the rows need it, behind everything that can be queued before.
        """
        ops = self._ops
        bad = ops.nan_rows(logits) if self.edits_logits else None
        raw = self.logprobs_gatherer.gather_raw(logits) if self.logprobs_gatherer is not None else None
        if self.edits_logits:
            logits = logits.float()
        sampling = self.columns.at(num_sampled, ops)
        if self.needs_host:
            read_last()
        masks = None if self.grammars is None else self.grammars.fill(ops.vocab_size(logits))
        errors: dict[int, ErrorInfo] = {}
        if self.logits_processor is not None:
            errors = self.logits_processor(logits, self._hidden_from_processors(self.logits_processor, bad))
        # Masks commute; that of first tokens is last, because it is undone for rows that have no token left.
        if self.grammars is not None and masks is not None:
            self.grammars.apply(logits, masks)
        masked_logits = self.early.apply(logits, num_sampled) if self.early is not None else None
        result = ops.sample(logits, sampling)
        tokens = result.tokens  # [R]
        if bad is None:  # a fused sampling kernel reports NaN rows without another pass over the logits
            bad = ops.nan_rows(logits) if result.bad is None else result.bad
        sent = [tokens, bad]
        if self.masked is not None:
            empty = ops.drew_masked(logits, self.masked, tokens)
            # On an asynchronous device, sampling again is cheaper than waiting to learn whether a row is empty.
            if masked_logits is not None and (self._device.asynchronous or bool(empty.any())):
                masked_logits.undo(logits, bad.new_zeros(bad.shape).index_copy_(0, self.masked, empty), ops)
                sent[0] = tokens = ops.sample(logits, sampling).tokens
                empty = ops.drew_masked(logits, self.masked, tokens)
            sent.append(empty)
        if self.logprobs_gatherer is not None:
            sent += self.logprobs_gatherer.gather(logits, tokens, raw)
        download = self._device.download(*sent)
        if self.logits_processor is not None:  # last, because a failure before this point samples again
            self.logits_processor.count(tokens)
        return SampledTokens(tokens, self, errors, download)

    def _hidden_from_processors(self, logits_processor: LogitsProcessor, bad: Tensor | None) -> frozenset[int]:
        """Rows that are not passed to custom processors: rows with NaN logits (this waits) and ended rows."""
        if not logits_processor.has_processors or bad is None:
            return frozenset()
        nan_rows = np.flatnonzero(self._device.download(bad).wait()[0]).tolist()
        return frozenset(nan_rows).union(i for i in logits_processor.places if self._rows[i].ended)


class Sampler:
    """Sampling of the steps of one job."""

    def __init__(
        self,
        device: Device,
        ops: Ops,
        processors: Mapping[str, LoadedProcessor],
        logprobs_mode: LogprobsMode,
        top_logprobs: int,
    ) -> None:
        """`processors`: custom logit processors by name; `top_logprobs`: most of a row of the job."""
        self._device = device
        self._ops = ops
        self._processors = processors
        self._mode: LogprobsMode = logprobs_mode
        self._top_logprobs = top_logprobs
        self._recent: list[tuple[npt.NDArray[np.int64], SamplingMetadata]] = []
        """Sequence ids and sampling of the last two sets of rows: of decode rows, and of chunks behind them."""

    def metadata(self, rows: BatchView) -> SamplingMetadata:
        """Sampling of a step's rows; the same object while the rows stay the same."""
        ids = rows.sequence_ids
        found = next((known for known in self._recent if known[0] is ids or np.array_equal(known[0], ids)), None)
        if found is None:
            found = (
                ids,
                SamplingMetadata.of(rows, self._processors, self._mode, self._top_logprobs, self._device, self._ops),
            )
        self._recent = [found, *(known for known in self._recent if known is not found)][:2]
        return found[1]


def _no_token_left(params: SamplingParams) -> ErrorInfo:
    names = [name for name in _MASKING_FIELDS if getattr(params, name)]
    message = f"{' and '.join(f'`{name}`' for name in names)} left no token to sample; allow more tokens in this row"
    return ErrorInfo(ErrorCode.INVALID_FIELD, message, names[0])
