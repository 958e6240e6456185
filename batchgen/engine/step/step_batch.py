"""Inputs of one step: `StepArrays` on the host, laid out from a `StepPlan`, and `StepBatch` on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.media.step import StepEmbeds, StepMedia
from batchgen.engine.parallel.peers import NO_PEERS, Peers
from batchgen.engine.step.decode_table import DecodeTable
from batchgen.engine.step.input_batch import BatchView, InputBatch
from batchgen.engine.workload import JobWorkload
from batchgen.kernels.device import Device
from batchgen.kernels.grouped import restarted
from batchgen.kernels.lora import LoraStep, lora_step
from batchgen.kernels.mixers.states import Run, RunBatch, chunk_batches, decode_batch
from batchgen.kernels.types import AttentionBatch, ChunkPages
from batchgen.models.base import ModelSpec, TokenEmbeds
from batchgen.plan.spans import Spans
from batchgen.plan.step_plan import PrefillChunk, StepPlan
from batchgen.request.table.request_table import RequestTable

Int64 = npt.NDArray[np.int64]

_NO_SLOTS: Final = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Tensors of one step, packed without padding."""

    input_ids: Tensor
    """[T] int64; undefined where `source` is not -1"""
    positions: Tensor
    """[T] int64 position of each token in its sequence"""
    attention: Sequence[AttentionBatch]
    """The step over the pages of each cache group"""
    logit_rows: Tensor | None
    """[U] int64 flat tokens whose logits are needed, each once; None: all of them, in order"""
    sample_rows: Tensor | None
    """[R] int64 index into `logit_rows` of each `SampleRow`; None: one row each, in order"""
    num_sampled: Tensor
    """[R] int64 tokens sampled so far by the sequence of each `SampleRow`"""
    source: Tensor | None = None
    """[T] int64 row of the last step whose sampled token is the input id, -1 where `input_ids` has it; None: all -1"""
    lora: LoraStep | None = None
    """Tokens by adapter; None: no token has one"""
    embeds: TokenEmbeds | None = None
    """Tokens given as embeddings; None: none"""
    rope_positions: Tensor | None = None
    """[A, T] int64 as in `ModelInput`"""
    runs: Sequence[RunBatch] = ()
    """What goes on from recurrent states"""

    def feed(self, last: Tensor | None) -> Tensor:
        """[T] the step's input ids; `last` [R'] int64: tokens of the last step on the device."""
        ids, source = self.input_ids, self.source
        return ids if source is None or last is None else select_input_ids(ids, source, last)


def select_input_ids(ids: Tensor, source: Tensor, last: Tensor) -> Tensor:
    """[T] input ids: `last[source]` where `source` [T] is not -1, else `ids` [T]; all int64, `last` is [R']."""
    return torch.where(source < 0, ids, last[source.clamp(min=0)])


