"""Turns a `StepPlan` into one step's arrays on the host, and these into its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.decode_table import DecodeTable
from batchgen.engine.row_table import Rows, RowTable
from batchgen.kernels.device import Device
from batchgen.kernels.lora import LoraStep, lora_step
from batchgen.kernels.types import AttentionBatch, ChunkPages
from batchgen.models.base import TokenEmbeds
from batchgen.plan.types import PrefillChunk, StepPlan
from batchgen.request import RequestTable

__all__ = ["StepArrays", "StepBatch", "fed", "lay_out_step"]

Int64 = npt.NDArray[np.int64]

_NOWHERE: Final = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Tensors of one step, packed without padding."""

    input_ids: Tensor
    """[T] int64; anything where `source` says that the id is on the device alone"""
    positions: Tensor
    """[T] int64"""
    attention: AttentionBatch
    logit_rows: Tensor | None
    """[U] int64: the flat tokens whose logits are needed, each once; None: all of them, in order"""
    sample_rows: Tensor | None
    """[R] int64 for each `SampleRow`, its place among `logit_rows`; None: one row each, in order"""
    drawn: Tensor
    """[R] int64: tokens that each `SampleRow`'s sequence has drawn before"""
    source: Tensor | None = None
    """[T] int64: place among the last step's draws of the token to feed, -1 where `input_ids` has it; None: nowhere"""
    lora: LoraStep | None = None
    """tokens by adapter; None where no token has one"""
    embeds: TokenEmbeds | None = None
    """tokens that come as embeddings; None where there are none"""

    def feed(self, last: Tensor | None) -> Tensor:
        """[T] the step's input ids, given the last step's draws [R'] int64 on the device."""
        return self.input_ids if self.source is None or last is None else fed(self.input_ids, self.source, last)


def fed(ids: Tensor, source: Tensor, last: Tensor) -> Tensor:
    """[T] input ids: `ids` [T], or the token at `source` [T] of `last` [R'] where that is not -1; all int64."""
    return torch.where(source < 0, ids, last[source.clamp(min=0)])


@dataclass(frozen=True, slots=True)
class StepArrays:
    """One step laid out on the host, packed without padding. What is not said here is as in `StepBatch`."""

    ids: Int64
    positions: Int64
    slots: Int64
    """[T] where each token's key and value go"""
    source: Int64 | None
    logit_rows: Int64
    """[U]"""
    sample_rows: Int64 | None
    drawn: Int64
    attention: AttentionBatch
    """its slots are set by `upload`"""
    adapters: npt.NDArray[np.int32] | None
    """[T] -1 for none; None: the job has none"""
    embeds: tuple[Int64, npt.NDArray[np.float32]] | None
    """rows and values"""

    @property
    def decodes_alone(self) -> bool:
        """Whether each flat token is a decode row that is drawn for, in order, and goes through no adapter."""
        if self.attention.chunks or self.sample_rows is not None or not len(self.ids):
            return False
        if self.adapters is not None and bool((self.adapters >= 0).any()):
            return False
        return self.all_drawn

    @property
    def all_drawn(self) -> bool:
        """Whether the logits of every flat token are needed, in order."""
        return len(self.logit_rows) == len(self.ids) and bool((np.diff(self.logit_rows) == 1).all())

    def upload(self, device: Device) -> StepBatch:
        """The step's tensors, in one transfer."""
        arrays = [self.ids, self.positions, self.slots, self.logit_rows, self.drawn]
        arrays += [array for array in (self.sample_rows, self.source) if array is not None]
        ids, positions, slots, logit_rows, drawn, *others = device.upload(*arrays)
        self.attention.slot_mapping, self.attention.device = slots, device
        return StepBatch(
            input_ids=ids,
            positions=positions,
            attention=self.attention,
            logit_rows=None if self.all_drawn else logit_rows,
            sample_rows=others[0] if self.sample_rows is not None else None,
            drawn=drawn,
            source=others[-1] if self.source is not None else None,
            lora=None if self.adapters is None else lora_step(self.adapters, device),
            embeds=None if self.embeds is None else TokenEmbeds(*device.upload(*self.embeds)),
        )


def lay_out_step(
    plan: StepPlan,
    table: RequestTable,
    running: RowTable,
    decodes: DecodeTable,
    page_size: int,
    adapter: npt.NDArray[np.int32] | None = None,
    unread: Rows | None = None,
) -> StepArrays:
    """Lay out the plan's chunks in order, then its decode rows.

    Args:
        plan: the step.
        table: every prompt of the job.
        running: at least the plan's sequences.
        decodes: told of every step of the job, in order.
        page_size: positions per page.
        adapter: [N] the requests', -1 for none.
        unread: [R'] whose last token is known to the device alone, in the order of the last step's draws.
    """
    total = plan.tokens
    ids = np.empty(total, np.int64)
    positions = np.empty(total, np.int64)
    slots = np.empty(total, np.int64)
    source = np.full(total, -1, np.int64) if unread is not None else None
    at, chunks = 0, []
    if plan.prefills:
        at = total - len(plan.decodes)
        chunks = _lay_out_chunks(plan.prefills, table, page_size, ids[:at], positions[:at], slots[:at])
        _feed_chunks(plan.prefills, chunks, table, running, ids, source, unread)
    attention = AttentionBatch(slot_mapping=_NOWHERE, chunks=chunks, decode_start=at)
    rows = running.slots(plan.decodes.numbers)
    if len(rows):
        ids[at:] = running.last[rows]
        if unread is not None and source is not None:
            source[at:] = _places(plan.decodes.numbers, rows, unread)
        positions[at:], slots[at:] = decodes.fill(attention, plan.decodes, plan.groups, rows)
    else:
        decodes.clear()
    logit_rows, sample_rows = _distinct(plan.samples.tokens)
    return StepArrays(
        ids=ids,
        positions=positions,
        slots=slots,
        source=source,
        logit_rows=logit_rows,
        sample_rows=sample_rows,
        drawn=running.drawn[running.slots(plan.samples.numbers)],
        attention=attention,
        adapters=None if adapter is None else _adapters(plan, running.request[rows], adapter),
        embeds=None if table.embeds_id is None else _embeds(plan, table),
    )


