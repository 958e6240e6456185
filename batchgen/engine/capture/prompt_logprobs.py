"""`PromptLogprobs`: logprobs of prompt tokens, computed once per prefix-tree node for all rows that return them.

The logits of position p give the logprob of the token at p + 1. A node stores for each of its positions the K most
likely tokens, the logprobs of `token_ids_logprob`, and the logprob of the next token (the target). The token after a
node's last position depends on the branch, so there the node stores one logprob per child.

Prompt logprobs are always `raw`, because no sampling parameters apply to a prompt. Logits are computed in chunks of a
fixed number of bytes, never for all tokens of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.capture.node_buffers import NodeBuffers, Span, split_spans
from batchgen.engine.memory.d2h_queue import D2HQueue
from batchgen.engine.workload import JobWorkload
from batchgen.errors import ErrorCode, RowError
from batchgen.kernels.device import Array
from batchgen.kernels.ops import Ops
from batchgen.plan.step_plan import StepPlan
from batchgen.request.completion import Completion
from batchgen.request.table.request_table import Request

LOGITS_BYTES = 64 << 20
"""Bytes of prompt logits that are computed at once, as float32."""

_NAN = "the model's logits contain NaN in this prompt; try --dtype float32 or check the weights"

Floats = npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class PendingPromptLogprobs:
    """Prompt logprobs of a step that are copied to the host."""

    spans: list[Span]
    d2h_queue: D2HQueue
    sent: int = 0


@dataclass(frozen=True, slots=True)
class _LogitsChunk:
    """r positions whose logits are computed at once, and the values to gather from them."""

    spans: list[Span]
    top_k: int
    """K, the largest number of top logprobs of the spans"""
    tokens: Array
    """[r] int64 flat tokens"""
    targets: Array
    """[r] int64 token after each position; 0 at a node's end, where it depends on the branch"""
    id_ranges: list[tuple[slice, Array]]
    """Ranges of rows that need logprobs of the same ids, and these ids, int64"""
    children: list[list[int]]
    """By span: the needed children of its node, if the span ends the node"""
    child_rows: Array
    """[b] int64 row before each child's first token"""
    child_tokens: Array
    """[b] int64 first token of each child"""

    @property
    def arrays(self) -> list[Array]:
        """Index arrays to upload."""
        return [self.tokens, self.targets, self.child_rows, self.child_tokens, *(ids for _, ids in self.id_ranges)]


