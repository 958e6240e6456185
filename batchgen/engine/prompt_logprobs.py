"""Logprobs of prompt tokens, scored once per prefix-tree node and handed to every row that wants them.

The logits of position p say how likely each token was at p + 1. A node keeps what the logits of its own positions say:
the K most likely tokens, the logprobs of named ids, and the logprob of the token that follows. What follows a node's
last position depends on the branch taken, so there the node keeps one logprob for each child.

Always of the model's own logits (`raw`): nothing is drawn from a prompt's distributions, so there is nothing processed
about them. Logits are made for a fixed number of bytes of rows at a time, never for all tokens of a step.
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

from batchgen.engine.capture import NodeRows, Piece, PromptCapture, batches
from batchgen.engine.output_ring import OutputRing
from batchgen.engine.planning import Workload
from batchgen.errors import ErrorCode, RowError
from batchgen.kernels.device import Array
from batchgen.kernels.ops import Ops
from batchgen.plan.types import StepPlan
from batchgen.request import Completion, Request

__all__ = ["LOGITS_BYTES", "PendingPrompts", "PromptLogprobs"]

LOGITS_BYTES = 64 << 20
"""Logits of prompt positions made at once, counted as float32."""

_NAN = "the model's logits held a not-a-number in this prompt; try --dtype float32 or check the weights"

Floats = npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class PendingPrompts:
    """Scored positions of a step, on their way to the host."""

    pieces: list[Piece]
    ring: OutputRing
    sent: int = 0


@dataclass(frozen=True, slots=True)
class _Chunk:
    """r positions whose logits are made at once, and what is read of them beside the K most likely tokens."""

    pieces: list[Piece]
    top_k: int
    """K, the most that any of the pieces wants"""
    tokens: Array
    """[r] int64 flat tokens"""
    targets: Array
    """[r] int64 the token after each; 0 at a node's end, where it depends on the branch"""
    named: list[tuple[slice, Array]]
    """rows of pieces behind one another that name the same ids, and the ids, int64"""
    children: list[list[int]]
    """by piece: the wanted children of its node, where it ends the node"""
    ends: Array
    """[b] int64 rows that children follow, one entry for each child"""
    firsts: Array
    """[b] int64 the children's first tokens"""

    @property
    def arrays(self) -> list[Array]:
        """What the device is told."""
        return [self.tokens, self.targets, self.ends, self.firsts, *(ids for _, ids in self.named)]