@dataclass(frozen=True, slots=True)
class StepArrays:
    """Arrays of one step on the host, packed without padding. Fields are as in `StepBatch` unless noted."""

    ids: Int64
    positions: Int64
    slots: Sequence[Int64]
    """By cache group: [T] slot mapping, pool slot of each token's key and value"""
    source: Int64 | None
    logit_rows: Int64
    """[U] as in `StepBatch`, never None"""
    sample_rows: Int64 | None
    num_sampled: Int64
    attention: Sequence[AttentionBatch]
    """Slot mappings are set by `upload`"""
    adapters: npt.NDArray[np.int32] | None
    """[T] adapter index, -1 for none; None: the job has no adapters"""
    embeds: StepEmbeds | None
    """Tokens given as embeddings; None: none"""
    rope_positions: Int64 | None = None
    """[A, T] as in `ModelInput`"""
    runs: Sequence[Sequence[Run]] = ()
    """By chunk: its runs of tokens with a state"""
    decode_states: Int64 | None = None
    """[2, R] as in `DecodeRows`; None: the model has no states, or there is no decode row"""

    @property
    def decode_only(self) -> bool:
        """Whether every flat token is a decode row that is sampled for, in order."""
        if self.attention[0].chunks or self.sample_rows is not None or not len(self.ids):
            return False
        return self.all_sampled

    @property
    def adapted(self) -> bool:
        """Whether a token has an adapter."""
        return self.adapters is not None and bool((self.adapters >= 0).any())

    @property
    def all_sampled(self) -> bool:
        """Whether the logits of every flat token are needed, in order."""
        return len(self.logit_rows) == len(self.ids) and bool((np.diff(self.logit_rows) == 1).all())

    def upload(self, device: Device) -> StepBatch:
        """The step's tensors, in one transfer."""
        arrays = [self.ids, self.positions, self.logit_rows, self.num_sampled]
        arrays += [array for array in (self.sample_rows, self.source) if array is not None]
        states = [] if self.decode_states is None else [self.decode_states]
        ids, positions, logit_rows, num_sampled, *others = device.upload(*arrays, *self.slots, *states)
        runs = chunk_batches(self.runs, device)
        if states:
            runs.append(decode_batch(len(self.ids) - states[0].shape[1], others.pop()))
        for batch in reversed(self.attention):
            batch.slot_mapping, batch.uploader = others.pop(), device
        return StepBatch(
            input_ids=ids,
            positions=positions,
            attention=self.attention,
            logit_rows=None if self.all_sampled else logit_rows,
            sample_rows=others[0] if self.sample_rows is not None else None,
            num_sampled=num_sampled,
            source=others[-1] if self.source is not None else None,
            lora=None if self.adapters is None else lora_step(self.adapters, device),
            embeds=None if self.embeds is None else self.embeds.upload(device),
            rope_positions=None if self.rope_positions is None else device.upload(self.rope_positions)[0],
            runs=runs,
        )


def lay_out_step(
    plan: StepPlan,
    workload: JobWorkload,
    running: InputBatch,
    decodes: Sequence[DecodeTable],
    unread: BatchView | None,
    media: StepMedia | None,
    spec: ModelSpec,
    peers: Peers = NO_PEERS,
) -> StepArrays:
    """Lay out a step: its prefill chunks in order, then its decode rows.

    `decodes`: the table of each cache group, which must see the decode rows of every step of the job, in order, and is
    cleared in a step without any; `unread`: [R'] rows of the last step if its tokens are still only on the device;
    `spec`: of the model; `peers`: other ranks' engines, which rank 0 gives what it has read of images and embeddings.
    """
    total, table, adapter = plan.tokens, workload.table, workload.adapter
    ids = np.empty(total, np.int64)
    positions = np.empty(total, np.int64)
    source = np.full(total, -1, np.int64) if unread is not None else None
    at = total - len(plan.decodes)
    if plan.prefills:
        _lay_out_chunks(plan.prefills, table, ids[:at], positions[:at])
        _fill_output_ids(plan.prefills, table, running, ids, source, unread)
    rows = running.slots(plan.decodes.sequence_ids)
    if len(rows):
        ids[at:] = running.last_token[rows]
        positions[at:] = plan.decodes.positions
        if unread is not None and source is not None:
            source[at:] = _source_rows(plan.decodes.sequence_ids, rows, unread)
    groups = zip(decodes, plan.group_pages, strict=True)
    laid = [_lay_out_pages(plan, own, positions, rows, pages, spec.attention_chunk) for own, pages in groups]
    attention = [batch for batch, _ in laid]

    def given() -> tuple[Int64, StepEmbeds, Int64 | None]:
        embeds, rope_positions = StepEmbeds(), None
        if table.embeds_id is not None:
            _add_chunk_embeds(plan, table, embeds)
        if media is not None:
            media.embed(plan.prefills, ids, embeds)
            rope_positions = media.rope_positions(plan.prefills, positions, running.request[rows])
        return ids, embeds, rope_positions

    embeds, rope_positions = StepEmbeds(), None
    if table.embeds_id is not None or table.media is not None:
        ids, embeds, rope_positions = peers.agree(given)
        if workload.spans is not None:
            add_spans(workload.spans, plan.prefills, attention)
    logit_rows, sample_rows = _unique_tokens(plan.samples.tokens)
    return StepArrays(
        ids=ids,
        # The last token of a scored text may be past the context. Its state is not read, and a model has no such place.
        positions=np.minimum(positions, spec.context_length - 1),
        slots=[slots for _, slots in laid],
        source=source,
        logit_rows=logit_rows,
        sample_rows=sample_rows,
        num_sampled=running.num_sampled[running.slots(plan.samples.sequence_ids)],
        attention=attention,
        adapters=None if adapter is None else _token_adapters(plan, running.request[rows], adapter),
        embeds=embeds or None,
        rope_positions=rope_positions,
        runs=_lay_out_runs(plan.prefills),
        decode_states=plan.decodes.states if len(plan.decodes) else None,
    )