class PromptLogprobs:
    """Gathers the prompt logprobs of a workload while its prompts are computed. V is `vocab_size`."""

    def __init__(self, workload: JobWorkload, vocab_size: int, token_text: Callable[[int], str], ops: Ops) -> None:
        table, tree = workload.table, workload.tree
        self._table = table
        self._token_text = token_text
        self._ops = ops
        self._end, self._order, self._first_row = tree.end.data, tree.order.data, tree.first_row.data
        self._parent, self._subtree_end = tree.parent.data, tree.subtree_end.data
        self._leaf = tree.node_of_request.data
        self._rows = max(1, LOGITS_BYTES // (4 * vocab_size))
        start = _starts(workload)
        length = np.diff(table.offsets) if len(start) else start
        # Entry j needs the logits of j - 1; the last prompt position's logits are those of the first output token.
        self.buffers = NodeBuffers(tree, np.maximum(start - 1, 0), np.where(start >= 0, length - 1, 0))
        """Logprobs by tree node, for the positions whose logits are needed."""
        self._top_k, self._ids = self._node_needs(workload, start >= 0)

    def __bool__(self) -> bool:
        """Whether any row needs prompt logprobs."""
        return bool(self.buffers)

    def score(
        self, plan: StepPlan, logits: Callable[[Tensor], Tensor], d2h_queue: D2HQueue
    ) -> PendingPromptLogprobs | None:
        """Gather the needed prompt logprobs of a step and start copying them to the host.

        `logits`: flat tokens of the step [R] int64 -> their logits [R, V]. The result is the argument of `collect`,
        which is called when the step is read; None if nothing is needed.
        """
        spans = self.buffers.spans(plan)
        if not spans:
            return None
        pending = PendingPromptLogprobs(spans, d2h_queue)
        try:
            chunks = [self._chunk(batch) for batch in split_spans(spans, self._rows)]
            uploaded = iter(d2h_queue.device.upload(*(array for chunk in chunks for array in chunk.arrays)))
            for chunk in chunks:
                index = [next(uploaded) for _ in chunk.arrays]
                gathered = self._gather(chunk, index, logits(index[0]))
                pending.sent = d2h_queue.send(gathered, partial(self._store, chunk))
        except BaseException:
            self.cancel(pending)
            raise
        return pending

    def collect(self, pending: PendingPromptLogprobs) -> None:
        """Store a step's logprobs; steps must be collected in order."""
        pending.d2h_queue.read(pending.sent)

    def cancel(self, pending: PendingPromptLogprobs) -> None:
        """Cancel the last call of `score`, because its step has failed and will be issued again.

        Values that were already sent are overwritten by those of the next try.
        """
        self.buffers.undo(pending.spans)

    def add_to_completions(self, request: Request, samples: list[Completion]) -> list[Completion]:
        """The finished samples of a request with their `input_*` columns; masked entries are null.

        If the model's logits contain NaN, one `nan_logits` error instead.
        """
        if request.params.logprob_start_len < 0:
            return samples
        try:
            columns = self._columns(request)
        except RowError as error:
            return [Completion(request.row_index, request.prompt_index, error=error.info, seed=request.seed)]
        return [replace(sample, **columns) for sample in samples]

    def _columns(self, request: Request) -> dict[str, Any]:
        params, index = request.params, request.index
        start = params.logprob_start_len
        missing = int(start == 0)
        columns: dict[str, Any] = {"input_logprobs": _with_nulls(self.target_logprobs(index), missing)}
        if k := params.top_logprobs_num:
            for name in ("top_ids", "top_logprobs"):
                columns[f"input_{name}"] = _with_nulls(self._top(index, name, k).ravel(), missing * k)
        if ids := params.token_ids_logprob:
            columns["input_ids_logprobs"] = _with_nulls(self._ids_logprobs(index, ids).ravel(), missing * len(ids))
        if params.return_text_in_logprobs:
            columns["input_tokens_text"] = [self._token_text(token) for token in request.prompt_ids[start:].tolist()]
        return columns

    def target_logprobs(self, request: int) -> Floats:
        """[last - first] logprobs of the tokens after the request's needed positions.

        Raises:
            RowError: `nan_logits`.
        """
        below = {}
        node = self._leaf[request]
        while (above := self._parent[node]) >= 0:
            below[above] = node
            node = above
        parts = []
        for rows, part in self.buffers.path(request):
            values = rows.arrays["target_logprobs"][part]
            if rows.low + part.stop == self._end[rows.node]:
                values = values.copy()
                place = np.searchsorted(rows.arrays["children"], below[rows.node])
                values[-1] = rows.arrays["child_logprobs"][place]  # of the child's first token
            parts.append(values)
        result = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        if np.isnan(result).any():
            raise RowError(ErrorCode.NAN_LOGITS, _NAN)
        return result

    def most_likely_ids(self, request: int) -> npt.NDArray[np.generic]:
        """[last - first] most likely token after each needed position of a request with a text to score."""
        return self._top(request, "top_ids", 1)[:, 0]

    def _top(self, request: int, name: str, k: int) -> npt.NDArray[np.generic]:
        """[last - first, k] first k top ids or logprobs of the request's positions."""
        parts = [rows.arrays[name][part, :k] for rows, part in self.buffers.path(request)]
        return np.concatenate([np.zeros((0, k), np.int32 if name == "top_ids" else np.float32), *parts])

    def _ids_logprobs(self, request: int, ids: tuple[int, ...]) -> Floats:
        """[last - first, len(ids)] logprobs of the request's ids, selected from the ids that each node stores."""
        parts = [
            rows.arrays["ids_logprobs"][part][:, np.searchsorted(self._ids[rows.node], ids)]
            for rows, part in self.buffers.path(request)
        ]
        return np.concatenate([np.zeros((0, len(ids)), np.float32), *parts])

    def _chunk(self, spans: list[Span]) -> _LogitsChunk:
        """The values to gather from the logits of these spans."""
        tokens = np.concatenate([np.arange(span.flat, span.flat + len(span)) for span in spans])
        id_ranges: list[tuple[slice, tuple[int, ...]]] = []
        children: list[list[int]] = []
        child_rows: list[int] = []
        child_tokens: list[int] = []
        at = 0
        for span in spans:
            begin, at = at, at + len(span)
            if ids := self._ids[span.node]:
                if id_ranges and id_ranges[-1][0].stop == begin and id_ranges[-1][1] == ids:
                    begin = id_ranges.pop()[0].start
                id_ranges.append((slice(begin, at), ids))
            children.append(self._wanted_children(span))
            child_rows += [at - 1] * len(children[-1])
            requests = [self._order[self._first_row[child]] for child in children[-1]]
            child_tokens += [int(self._table.prompt_ids(request)[span.end]) for request in requests]
        return _LogitsChunk(
            spans,
            max(self._top_k[span.node] for span in spans),
            tokens.astype(np.int64, copy=False),
            np.concatenate([self._targets(span) for span in spans]),
            [(row_range, np.array(ids, np.int64)) for row_range, ids in id_ranges],
            children,
            np.array(child_rows, np.int64),
            np.array(child_tokens, np.int64),
        )

    def _gather(self, chunk: _LogitsChunk, index: list[Tensor], logits: Tensor) -> list[Tensor]:
        """From logits [r, V]: following [r], branches [b], top ids and logprobs [r, K], then [., I] of each `named`."""
        _, targets, child_rows, child_tokens, *id_ranges = index
        gathered = self._ops.gather_logprobs(logits, targets, chunk.top_k)
        # Rows with a NaN or infinite normalizer get NaN everywhere.
        nan_mask = torch.where(torch.isfinite(gathered.normalizers), 0.0, torch.nan)  # [r]
        normalizers = gathered.normalizers + nan_mask
        tensors = [
            gathered.targets + nan_mask,
            self._ops.logits_at(logits, child_rows, child_tokens).float() - normalizers[child_rows],
            gathered.top_ids.to(torch.int32),
            gathered.top + nan_mask[:, None],
        ]
        rows = torch.arange(len(logits), device=logits.device)[:, None]
        for (row_range, _), ids in zip(chunk.id_ranges, id_ranges, strict=True):
            named = self._ops.logits_at(logits, rows[row_range], ids).float()
            tensors.append(named - normalizers[row_range, None])
        return tensors

    def _store(self, chunk: _LogitsChunk, arrays: list[Array]) -> None:
        """Store a chunk's values in the nodes that unfinished requests still need."""
        target_logprobs, child_logprobs, top_ids, top, *id_ranges = arrays
        runs = iter(zip((row_range for row_range, _ in chunk.id_ranges), id_ranges, strict=True))
        run, requested = next(runs, (slice(0, 0), target_logprobs))
        at = branch = 0
        for span, children in zip(chunk.spans, chunk.children, strict=True):
            row_range = slice(at, at + len(span))
            first, branch = branch, branch + len(children)
            at = row_range.stop
            needed = bool(self._ids[span.node])
            if needed and row_range.start >= run.stop:
                run, requested = next(runs)
            if not self.buffers.num_users(span.node):
                continue
            self.buffers.put(span, "target_logprobs", target_logprobs[row_range])
            if k := self._top_k[span.node]:
                self.buffers.put(span, "top_ids", top_ids[row_range, :k])
                self.buffers.put(span, "top_logprobs", top[row_range, :k])
            if needed:
                part = requested[row_range.start - run.start : row_range.stop - run.start]
                self.buffers.put(span, "ids_logprobs", part)
            if span.end == self._end[span.node]:
                arrays_of_node = self.buffers.node(span.node).arrays
                arrays_of_node["children"] = np.array(children, np.int32)
                arrays_of_node["child_logprobs"] = child_logprobs[first:branch].copy()

    def _targets(self, span: Span) -> npt.NDArray[np.int64]:
        """[len(span)] token after each position; 0 at the node's end, where it depends on the branch."""
        ids = self._table.prompt_ids(self._order[self._first_row[span.node]])
        targets = np.zeros(len(span), np.int64)
        end = min(span.end + 1, self._end[span.node])
        targets[: end - span.start - 1] = ids[span.start + 1 : end]
        return targets

    def _wanted_children(self, span: Span) -> list[int]:
        """Children of the span's node whose first token's logprob is needed; none unless the span ends the node."""
        buffers, children = self.buffers, []
        child, end = span.node + 1, self._subtree_end[span.node]
        while span.end == self._end[span.node] and child < end:
            if buffers.num_users(child) and buffers.first_wanted(child) < span.end:
                children.append(child)
            child = self._subtree_end[child]
        return children

    def _node_needs(
        self, workload: JobWorkload, needed: npt.NDArray[np.bool_]
    ) -> tuple[list[int], list[tuple[int, ...]]]:
        """By node, over the requests at or below it: the largest K, and the union of their `token_ids_logprob`."""
        if not self.buffers:
            return [], []
        table, count = workload.table, len(workload.tree)
        params, params_id, texts = table.params, table.params_id, table.score_start >= 0
        tops, ids = [0] * count, [frozenset[int]()] * count
        sets = [frozenset(p.token_ids_logprob) for p in params]
        for request in np.flatnonzero(needed).tolist():
            requested, node = params_id[request], self._leaf[request]
            # Scoring compares a text with the most likely tokens.
            tops[node] = max(tops[node], params[requested].top_logprobs_num, int(texts[request]))
            ids[node] = _union(ids[node], sets[requested])
        for node in range(count - 1, 0, -1):
            above = self._parent[node]
            if above >= 0:
                tops[above] = max(tops[above], tops[node])
                ids[above] = _union(ids[above], ids[node])
        ordered = {wanted: tuple(sorted(wanted)) for wanted in set(ids)}
        return tops, [ordered[wanted] for wanted in ids]


def _starts(workload: JobWorkload) -> npt.NDArray[np.int64]:
    """[N] first prompt position whose logprob each request returns; -1 for none, and for requests that do not run.

    Empty if no request returns any.
    """
    table = workload.table
    requested = [p.logprob_start_len if p.return_logprob else -1 for p in table.params]
    if max(requested, default=-1) < 0 and not (table.score_start >= 0).any():
        return np.zeros(0, np.int64)
    starts = np.where(table.score_start >= 0, table.score_start, table.by_params(requested, np.int64))
    return np.where(workload.samples > 0, starts, -1)


def _union(a: frozenset[int], b: frozenset[int]) -> frozenset[int]:
    """The union of two sets, without a copy if one contains the other."""
    return a if b <= a else b if a <= b else a | b


def _with_nulls(values: npt.NDArray[np.generic], missing: int) -> npt.NDArray[np.generic]:
    """The values after `missing` masked entries."""
    if not missing:
        return values
    padded = np.concatenate([np.zeros(missing, values.dtype), values])
    return np.ma.MaskedArray(padded, np.arange(len(padded)) < missing)  # type: ignore[no-untyped-call]
