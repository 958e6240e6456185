"""Logprobs of prompt tokens, scored once per prefix-tree node and handed to every row that wants them.

The logits of position p say how likely each token was at p + 1. A node keeps what the logits of its own positions say:
the K most likely tokens, the logprobs of named ids, and the logprob of the token that follows. What follows a node's
last position depends on the branch taken, so there the node keeps one logprob for each child.

Always of the model's own logits (`raw`): nothing is drawn from a prompt's distributions, so there is nothing processed
about them. Logits are made for a fixed number of bytes of rows at a time, never for all tokens of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.capture import NodeRows, Piece, PromptCapture, batches
from batchgen.engine.planning import Workload
from batchgen.errors import ErrorCode, RowError
from batchgen.kernels.ops import Ops
from batchgen.plan.types import StepPlan
from batchgen.request import Completion, Request

__all__ = ["LOGITS_BYTES", "PromptLogprobs"]

LOGITS_BYTES = 64 << 20
"""Logits of prompt positions made at once, counted as float32."""

_NAN = "the model's logits held a not-a-number in this prompt; try --dtype float32 or check the weights"

Floats = npt.NDArray[np.float32]


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

    def score(self, plan: StepPlan, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> None:
        """Score what the step computed of prompts and some row wants.

        Args:
            plan: the step.
            hidden: [T, H] states after the final norm.
            logits: [R, H] -> [R, V].
        """
        for batch in batches(self.capture.pieces(plan), self._rows):
            tokens = np.concatenate([np.arange(piece.flat, piece.flat + len(piece)) for piece in batch])
            self._keep(batch, logits(hidden[torch.from_numpy(tokens).to(hidden.device)]))

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

    def _keep(self, batch: list[Piece], logits: Tensor) -> None:
        """Take what the pieces' nodes want from the logits [r, V] of their positions."""
        targets = torch.from_numpy(np.concatenate([self._targets(piece) for piece in batch])).to(logits.device)
        read = self._ops.read_out(logits, targets, max(self._top_k[piece.node] for piece in batch))
        # What is told of a row whose sum is no number is none either, +-inf included.
        spoilt = torch.where(torch.isfinite(read.normalizers), 0.0, torch.nan)  # [r]
        normalizers = read.normalizers + spoilt
        following = (read.targets + spoilt).cpu().numpy()
        top_ids = read.top_ids.to(torch.int32).cpu().numpy()  # [r, K]
        top = (read.top + spoilt[:, None]).cpu().numpy()  # [r, K]
        at = 0
        for piece in batch:
            span = slice(at, at + len(piece))
            at = span.stop
            self.capture.put(piece, "following", following[span])
            if k := self._top_k[piece.node]:
                self.capture.put(piece, "top_ids", top_ids[span, :k])
                self.capture.put(piece, "top_logprobs", top[span, :k])
            if wanted := self._ids[piece.node]:
                self.capture.put(piece, "ids_logprobs", _at(logits[span], list(wanted), normalizers[span]))
            if piece.end == self._end[piece.node]:
                self._keep_branches(piece, logits[at - 1 : at], normalizers[at - 1 : at])

    def _targets(self, piece: Piece) -> npt.NDArray[np.int64]:
        """[len(piece)] the token after each position; 0 at the node's end, where it depends on the branch."""
        ids = self._table.prompt_ids(self._request[piece.node])
        targets = np.zeros(len(piece), np.int64)
        end = min(piece.end + 1, self._end[piece.node])
        targets[: end - piece.start - 1] = ids[piece.start + 1 : end]
        return targets

    def _keep_branches(self, piece: Piece, logits: Tensor, normalizers: Tensor) -> None:
        """Keep the logprob of each wanted child's first token, from the logits [1, V] of the node's last position."""
        capture, children = self.capture, []
        child, end = piece.node + 1, self._subtree_end[piece.node]
        while child < end:
            if capture.users(child) and capture.low(child) < piece.end:
                children.append(child)
            child = self._subtree_end[child]
        tokens = [int(self._table.prompt_ids(self._request[child])[piece.end]) for child in children]
        arrays = capture.node(piece.node).arrays
        arrays["children"] = np.array(children, np.int32)
        arrays["branches"] = _at(logits, tokens, normalizers)[0]

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


def _at(logits: Tensor, ids: list[int], normalizers: Tensor) -> Floats:
    """[r, len(ids)] logprobs of given ids in every row of the logits [r, V]."""
    columns = torch.tensor(ids, dtype=torch.int64, device=logits.device)
    found: Floats = (logits[:, columns].float() - normalizers[:, None]).cpu().numpy()
    return found


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
