"""Output logprobs: of the sampled token, of the K most likely tokens and of the ids in `token_ids_logprob`.

In mode `raw` they are the log-softmax of the model's logits at temperature 1, before logits processing. In mode
`processed` they are the logs of the distribution sampled from (greedy rows: after penalties, biases and masks, at
temperature 1).

`LogprobsGatherer` computes the logprobs of a step on the device, `plain_logprobs` those of plain rows within a graph;
`LogprobColumns` stores those of running sequences.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.sequence import Sequence
from batchgen.engine.step.input_batch import BatchView
from batchgen.kernels.device import Array, Device
from batchgen.kernels.ops import Ops
from batchgen.kernels.sampling import SamplingColumns

Int64 = npt.NDArray[np.int64]
Column = npt.NDArray[Any]


class LogprobColumns:
    """Logprobs of running sequences, by their slot in the `InputBatch`.

    A step appends to all sequences at once; a sequence receives its values as arrays when it ends. Values are stored in
    blocks of `block` tokens, so that memory grows with the number of tokens, not with the longest sequence.
    """

    def __init__(self, block: int = 64) -> None:
        self._block = block
        self._length: Int64 = np.zeros(1, np.int64)
        """[slots] number of tokens."""
        self._blocks: Int64 = np.zeros((1, 1), np.int64)
        """[slots, n] blocks of each sequence, in order; entries past its length are unused."""
        self._free: list[int] = []
        self._logprobs: Column = np.zeros(0, np.float32)
        """[blocks * block] logprobs of tokens; the other columns have as many rows."""
        self._top_ids: Column = np.zeros((0, 0), np.int32)
        self._top_logprobs: Column = np.zeros((0, 0), np.float32)
        self._ids_logprobs: Column = np.zeros((0, 0), np.float32)

    @property
    def capacity(self) -> int:
        """Number of tokens that the allocated memory holds."""
        return len(self._logprobs)

    def append(self, rows: BatchView, logprobs: StepLogprobs) -> None:
        """Append a step's logprobs; those of ended sequences are discarded."""
        slots = rows.slots[logprobs.rows]
        running = rows.batch.sequence_id[slots] == rows.sequence_ids[logprobs.rows]
        if not running.all():
            slots, logprobs = slots[running], logprobs.of(running)
        if not len(slots):
            return
        self._reserve(int(slots.max()) + 1, logprobs)
        length = self._length[slots]
        offset = length % self._block
        opens_block = offset == 0
        if opens_block.any():
            self._allocate_blocks(slots[opens_block], length[opens_block] // self._block)
        at = self._blocks[slots, length // self._block] * self._block + offset
        self._logprobs[at] = logprobs.logprobs
        if logprobs.top_logprobs.shape[1]:
            self._top_ids[at, : logprobs.top_logprobs.shape[1]] = logprobs.top_ids
            self._top_logprobs[at, : logprobs.top_logprobs.shape[1]] = logprobs.top_logprobs
        if logprobs.ids_logprobs.shape[1]:
            self._ids_logprobs[at, : logprobs.ids_logprobs.shape[1]] = logprobs.ids_logprobs
        self._length[slots] = length + 1

    def last_logprob(self, slot: int) -> float:
        """Logprob of the last token of a sequence with at least one token."""
        place = int(self._length[slot]) - 1
        return float(self._logprobs[self._blocks[slot, place // self._block] * self._block + place % self._block])

    def finish(self, slot: int, sequence: Sequence) -> None:
        """Move a sequence's logprobs to it and free its blocks; tokens sampled after its end are dropped."""
        if slot >= len(self._length) or not self._length[slot]:
            return
        params, length = sequence.request.params, int(self._length[slot])
        blocks = self._blocks[slot, : -(-length // self._block)]
        at = (blocks[:, None] * self._block + np.arange(self._block)).ravel()[: len(sequence.output_ids)]
        sequence.logprobs = self._logprobs.take(at)
        sequence.top_ids = self._top_ids.take(at, 0)[:, : params.top_logprobs_num].ravel()
        sequence.top_logprobs = self._top_logprobs.take(at, 0)[:, : params.top_logprobs_num].ravel()
        sequence.ids_logprobs = self._ids_logprobs.take(at, 0)[:, : len(params.token_ids_logprob)].ravel()
        # NumPy adds in another order, which may give another last digit than committed rows have.
        sequence.cumulative_logprob = sum(sequence.logprobs.tolist())
        self._free += blocks.tolist()
        self._length[slot] = 0

    def _allocate_blocks(self, slots: Int64, places: Int64) -> None:
        """Allocate one more block for each sequence, as its block number `places` [m]."""
        if len(self._free) < len(slots):
            have = len(self._logprobs) // self._block
            more = max(have, len(slots), 1)
            self._free += range(have + more - 1, have - 1, -1)
            for name in ("_logprobs", "_top_ids", "_top_logprobs", "_ids_logprobs"):
                column = getattr(self, name)
                setattr(self, name, _grown(column, (have + more) * self._block, *column.shape[1:]))
        if int(places.max()) >= self._blocks.shape[1]:
            self._blocks = _grown(self._blocks, len(self._blocks), 2 * int(places.max()))
        self._blocks[slots, places] = self._free[-len(slots) :]
        del self._free[-len(slots) :]

    def _reserve(self, slots: int, logprobs: StepLogprobs) -> None:
        """Grow the columns to `slots` slots and to the widths of a step's logprobs."""
        if slots > len(self._length):
            self._length = _grown(self._length, 2 * slots)
            self._blocks = _grown(self._blocks, 2 * slots, self._blocks.shape[1])
        if logprobs.top_logprobs.shape[1] > self._top_logprobs.shape[1]:
            size = (len(self._logprobs), logprobs.top_logprobs.shape[1])
            self._top_ids, self._top_logprobs = _grown(self._top_ids, *size), _grown(self._top_logprobs, *size)
        if logprobs.ids_logprobs.shape[1] > self._ids_logprobs.shape[1]:
            self._ids_logprobs = _grown(self._ids_logprobs, len(self._logprobs), logprobs.ids_logprobs.shape[1])


def _grown(array: Column, *shape: int) -> Column:
    """`array`, padded with zeros to a larger shape."""
    larger = np.zeros(shape, array.dtype)
    larger[tuple(slice(size) for size in array.shape)] = array
    return larger


LogprobsMode = Literal["raw", "processed"]

_CHUNK = 1 << 18
"""Logits processed at once on a CPU, so that they stay in its cache."""
_WIDE_CHUNK = 1 << 24
"""Logits processed at once on a GPU: 64 MiB of logits and as much of scores."""
GRAPH_TOP = 128
"""Most top logprobs that a graph computes: it does so for all rows of a step, also those that return fewer."""


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Logprobs of W rows of one step, on the host. K and I are the largest of all rows."""

    rows: npt.NDArray[np.int64]
    """[W] rows of the step"""
    logprobs: Array
    """[W] float32 logprob of the sampled token"""
    top_ids: Array
    """[W, K] int64 most likely tokens, most likely first"""
    top_logprobs: Array
    """[W, K] float32 logprobs of `top_ids`; -inf if fewer tokens can be sampled"""
    ids_logprobs: Array
    """[W, I] float32 logprobs of each row's `token_ids_logprob`, in its order"""

    def of(self, some: npt.NDArray[np.bool_]) -> StepLogprobs:
        """The logprobs of the selected rows; `some`: [W] mask."""
        return StepLogprobs(
            self.rows[some], self.logprobs[some], self.top_ids[some], self.top_logprobs[some], self.ids_logprobs[some]
        )


@dataclass(frozen=True, slots=True)
class _GatheredLogprobs:
    """Logprobs of W rows on the device, without those of the sampled tokens."""

    normalizers: Tensor
    """[W] float32 log-sum-exp of the logits"""
    top: tuple[Tensor, Tensor] | None
    """[W, K] ids and logprobs of the most likely tokens"""
    ids_logprobs: Tensor | None
    """[W, I] float32 logprobs of the ids in `token_ids_logprob`"""


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Logprobs gathered before logits processing."""

    gathered: _GatheredLogprobs
    raw_logits: Tensor | None
    """[A, V] logits of the rows whose logits will be changed"""


class LogprobsGatherer:
    """Gathers the logprobs of a fixed set of rows in every step.

    `gather_raw` runs before logits processing, `gather` after sampling, `to_host` when the copy to the host is done.
    """

    def __init__(
        self,
        rows: BatchView,
        places: npt.NDArray[np.int64],
        changed: Collection[int],
        sampling: SamplingColumns,
        mode: LogprobsMode,
        device: Device,
        ops: Ops,
    ) -> None:
        """`places`: [W] rows that return logprobs; `changed`: rows whose logits are changed other than by masks."""
        self._mode = mode
        self._ops = ops
        self._sampling = sampling
        self._rows = places.copy()  # a copy: the device may overwrite uploaded arrays
        batch, slots = rows.batch, rows.slots[places]
        self._top_k = int(batch.top_logprobs[slots].max())
        widest = int(batch.num_logprob_ids[slots].max())
        changed_places = np.isin(places, np.fromiter(changed, np.int64, len(changed))).nonzero()[0]
        self._index, ids, self._changed = device.upload(places, batch.logprob_ids[slots, :widest], changed_places)
        self._ids = ids if widest else None
        self._has_changed = len(changed_places) > 0

    def fits_graph(self, top_k: int) -> bool:
        """Whether the logprobs are among `plain_logprobs` with K = `top_k`, if no row's logits are changed."""
        return self._mode == "raw" and self._ids is None and self._top_k <= top_k <= GRAPH_TOP

    def gather_raw(self, logits: Tensor) -> RawLogprobs | None:
        """Gather raw logprobs from the model's logits [R, V]; None in processed mode."""
        if self._mode == "processed":
            return None
        source = logits if len(self._rows) == logits.shape[0] else logits[self._index]
        raw_logits = source[self._changed] if self._has_changed else None
        return RawLogprobs(self._gather(source, slice(None)), raw_logits)

    def gather(self, logits: Tensor, tokens: Tensor, raw: RawLogprobs | None) -> list[Tensor]:
        """Tensors with the logprobs of all rows, as input for `to_host`.

        `logits`: [R, V], processed; `tokens`: [R] int64 sampled tokens; `raw`: the result of `gather_raw`.
        """
        sampled = tokens[self._index]
        if raw is None:
            return self._processed(logits, sampled)
        ops, normalizers = self._ops, raw.gathered.normalizers
        logprobs = ops.logits_at(logits, self._index, sampled).float() - normalizers  # masks change no sampled token's
        if raw.raw_logits is not None:
            at = self._changed
            logprobs[at] = ops.token_logprobs(raw.raw_logits, sampled[at], normalizers[at])
        return _tensors(logprobs, raw.gathered)

    def _processed(self, logits: Tensor, sampled: Tensor) -> list[Tensor]:
        step = max(1, (_CHUNK if logits.device.type == "cpu" else _WIDE_CHUNK) // self._ops.vocab_size(logits))
        parts, logprobs = [], []
        for begin in range(0, len(self._rows), step):
            part = slice(begin, begin + step)
            rows, columns = self._index[part], self._sampling
            heat, top_k, top_p = columns.temperature[rows], columns.top_k[rows], columns.top_p[rows]
            some, min_p = logits[rows].float(), columns.min_p[rows]
            scores = self._ops.filtered_scores(some, heat, top_k, top_p, min_p, sampled[part])
            parts.append(self._gather(scores, part))
            logprobs.append(self._ops.token_logprobs(scores, sampled[part], parts[-1].normalizers))
        tops = [one.top for one in parts if one.top is not None]
        ids_logprobs = [one.ids_logprobs for one in parts if one.ids_logprobs is not None]
        joined = _GatheredLogprobs(
            torch.cat([one.normalizers for one in parts]),
            (torch.cat([ids for ids, _ in tops]), torch.cat([values for _, values in tops])) if tops else None,
            torch.cat(ids_logprobs) if ids_logprobs else None,
        )
        return _tensors(torch.cat(logprobs), joined)

    def _gather(self, scores: Tensor, part: slice) -> _GatheredLogprobs:
        """Logprobs of scores [w, V], without those of the sampled tokens."""
        normalizers, named = self._ops.log_normalizers(scores), None
        if self._ids is not None:
            rows = torch.arange(len(scores), device=scores.device)[:, None]
            named = self._ops.logits_at(scores, rows, self._ids[part]).float() - normalizers[:, None]
        top = self._ops.top_logprobs(scores, self._top_k, normalizers) if self._top_k else None
        return _GatheredLogprobs(normalizers, top, named)

    def to_host(self, arrays: list[Array]) -> StepLogprobs:
        """The step's logprobs, from the arrays of `gather` on the host, or those of `plain_logprobs` of all rows."""
        if len(arrays[0]) > len(self._rows):
            arrays = [array[self._rows] for array in arrays]
        logprobs, *others = arrays
        none = np.zeros((len(self._rows), 0), np.float32)
        ids_logprobs = others.pop() if self._ids is not None else none
        top_ids, top_logprobs = others or (none, none)
        return StepLogprobs(self._rows, logprobs, top_ids, top_logprobs, ids_logprobs)


def plain_logprobs(logits: Tensor, tokens: Tensor, top_k: int, ops: Ops) -> list[Tensor]:
    """The tensors of `LogprobsGatherer.gather` for all rows of unchanged logits [R, V], with K = `top_k`.

    They are the same bits, and no size depends on the rows, so that a graph can compute them. `tokens`: [R] int64.
    """
    normalizers = ops.log_normalizers(logits)
    top = ops.top_logprobs(logits, top_k, normalizers) if top_k else ()
    return [ops.token_logprobs(logits, tokens, normalizers), *top]


def _tensors(logprobs: Tensor, gathered: _GatheredLogprobs) -> list[Tensor]:
    """Logprobs [W] of the sampled tokens, then the tensors of `gathered` that exist."""
    ids_logprobs = () if gathered.ids_logprobs is None else (gathered.ids_logprobs,)
    return [logprobs, *(gathered.top or ()), *ids_logprobs]