def _lay_out_runs(prefills: Sequence[PrefillChunk]) -> list[list[Run]]:
    """The runs of each chunk's tokens with a state; empty if the model has none."""
    if not prefills or not prefills[0].states:
        return []
    chunks, flat = [], 0
    for chunk in prefills:
        runs, begin, at = [], chunk.start, flat - chunk.start
        for end, source, slot in chunk.states:
            start = begin if chunk.store else end - 1
            runs.append(Run(at + start, at + end, source, slot if chunk.store else None))
            begin = end
        flat += chunk.end - chunk.start
        chunks.append(runs)
    return chunks


def _lay_out_pages(
    plan: StepPlan,
    decodes: DecodeTable,
    positions: Int64,
    rows: Int64,
    group_pages: Int64 | None,
    attention_chunk: int | None,
) -> tuple[AttentionBatch, Int64]:
    """Page tables of one cache group, and the slot mapping [T].

    `positions`: [T]; `rows`: [R] slots of the decode rows; `group_pages`: the group's, as in `StepPlan`;
    `attention_chunk`: as in `ModelSpec`.
    """
    at, slots = len(positions) - len(rows), np.empty(len(positions), np.int64)
    chunks: list[ChunkPages] = []
    if plan.prefills:
        chunks = _lay_out_tables(plan.prefills, positions[:at], decodes.page_size, slots[:at], group_pages)
    windowed = group_pages is not None
    attention = AttentionBatch(slot_mapping=_NO_SLOTS, chunks=chunks, decode_start=at, windowed=windowed)
    if len(rows):
        _, slots[at:] = decodes.fill(attention, plan.decodes, plan.groups, rows, group_pages)
    if windowed and attention_chunk is not None:
        attention = restarted(attention, attention_chunk, decodes.page_size)
    return attention, slots


def _lay_out_chunks(prefills: Sequence[PrefillChunk], table: RequestTable, ids: Int64, positions: Int64) -> None:
    """Fill ids and positions [T'] of all chunks at once; ids of output positions stay undefined."""
    starts, ends, requests = np.array([(c.start, c.end, c.request) for c in prefills], np.int64).T
    lengths, offsets = ends - starts, table.offsets[requests]
    of = np.repeat(np.arange(len(lengths)), lengths)
    positions[:] = np.arange(len(positions)) + (starts - np.cumsum(lengths) + lengths)[of]
    ids[:] = table.tokens.take(offsets[of] + positions, mode="clip")