class PromptLogprobs:
    """Scores the prompts of a workload while they are computed.

    Args:
        workload: its requests' parameters say what each wants.
        vocab_size: width of the logits, V.
        text: what a token says, decoded alone.
        ops: the kernels.
    """

    def __init__(self, workload: Workload, vocab_size: int, text: Callable[[int], str], ops: Ops) -> None:
        table, tree = workload.table, workload.tree
        self._table = table
        self._text = text
        self._ops = ops
        self._request, self._end = tree.request.data, tree.end.data
        self._parent, self._subtree_end = tree.parent.data, tree.subtree_end.data
        self._leaf = tree.node_of_request.data
        self._rows = max(1, LOGITS_BYTES // (4 * vocab_size))
        start = _starts(workload)
        length = np.diff(table.offsets)
        # Entry j needs the logits of j - 1; the last prompt position's logits are those of the first output token.
        self.capture = PromptCapture(tree, np.maximum(start - 1, 0), np.where(start >= 0, length - 1, 0))
        """The positions whose logits are read, and what is kept of them."""
        self._top_k, self._ids = self._widths(workload, start >= 0)

    def __bool__(self) -> bool:
        """Whether any position is to be scored."""
        return bool(self.capture)

    def score(
        self, plan: StepPlan, hidden: Tensor, logits: Callable[[Tensor], Tensor], ring: OutputRing
    ) -> PendingPrompts | None:
        """Score what the step computes of prompts and some row wants, and begin to copy it to the host.

        Args:
            plan: the step.
            hidden: [T, H] states after the final norm.
            logits: [R, H] -> [R, V].
            ring: what the results go through.

        Returns:
            What `keep` takes, when the step before has been read; None where nothing is scored.
        """
        pieces = self.capture.pieces(plan)
        if not pieces:
            return None
        pending = PendingPrompts(pieces, ring)
        try:
            chunks = [self._chunk(batch) for batch in batches(pieces, self._rows)]
            uploaded = iter(ring.device.upload(*(array for chunk in chunks for array in chunk.arrays)))
            for chunk in chunks:
                index = [next(uploaded) for _ in chunk.arrays]
                found = self._read(chunk, index, logits(hidden[index[0]]))
                pending.sent = ring.send(found, partial(self._take, chunk))
        except BaseException:
            self.withdraw(pending)
            raise
        return pending

    def keep(self, pending: PendingPrompts) -> None:
        """Take what was read of a step, in the order of the steps."""
        pending.ring.read(pending.sent)

    def withdraw(self, pending: PendingPrompts) -> None:
        """The latest step scored has failed and will be issued anew; it is not to be kept.

        Values of it that come in all the same are overwritten by the new ones.
        """
        self.capture.undo(pending.pieces)

    def complete(self, request: Request, samples: list[Completion]) -> list[Completion]:
        """The finished samples of a request with their `input_*` columns; masked entries are null.

        One `nan_logits` error in their place where the model's logits held a not-a-number.
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
        found: dict[str, Any] = {"input_logprobs": _nullable(self.following(index), missing)}
        if k := params.top_logprobs_num:
            for name in ("top_ids", "top_logprobs"):
                found[f"input_{name}"] = _nullable(self._top(index, name, k).ravel(), missing * k)
        if ids := params.token_ids_logprob:
            found["input_ids_logprobs"] = _nullable(self._named(index, ids).ravel(), missing * len(ids))
        if params.return_text_in_logprobs:
            found["input_tokens_text"] = [self._text(token) for token in request.prompt_ids[start:].tolist()]
        return found

    def following(self, request: int) -> Floats:
        """[last - first] logprobs of the tokens after the request's wanted positions.

        Raises:
            RowError: `nan_logits`.
        """
        below = {}
        node = self._leaf[request]
        while (above := self._parent[node]) >= 0:
            below[above] = node
            node = above
        parts = []
        for rows, part in self.capture.path(request):
            values = rows.arrays["following"][part]
            if rows.low + part.stop == self._end[rows.node]:
                values = values.copy()
                values[-1] = _after(rows, below[rows.node])
            parts.append(values)
        result = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        if np.isnan(result).any():
            raise RowError(ErrorCode.NAN_LOGITS, _NAN)
        return result

    def likeliest(self, request: int) -> npt.NDArray[np.generic]:
        """[last - first] the most likely token after each of the positions of a request with a text to score."""
        return self._top(request, "top_ids", 1)[:, 0]

    def release(self, request: int) -> None:
        """The request is finished."""
        if self.capture and self.capture.wants(request):
            self.capture.release(request)

    def _top(self, request: int, name: str, k: int) -> npt.NDArray[np.generic]:
        """[last - first, k] the first k columns of what each node keeps."""
        parts = [rows.arrays[name][part, :k] for rows, part in self.capture.path(request)]
        return np.concatenate([np.zeros((0, k), np.int32 if name == "top_ids" else np.float32), *parts])

    def _named(self, request: int, ids: tuple[int, ...]) -> Floats:
        """[last - first, len(ids)] the request's own ids out of those that each node keeps."""
        parts = [
            rows.arrays["ids_logprobs"][part][:, np.searchsorted(self._ids[rows.node], ids)]
            for rows, part in self.capture.path(request)
        ]
        return np.concatenate([np.zeros((0, len(ids)), np.float32), *parts])

    def _chunk(self, pieces: list[Piece]) -> _Chunk:
        """What is to be read of the logits of some positions."""
        tokens = np.concatenate([np.arange(piece.flat, piece.flat + len(piece)) for piece in pieces])
        named: list[tuple[slice, tuple[int, ...]]] = []
        children: list[list[int]] = []
        ends: list[int] = []
        firsts: list[int] = []
        at = 0
        for piece in pieces:
            begin, at = at, at + len(piece)
            if ids := self._ids[piece.node]:
                if named and named[-1][0].stop == begin and named[-1][1] == ids:
                    begin = named.pop()[0].start
                named.append((slice(begin, at), ids))
            children.append(self._children(piece))
            ends += [at - 1] * len(children[-1])
            firsts += [int(self._table.prompt_ids(self._request[child])[piece.end]) for child in children[-1]]
        return _Chunk(
            pieces,
            max(self._top_k[piece.node] for piece in pieces),
            tokens.astype(np.int64, copy=False),
            np.concatenate([self._targets(piece) for piece in pieces]),
            [(span, np.array(ids, np.int64)) for span, ids in named],
            children,
            np.array(ends, np.int64),
            np.array(firsts, np.int64),
        )

    def _read(self, chunk: _Chunk, index: list[Tensor], logits: Tensor) -> list[Tensor]:
        """From logits [r, V]: following [r], branches [b], top ids and logprobs [r, K], then [., I] of each `named`."""
        _, targets, ends, firsts, *named = index
        read = self._ops.read_out(logits, targets, chunk.top_k)
        # What is told of a row whose sum is no number is none either, +-inf included.
        spoilt = torch.where(torch.isfinite(read.normalizers), 0.0, torch.nan)  # [r]
        normalizers = read.normalizers + spoilt
        found = [
            read.targets + spoilt,
            logits[ends, firsts].float() - normalizers[ends],
            read.top_ids.to(torch.int32),
            read.top + spoilt[:, None],
        ]
        for (span, _), ids in zip(chunk.named, named, strict=True):
            found.append(logits[span][:, ids].float() - normalizers[span, None])
        return found

    def _take(self, chunk: _Chunk, arrays: list[Array]) -> None:
        """Hand the nodes what was read, as far as somebody still wants it."""
        following, branches, top_ids, top, *named = arrays
        runs = iter(zip((span for span, _ in chunk.named), named, strict=True))
        run, asked = next(runs, (slice(0, 0), following))
        at = branch = 0
        for piece, children in zip(chunk.pieces, chunk.children, strict=True):
            span = slice(at, at + len(piece))
            first, branch = branch, branch + len(children)
            at = span.stop
            wanted = bool(self._ids[piece.node])
            if wanted and span.start >= run.stop:
                run, asked = next(runs)
            if not self.capture.users(piece.node):
                continue
            self.capture.put(piece, "following", following[span])
            if k := self._top_k[piece.node]:
                self.capture.put(piece, "top_ids", top_ids[span, :k])
                self.capture.put(piece, "top_logprobs", top[span, :k])
            if wanted:
                self.capture.put(piece, "ids_logprobs", asked[span.start - run.start : span.stop - run.start])
            if piece.end == self._end[piece.node]:
                kept = self.capture.node(piece.node).arrays
                kept["children"] = np.array(children, np.int32)
                kept["branches"] = branches[first:branch].copy()

    def _targets(self, piece: Piece) -> npt.NDArray[np.int64]:
        """[len(piece)] the token after each position; 0 at the node's end, where it depends on the branch."""
        ids = self._table.prompt_ids(self._request[piece.node])
        targets = np.zeros(len(piece), np.int64)
        end = min(piece.end + 1, self._end[piece.node])
        targets[: end - piece.start - 1] = ids[piece.start + 1 : end]
        return targets

    def _children(self, piece: Piece) -> list[int]:
        """The children of the piece's node that somebody wants the first token's logprob of; none before its end."""
        capture, children = self.capture, []
        child, end = piece.node + 1, self._subtree_end[piece.node]
        while piece.end == self._end[piece.node] and child < end:
            if capture.users(child) and capture.low(child) < piece.end:
                children.append(child)
            child = self._subtree_end[child]
        return children

    def _widths(self, workload: Workload, wanted: npt.NDArray[np.bool_]) -> tuple[list[int], list[tuple[int, ...]]]:
        """By node, over the wanting requests at or below it: the largest K, and all ids of `token_ids_logprob`."""
        if not self.capture:
            return [], []
        table, count = workload.table, len(workload.tree)
        params, params_id, texts = table.params, table.params_id, table.score_start >= 0
        tops, ids = [0] * count, [frozenset[int]()] * count
        sets = [frozenset(p.token_ids_logprob) for p in params]
        for request in np.flatnonzero(wanted).tolist():
            asked, node = params_id[request], self._leaf[request]
            # A text to score is held against the most likely tokens.
            tops[node] = max(tops[node], params[asked].top_logprobs_num, int(texts[request]))
            ids[node] = _union(ids[node], sets[asked])
        for node in range(count - 1, 0, -1):
            above = self._parent[node]
            if above >= 0:
                tops[above] = max(tops[above], tops[node])
                ids[above] = _union(ids[above], ids[node])
        ordered = {found: tuple(sorted(found)) for found in set(ids)}
        return tops, [ordered[found] for found in ids]


def _starts(workload: Workload) -> npt.NDArray[np.int64]:
    """[N] first prompt position whose logprob each request wants; -1 for none, and for requests that do not run."""
    params = workload.table.params
    if not params:
        return np.zeros(0, np.int64)
    asked = np.array([p.logprob_start_len if p.return_logprob else -1 for p in params], np.int64)
    starts = np.where(workload.table.score_start >= 0, workload.table.score_start, asked[workload.table.params_id])
    return np.where(workload.samples > 0, starts, -1)


def _after(rows: NodeRows, child: int) -> np.float32:
    """Logprob of a child's first token."""
    place = np.searchsorted(rows.arrays["children"], child)
    found: np.float32 = rows.arrays["branches"][place]
    return found


def _union(a: frozenset[int], b: frozenset[int]) -> frozenset[int]:
    """Their union; mostly they are one object already."""
    return a if b <= a else b if a <= b else a | b


def _nullable(values: npt.NDArray[np.generic], missing: int) -> npt.NDArray[np.generic]:
    """The values behind `missing` masked entries."""
    if not missing:
        return values
    padded = np.concatenate([np.zeros(missing, values.dtype), values])
    return np.ma.MaskedArray(padded, np.arange(len(padded)) < missing)  # type: ignore[no-untyped-call]
