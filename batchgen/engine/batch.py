"""Turns a `StepPlan` (lists) into one step's arrays on the host, and these into its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.decode_table import DecodeTable
from batchgen.engine.sequence import Sequence
from batchgen.kernels.device import Device
from batchgen.kernels.lora import LoraStep, lora_step
from batchgen.kernels.types import AttentionBatch, ChunkPages
from batchgen.models.base import TokenEmbeds
from batchgen.plan.types import PrefillChunk, StepPlan
from batchgen.request import RequestTable

__all__ = ["StepArrays", "StepBatch", "fed", "lay_out_step"]

Int64 = npt.NDArray[np.int64]

_NOWHERE: Final = torch.empty(0, dtype=torch.int64)
_NONE: Final[Mapping[int, int]] = {}


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Tensors of one step, packed without padding."""

    input_ids: Tensor
    """[T] int64; anything where `source` says that the id is on the device alone"""
    positions: Tensor
    """[T] int64"""
    attention: AttentionBatch
    logit_rows: Tensor
    """[U] int64: the flat tokens whose logits are needed, each once"""
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
        return np.array_equal(self.logit_rows, np.arange(len(self.ids)))

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
            logit_rows=logit_rows,
            sample_rows=others[0] if self.sample_rows is not None else None,
            drawn=drawn,
            source=others[-1] if self.source is not None else None,
            lora=None if self.adapters is None else lora_step(self.adapters, device),
            embeds=None if self.embeds is None else TokenEmbeds(*device.upload(*self.embeds)),
        )


def lay_out_step(
    plan: StepPlan,
    table: RequestTable,
    sequences: Mapping[int, Sequence],
    decodes: DecodeTable,
    page_size: int,
    adapter: npt.NDArray[np.int32] | None = None,
    unread: Mapping[int, int] = _NONE,
) -> StepArrays:
    """Lay out the plan's chunks in order, then its decode rows.

    Args:
        plan: the step.
        table: every prompt of the job.
        sequences: by number, at least those of the plan.
        decodes: told of every step of the job, in order.
        page_size: positions per page.
        adapter: [N] the requests', -1 for none.
        unread: sequences whose last token is known to the device alone, and its place among the last step's draws.
    """
    total = plan.tokens
    ids = np.empty(total, np.int64)
    positions = np.empty(total, np.int64)
    slots = np.empty(total, np.int64)
    source = np.full(total, -1, np.int64) if unread else None
    chunks = []
    at = 0
    for chunk in plan.prefills:
        span = slice(at, at + chunk.end - chunk.start)
        positions[span] = np.arange(chunk.start, chunk.end)
        known = _chunk_ids(chunk, table, sequences)
        ids[at : at + len(known)] = known
        if at + len(known) < span.stop:
            assert source is not None
            assert chunk.sequence is not None
            assert len(known) == span.stop - at - 1, "one token at most is on its way"
            source[span.stop - 1] = unread[chunk.sequence]
        pages = np.asarray(chunk.pages, np.int64)
        slots[span] = _slots(pages, positions[span], page_size) if chunk.store else positions[span] % page_size
        chunks.append(ChunkPages(at, chunk.end - chunk.start, chunk.end, pages))
        at = span.stop
    for i, row in enumerate(plan.decodes, start=at):
        if source is not None and row.sequence in unread:
            source[i] = unread[row.sequence]
        else:
            ids[i] = sequences[row.sequence].output_ids[-1]
    attention = AttentionBatch(slot_mapping=_NOWHERE, chunks=chunks, decode_start=at)
    if plan.decodes:
        positions[at:], slots[at:] = decodes.fill(attention, plan.decodes, plan.groups)
    logit_rows, sample_rows = _distinct([s.token for s in plan.samples])
    return StepArrays(
        ids=ids,
        positions=positions,
        slots=slots,
        source=source,
        logit_rows=np.array(logit_rows, np.int64),
        sample_rows=np.array(sample_rows, np.int64) if len(sample_rows) != len(logit_rows) else None,
        drawn=np.array([sequences[s.sequence].drawn for s in plan.samples], np.int64),
        attention=attention,
        adapters=None if adapter is None else _adapters(plan, sequences, adapter),
        embeds=None if table.embeds_id is None else _embeds(plan, table),
    )


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


def _adapters(
    plan: StepPlan, sequences: Mapping[int, Sequence], adapter: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """[T] the adapter of each flat token, -1 for none. All requests below a node have the node's."""
    parts = [(chunk.request, chunk.end - chunk.start) for chunk in plan.prefills]
    parts += [(sequences[row.sequence].request.index, 1) for row in plan.decodes]
    requests, counts = np.array(parts, np.int64).T
    return np.repeat(adapter[requests], counts)


def _chunk_ids(chunk: PrefillChunk, table: RequestTable, sequences: Mapping[int, Sequence]) -> Int64:
    """The ids at positions [start, end), as far as they are known: prompt ids, then the sequence's own output."""
    prompt = table.prompt_ids(chunk.request)
    ids = prompt[chunk.start : chunk.end].astype(np.int64)
    if chunk.end <= len(prompt):
        return ids
    assert chunk.sequence is not None, "output positions belong to a sequence"
    output = sequences[chunk.sequence].output_ids
    first = max(chunk.start - len(prompt), 0)
    return np.concatenate([ids, np.asarray(output[first : chunk.end - len(prompt)], np.int64)])


def _slots(pages: Int64, positions: Int64, page_size: int) -> Int64:
    slots: Int64 = pages[positions // page_size] * page_size + positions % page_size
    return slots


def _distinct(tokens: list[int]) -> tuple[list[int], list[int]]:
    """Each flat token once, in order of first use, and where each of `tokens` stands among them."""
    place: dict[int, int] = {}
    rows = [place.setdefault(token, len(place)) for token in tokens]
    return list(place), rows