def _lay_out_chunks(
    prefills: Sequence[PrefillChunk],
    table: RequestTable,
    page_size: int,
    ids: Int64,
    positions: Int64,
    slots: Int64,
) -> list[ChunkPages]:
    """Fill the chunks' part of a step's columns, together [T'] each: chunks are many, and mostly short.

    Ids are right at prompts' positions alone.
    """
    starts, ends, requests, stored, widths = np.array(
        [(c.start, c.end, c.request, c.store, len(c.pages)) for c in prefills], np.int64
    ).T
    lengths, offsets = ends - starts, table.offsets[requests]
    of = np.repeat(np.arange(len(lengths)), lengths)
    behind = np.cumsum(lengths)
    positions[:] = np.arange(len(positions)) + (starts - behind + lengths)[of]
    ids[:] = table.tokens.take(offsets[of] + positions, mode="clip")
    pages = np.fromiter(chain.from_iterable(c.pages for c in prefills), np.int64, int(widths.sum()))
    edges = np.cumsum(widths)
    slots[:] = positions % page_size
    held = pages[(edges - widths)[of] + positions // page_size] * page_size
    slots += held if stored.all() else held * stored[of]
    columns = zip(
        (behind - lengths).tolist(), lengths.tolist(), ends.tolist(), np.split(pages, edges[:-1]), strict=True
    )
    return [ChunkPages(*column) for column in columns]


def _feed_chunks(
    prefills: Sequence[PrefillChunk],
    chunks: Sequence[ChunkPages],
    table: RequestTable,
    running: RowTable,
    ids: Int64,
    source: Int64 | None,
    unread: Rows | None,
) -> None:
    """The ids of output positions, as far as they are known: the sequence's own; at most one token is on its way."""
    for chunk, laid in zip(prefills, chunks, strict=True):
        if chunk.sequence is None:
            continue
        length = len(table.prompt_ids(chunk.request))
        if chunk.end <= length:
            continue
        first = max(chunk.start - length, 0)
        known = running.output_ids(chunk.sequence)[first : chunk.end - length]
        at, end = laid.q_start + length + first - chunk.start, laid.q_start + laid.q_len
        ids[at : at + len(known)] = known
        if at + len(known) < end:
            assert source is not None
            assert unread is not None
            assert at + len(known) == end - 1, "one token at most is on its way"
            source[end - 1] = np.flatnonzero(unread.numbers == chunk.sequence).item()


def _places(numbers: Int64, slots: Int64, unread: Rows) -> Int64:
    """[R] where each sequence of `numbers`, at `slots`, stands among `unread`; -1 for those that do not."""
    if numbers is unread.numbers:
        return np.arange(len(numbers))
    place = np.full(1 + max(int(slots.max()), int(unread.slots.max())), -1, np.int64)
    place[unread.slots] = np.arange(len(unread))
    found = place[slots]
    # A slot may have been another's at the last step.
    placed: Int64 = np.where((found >= 0) & (unread.numbers[found] == numbers), found, -1)
    return placed


def _embeds(plan: StepPlan, table: RequestTable) -> tuple[Int64, npt.NDArray[np.float32]] | None:
    """The prompt positions of the step's chunks that are given as embeddings."""
    assert table.embeds is not None
    rows, values, at = [], [], 0
    for chunk in plan.prefills:
        span = table.embeds_of(chunk.request)
        end = 0 if span is None else min(chunk.end, span.length)
        if span is not None and chunk.start < end:
            rows.append(np.arange(at, at + end - chunk.start))
            values.append(table.embeds.rows(span.first + chunk.start, span.first + end))
        at += chunk.end - chunk.start
    if not rows:
        return None
    return np.concatenate(rows), np.concatenate(values)


def _adapters(plan: StepPlan, decoding: Int64, adapter: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """[T] the adapter of each flat token, -1 for none; `decoding`: [R] the decode rows' requests.

    All requests below a node have the node's.
    """
    requests, counts = np.array([(c.request, c.end - c.start) for c in plan.prefills], np.int64).reshape(-1, 2).T
    return np.concatenate([np.repeat(adapter[requests], counts), adapter[decoding]])


def _distinct(tokens: Int64) -> tuple[Int64, Int64 | None]:
    """Each flat token once, in order of first use, and where each of `tokens` [R] stands among them: None: in order."""
    if (tokens[1:] > tokens[:-1]).all():
        return tokens.copy(), None  # a plan's columns are not to be uploaded: they stay for later steps
    _, first, rank = np.unique(tokens, return_index=True, return_inverse=True)
    if len(first) == len(tokens):
        return tokens.copy(), None
    order = np.argsort(first)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return tokens[first[order]], place[rank]
