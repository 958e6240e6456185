"""`InputBatch`: the running sequences as columns, which a step reads and writes for all rows at once.

A sequence keeps one slot while it runs. The tokens of a *plain* sequence are stored in a column, its stop ids and
limit are checked for all rows together, its grammar accepts each, and its `Sequence` receives them when it ends. Other
sequences (text stops, budgets of thoughts) receive each token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from batchgen.engine.sequence import Sequence

Int64 = npt.NDArray[np.int64]

_EMPTY: Final = -1
_INITIAL_SLOTS: Final = 64
_INITIAL_TOKENS: Final = 64
"""Initial token capacity of a row."""
_MAX_STOP_IDS: Final = 16
"""Most stop ids of a plain sequence."""
_MAX_TEMPERATURE: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class BatchView:
    """R sequences of an `InputBatch`, in order."""

    batch: InputBatch
    sequence_ids: Int64
    """[R] sequence ids"""
    slots: Int64
    """[R] slots of the sequences when this view was made; other sequences may use them later"""

    def __len__(self) -> int:
        return len(self.sequence_ids)

    def __getitem__(self, set_slot: int) -> Sequence:
        sequence = self.batch.sequences[int(self.slots[set_slot])]
        assert sequence is not None
        return sequence

    def count_sampled(self) -> None:
        """Count one more sampled token for each sequence."""
        self.batch.num_sampled[self.slots] += 1


@dataclass(frozen=True, slots=True)
class _CachedRows:
    """R plain sequences that all ran at some version of the batch, with their stop columns."""

    rows: BatchView
    version: int
    max_tokens: Int64
    """[R] most tokens of each sequence"""
    stops: Int64
    """[R, K] stop ids"""


class InputBatch:
    """The running sequences of a job. Columns are indexed by slot."""

    def __init__(self) -> None:
        self.sequences: list[Sequence | None] = [None] * _INITIAL_SLOTS
        self.sequence_id = np.full(_INITIAL_SLOTS, _EMPTY, np.int64)
        """Sequence id; -1 if the slot is free or its sequence has ended."""
        self.request = np.zeros(_INITIAL_SLOTS, np.int64)
        self.num_sampled = np.zeros(_INITIAL_SLOTS, np.int64)
        """Number of sampled tokens, including those that are not on the host yet."""
        self.last_token = np.zeros(_INITIAL_SLOTS, np.int64)
        """Last token on the host."""
        self.temperature, self.top_p, self.min_p = np.zeros((3, _INITIAL_SLOTS), np.float32)
        self.top_k, self.seed, self.sample = np.zeros((3, _INITIAL_SLOTS), np.int64)
        self.edits_logits = np.zeros(_INITIAL_SLOTS, np.bool_)
        """Whether sampling changes logits: rules, a grammar or masks of first tokens."""
        self.wants_logprobs = np.zeros(_INITIAL_SLOTS, np.bool_)
        """Whether logprobs of the sampled tokens are computed."""
        self.top_logprobs, self.num_logprob_ids = np.zeros((2, _INITIAL_SLOTS), np.int64)
        """Number of top logprobs, and number of ids in `token_ids_logprob`."""
        self.logprob_ids = np.zeros((_INITIAL_SLOTS, 0), np.int64)
        """[slots, n] ids of `token_ids_logprob`, padded with any valid id."""
        self._plain, self._constrained = np.zeros((2, _INITIAL_SLOTS), np.bool_)
        """Whether a sequence is plain, and whether it is plain and has a grammar."""
        self._num_tokens = np.zeros(_INITIAL_SLOTS, np.int64)
        self._max_tokens = np.zeros(_INITIAL_SLOTS, np.int64)
        self._tokens = np.zeros((_INITIAL_SLOTS, _INITIAL_TOKENS), np.int32)
        """[slots, n] output ids of plain sequences."""
        self._stops = np.full((_INITIAL_SLOTS, 1), _EMPTY, np.int64)
        """[slots, K] stop ids of plain sequences, padded with -1."""
        self._slot_of = np.zeros(_INITIAL_SLOTS, np.int64)
        self._free = list(range(_INITIAL_SLOTS - 1, -1, -1))
        self._rows = BatchView(self, self.sequence_id[:0], self.sequence_id[:0])
        self._version = 0
        """Incremented when a sequence ends."""
        self._cached: _CachedRows | None = None

    def add(self, sequence_id: int, sequence: Sequence, *, plain: bool) -> None:
        """Add a sequence. `plain`: the caller does not need its tokens one by one."""
        if not self._free:
            self._add_slots()
        while sequence_id >= len(self._slot_of):
            self._slot_of = np.concatenate([self._slot_of, np.zeros_like(self._slot_of)])
        slot = self._slot_of[sequence_id] = self._free.pop()
        sequence.set_slot(self.num_sampled_at, slot)
        request, params = sequence.request, sequence.request.params
        stops = sequence.stops.stop_token_ids
        plain = plain and sequence.plain and len(stops) <= _MAX_STOP_IDS
        self.sequences[slot] = sequence
        self.sequence_id[slot], self.request[slot] = sequence_id, request.index
        self.num_sampled[slot] = self.last_token[slot] = self._num_tokens[slot] = 0
        # An infinite float32 would turn a masked token's score (-inf / inf) into NaN.
        self.temperature[slot] = min(params.temperature, _MAX_TEMPERATURE)
        self.top_p[slot], self.min_p[slot] = params.top_p, params.min_p
        self.top_k[slot], self.seed[slot], self.sample[slot] = params.top_k, request.seed, sequence.sample_index
        self.edits_logits[slot], self._plain[slot] = sequence.edits_logits, plain
        self._constrained[slot] = plain and sequence.grammar is not None
        self._max_tokens[slot] = request.max_new_tokens
        self.wants_logprobs[slot] = params.needs_logprobs
        self.top_logprobs[slot], self.num_logprob_ids[slot] = params.top_logprobs_num, len(params.token_ids_logprob)
        if params.token_ids_logprob:
            more = max(0, len(params.token_ids_logprob) - self.logprob_ids.shape[1])
            self.logprob_ids = np.pad(self.logprob_ids, ((0, 0), (0, more)))
            self.logprob_ids[slot, : len(params.token_ids_logprob)] = params.token_ids_logprob
        if plain:
            if len(stops) > self._stops.shape[1]:
                more = len(stops) - self._stops.shape[1]
                self._stops = np.pad(self._stops, ((0, 0), (0, more)), constant_values=_EMPTY)
            self._stops[slot] = _EMPTY
            self._stops[slot, : len(stops)] = list(stops)

    def remove(self, sequence_id: int) -> None:
        """Remove a sequence and free its slot."""
        slot = int(self._slot_of[sequence_id])
        self.sequence_id[slot] = _EMPTY
        self.sequences[slot] = None
        self._version += 1
        self._free.append(slot)

    def num_sampled_at(self, slot: int) -> int:
        """Number of sampled tokens of the sequence in a slot."""
        return int(self.num_sampled[slot])

    def slot(self, sequence_id: int) -> int:
        """The slot of a running sequence."""
        return int(self._slot_of[sequence_id])

    def slots(self, sequence_ids: Int64) -> Int64:
        """[R] the slots of running sequences."""
        slots: Int64 = self._slot_of[sequence_ids]
        return slots

    def rows(self, sequence_ids: Int64) -> BatchView:
        """A view of running sequences; the same object for the same array."""
        if self._rows.sequence_ids is not sequence_ids:
            self._rows = BatchView(self, sequence_ids, self.slots(sequence_ids))
        return self._rows

    def output_ids(self, sequence_id: int) -> npt.NDArray[Any]:
        """[C] output ids of a sequence that are on the host."""
        slot = int(self._slot_of[sequence_id])
        if self._plain[slot]:
            return self._tokens[slot, : self._num_tokens[slot]]
        sequence = self.sequences[slot]
        assert sequence is not None
        return np.asarray(sequence.output_ids, np.int64)

    def append_tokens(self, rows: BatchView, tokens: Int64, excluded: Collection[int]) -> tuple[list[int], int]:
        """Append a step's tokens [R] to the sequences that they were sampled for; some may have ended since.

        `excluded`: rows with a meaningless token, which end for another reason. Returns the rows, in order, whose
        `Sequence` the caller must notify: plain sequences that end with this token (and have received their earlier
        ones), all other running sequences, and `excluded`; and the number of rows that had ended already.
        """
        known, slots = self._cached, rows.slots
        if known is not None and known.rows is rows and known.version == self._version and not excluded:
            self.last_token[slots] = tokens
            return self._append_plain(slots, tokens, known.max_tokens, known.stops).tolist(), 0
        live = self.sequence_id[slots] == rows.sequence_ids
        plain_live = live & self._plain[slots]
        if excluded:
            leaving = [row for row in excluded if plain_live[row]]
            self._hand_over(slots[leaving], 0)
            plain_live[leaving] = False
        if plain_live.all():
            self._cached = _CachedRows(rows, self._version, self._max_tokens[slots], self._stops[slots])
            return self.append_tokens(rows, tokens, ())
        live_rows, places = live.nonzero()[0], plain_live.nonzero()[0]
        self.last_token[slots[live_rows]] = tokens[live_rows]
        slots = slots[places]
        ends = self._append_plain(slots, tokens[places], self._max_tokens[slots], self._stops[slots])
        notified = live & ~plain_live
        notified[places[ends]] = True
        return notified.nonzero()[0].tolist(), len(live) - len(live_rows)

    def _append_plain(self, slots: Int64, tokens: Int64, max_tokens: Int64, stops: Int64) -> Int64:
        """Append tokens [m] of plain sequences in `slots`; return the rows that end.

        Sequences that end receive their earlier tokens. `max_tokens` [m], `stops` [m, K] and grammars end a sequence.
        """
        if not len(slots):
            return slots
        num_tokens = self._num_tokens[slots]
        self._reserve_tokens(int(num_tokens.max()) + 1)
        self._tokens[slots, num_tokens] = tokens
        num_tokens += 1
        self._num_tokens[slots] = num_tokens
        ends = (num_tokens >= max_tokens) | (stops == tokens[:, None]).any(axis=1)
        constrained = (self._constrained[slots] & ~ends).nonzero()[0]
        if len(constrained):
            ends[constrained] = self._accept(slots[constrained], tokens[constrained])
        ended: Int64 = ends.nonzero()[0]
        self._hand_over(slots[ended], 1)
        return ended

    def _accept(self, slots: Int64, tokens: Int64) -> list[bool]:
        """Whether the grammar of each sequence in `slots` [m] ends it, as it accepts its token or fails."""
        ended = []
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            sequence = self.sequences[slot]
            assert sequence is not None
            assert sequence.grammar is not None
            ended.append(sequence.grammar.accept(token) or sequence.grammar.error is not None)
        return ended

    def _hand_over(self, slots: Int64, left: int) -> None:
        """Give plain sequences their tokens so far, except the `left` last ones."""
        for slot in slots.tolist():
            sequence = self.sequences[slot]
            assert sequence is not None
            sequence.output_ids.extend(self._tokens[slot, : self._num_tokens[slot] - left].tolist())

    def mark_ended(self, sequence_id: int) -> None:
        """Mark a sequence as ended: tokens that are still sampled for it are discarded."""
        self.sequence_id[self._slot_of[sequence_id]] = _EMPTY
        self._version += 1

    def _reserve_tokens(self, width: int) -> None:
        have = self._tokens.shape[1]
        if width > have:
            wider = np.zeros((len(self._tokens), max(width, 2 * have)), np.int32)  # untouched zero pages use no memory
            wider[:, :have] = self._tokens
            self._tokens = wider

    def _add_slots(self) -> None:
        count = len(self.sequences)
        self._free = list(range(2 * count - 1, count - 1, -1))
        self.sequences += [None] * count
        for name, values in vars(self).items():
            if isinstance(values, np.ndarray) and name != "_slot_of":
                setattr(self, name, np.concatenate([values, np.zeros_like(values)]))
        self.sequence_id[count:] = _EMPTY