def _lay_out_tables(
    prefills: Sequence[PrefillChunk], positions: Int64, page_size: int, slots: Int64, group_pages: Int64 | None
) -> list[ChunkPages]:
    """Fill the slots [T'] of all chunks at once."""
    starts, ends, stored, widths = np.array([(c.start, c.end, c.store, len(c.pages)) for c in prefills], np.int64).T
    lengths = ends - starts
    of = np.repeat(np.arange(len(lengths)), lengths)
    flat_ends = np.cumsum(lengths)
    pages = np.fromiter(chain.from_iterable(c.pages for c in prefills), np.int64, int(widths.sum()))
    if group_pages is not None:
        pages = group_pages[pages]
    edges = np.cumsum(widths)
    slots[:] = positions % page_size
    page_starts = pages[(edges - widths)[of] + positions // page_size] * page_size
    slots += page_starts if stored.all() else page_starts * stored[of]
    columns = zip(
        (flat_ends - lengths).tolist(), lengths.tolist(), ends.tolist(), np.split(pages, edges[:-1]), strict=True
    )
    return [ChunkPages(*column) for column in columns]


def _fill_output_ids(
    prefills: Sequence[PrefillChunk],
    table: RequestTable,
    running: InputBatch,
    ids: Int64,
    source: Int64 | None,
    unread: BatchView | None,
) -> None:
    """Fill the ids of output positions in recomputed chunks; at most one token of a sequence is still on the device."""
    flat = 0
    for chunk in prefills:
        begin, flat = flat, flat + chunk.end - chunk.start
        if chunk.sequence is None:
            continue
        length = len(table.prompt_ids(chunk.request))
        if chunk.end <= length:
            continue
        first = max(chunk.start - length, 0)
        known = running.output_ids(chunk.sequence)[first : chunk.end - length]
        at = begin + length + first - chunk.start
        ids[at : at + len(known)] = known
        if at + len(known) < flat:
            assert source is not None
            assert unread is not None
            assert at + len(known) == flat - 1, "more than one token is still on the device"
            source[flat - 1] = np.flatnonzero(unread.sequence_ids == chunk.sequence).item()


def _source_rows(sequence_ids: Int64, slots: Int64, unread: BatchView) -> Int64:
    """[R] row in `unread` of each sequence of `sequence_ids`, in `slots`; -1 if it is not in `unread`."""
    if sequence_ids is unread.sequence_ids:
        return np.arange(len(sequence_ids))
    place = np.full(1 + max(int(slots.max()), int(unread.slots.max())), -1, np.int64)
    place[unread.slots] = np.arange(len(unread))
    rows = place[slots]
    # Another sequence may have used the slot in the last step.
    placed: Int64 = np.where((rows >= 0) & (unread.sequence_ids[rows] == sequence_ids), rows, -1)
    return placed


def add_spans(spans: Spans, chunks: Sequence[PrefillChunk], attention: Sequence[AttentionBatch]) -> None:
    """Give a step's attention in each cache group the flat tokens of its chunks that see one another."""
    at, seen = 0, []
    for chunk in chunks:
        shift = at - chunk.start
        seen += [(start + shift, end + shift) for start, end in spans.within(chunk.request, chunk.start, chunk.end)]
        at += chunk.end - chunk.start
    for batch in attention:
        batch.spans, batch.spans_exceed_window = seen, spans.exceed_window


def _add_chunk_embeds(plan: StepPlan, table: RequestTable, embeds: StepEmbeds) -> None:
    """Add the tokens of the step's chunks that rows give as embeddings."""
    assert table.embeds is not None
    at = 0
    for chunk in plan.prefills:
        span = table.embeds_of(chunk.request)
        end = 0 if span is None else min(chunk.end, span.length)
        if span is not None and chunk.start < end:
            values = table.embeds.rows(span.first + chunk.start, span.first + end)
            embeds.add(np.arange(at, at + end - chunk.start), values)
        at += chunk.end - chunk.start


def _token_adapters(plan: StepPlan, decoding: Int64, adapter: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """[T] adapter of each flat token, -1 for none; `decoding`: [R] requests of the decode rows.

    All requests below a tree node have the same adapter.
    """
    requests, counts = np.array([(c.request, c.end - c.start) for c in plan.prefills], np.int64).reshape(-1, 2).T
    return np.concatenate([np.repeat(adapter[requests], counts), adapter[decoding]])


def _unique_tokens(tokens: Int64) -> tuple[Int64, Int64 | None]:
    """Each flat token once, in order of first use, and the index of each of `tokens` [R] among them; None: in order."""
    if (tokens[1:] > tokens[:-1]).all():
        return tokens.copy(), None  # a copy, because later steps reuse the plan's columns
    _, first, rank = np.unique(tokens, return_index=True, return_inverse=True)
    if len(first) == len(tokens):
        return tokens.copy(), None
    order = np.argsort(first)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return tokens[first[order]], place[rank]
