"""`JobWorkload`: the requests of a job, their prefix tree, and which of them run, are copied or are skipped."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.models.base import Bidirectional
from batchgen.plan.estimate import find_dedup
from batchgen.plan.length_predictor import EXACT
from batchgen.plan.spans import ItemSpans, PromptSpans, Spans
from batchgen.plan.tree import PrefixTree, blocks, build_tree
from batchgen.request.table.request_table import RequestTable


@dataclass(frozen=True, slots=True)
class JobWorkload:
    """A request table with its prefix tree and the samples that remain to be generated.

    The tree spans every prompt of the table, including those that are already committed, so that `cached_tokens` and
    `dedup_of` do not depend on where a run was resumed.
    """

    table: RequestTable
    tree: PrefixTree
    samples: npt.NDArray[np.int32]
    """[N] number of samples to run; 0 if finished before, copied from a leader, or nothing is computed"""
    leader: npt.NDArray[np.int32]
    """[N] index of the identical greedy request that this one duplicates; its own index if none"""
    done: npt.NDArray[np.bool_]
    """[N] finished in an earlier run"""
    followers: npt.NDArray[np.int64]
    """[F] duplicate requests that copy their leader's result, sorted by leader"""
    followed: npt.NDArray[np.int32]
    """[F] leader of each of `followers`"""
    idle: npt.NDArray[np.int64]
    """[I] requests that remain but compute nothing: they return neither tokens nor prompt values"""
    failed: dict[int, ErrorInfo] = field(default_factory=dict)
    """Request -> why it cannot run, for the first request of each such prompt"""
    held: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]] = field(default_factory=dict)
    """Row -> its requests and their samples, for rows that run by themselves"""
    adapter: npt.NDArray[np.int32] | None = None
    """[N] adapter index of each request, -1 for none; None: no request has one"""
    spans: Spans | None = None
    """Spans of positions that see one another; None: there are none"""

    @property
    def longest_span(self) -> int:
        """No span has more positions."""
        return 0 if self.spans is None else self.spans.longest

    @property
    def max_tokens(self) -> npt.NDArray[np.int32]:
        """[N] most tokens sampled per sample. A prompt-only request samples one token, which is discarded."""
        return np.maximum(self.table.max_new_tokens, 1)

    def kinds(self, *, repeats_end: bool = False) -> npt.NDArray[np.int32]:
        """[N] requests of one kind are expected to end alike; `EXACT` where only the limit ends them.

        `repeats_end`: whether samples that go round in circles are ended.
        """
        params = self.table.params
        exact = self.table.by_params([p.runs_to_limit and not repeats_end for p in params], np.bool_)
        return np.where(exact | (self.max_tokens == 1), np.int32(EXACT), self.table.params_id)

    @property
    def first_text(self) -> npt.NDArray[np.int64]:
        """[N] for a text to score, the request of its prompt's first text; for other requests, their own index."""
        table, own = self.table, np.arange(len(self.table))
        more = np.zeros(len(own), np.bool_)
        row, prompt = table.row_index, table.prompt_index
        more[1:] = (table.score_start[1:] >= 0) & (row[1:] == row[:-1]) & (prompt[1:] == prompt[:-1])
        return np.maximum.accumulate(np.where(more, 0, own)) if len(own) else own

    def reordered(self, tree: PrefixTree) -> JobWorkload:
        """The workload with the same prefix tree in another order; `cached_tokens` stay those of this order."""
        return replace(self, tree=replace(tree, shared_len=self.tree.shared_len))

    def followers_of(self, leader: int) -> list[int]:
        """The duplicate requests that copy this one's result, in input order."""
        low = bisect_left(self.followed, leader)
        high = bisect_left(self.followed, leader + 1, low)
        followers: list[int] = self.followers[low:high].tolist()
        return followers

    def skip_too_large(self, pages: int, page_size: int) -> None:
        """Move requests that do not fit into `pages` pages even alone to `failed`."""
        positions = np.diff(self.table.offsets).astype(np.int64)
        positions += self.max_tokens
        positions -= 1
        large = np.flatnonzero((positions > pages * page_size) & (self.samples > 0))
        for index in self._skip(large):
            request = self.table[index]
            self.failed[index] = ErrorInfo(
                ErrorCode.OOM,
                f"the prompt ({len(request.prompt_ids)} tokens) and up to {request.max_new_tokens} new tokens need "
                f"{-(-int(positions[index]) // page_size)} KV pages of {page_size} tokens, but the pool has {pages}; "
                "raise --kv-memory or lower max_new_tokens",
            )

    def refuse_embeds(self, model: str) -> None:
        """Move prompts given as embeddings, which a model of this name does not accept, to `failed`."""
        assert self.table.embeds_id is not None
        problem = f"cannot be given to a {model} model, which looks the ids up again; give `input_ids`"
        error = ErrorInfo(ErrorCode.UNSUPPORTED_FIELD, f"`input_embeds` {problem}", "input_embeds")
        for index in self._skip(np.flatnonzero((self.table.embeds_id >= 0) & (self.samples > 0))):
            self.failed[index] = error

    def set_aside(self, errors: Mapping[int, ErrorInfo]) -> None:
        """Move the requests of rows, and those that they duplicate, to `failed`. `errors`: by row index."""
        for row, error in errors.items():
            self.failed.update(dict.fromkeys(self._skip(self._computed_for(row)), error))

    def hold(self, rows: Iterable[int]) -> None:
        """Let rows, and what they duplicate, wait until all others are done: `alone` gives their workloads."""
        for row in rows:
            requests = self._computed_for(row)
            if len(requests):
                self.held[row] = requests, self.samples[requests]
                self.samples[requests] = 0

    def alone(self, row: int) -> JobWorkload:
        """The workload of one row that was held."""
        requests, count = self.held[row]
        samples = np.zeros_like(self.samples)
        samples[requests] = count
        return replace(self, samples=samples, idle=self.idle[:0], failed={}, held={})

    def _computed_for(self, row: int) -> npt.NDArray[np.int64]:
        """The requests that are computed for a row: its own, and those whose results it copies."""
        own = np.flatnonzero((self.table.row_index == row) & ~self.done)
        computed = np.unique(np.where(self.samples[own] > 0, own, self.leader[own]))
        wanted: npt.NDArray[np.int64] = computed[self.samples[computed] > 0]
        return wanted

    def _skip(self, requests: npt.NDArray[np.int64]) -> list[int]:
        """Skip requests, with all other scored texts of their prompts; returns the first request of each prompt."""
        if not len(requests):
            return []
        first = self.first_text
        self.samples[np.isin(first, first[requests])] = 0
        skipped: list[int] = requests[np.unique(first[requests], return_index=True)[1]].tolist()
        return skipped


def plan_workload(
    table: RequestTable,
    done: npt.NDArray[np.bool_] | None = None,
    *,
    dedup: bool = True,
    adapters: Sequence[str] = (),
    bidirectional: Bidirectional | None = None,
) -> JobWorkload:
    """Build the prefix tree, find identical greedy requests, and skip what needs no computation.

    `done`: [N] requests finished in an earlier run; `dedup`: copy identical greedy requests instead of generating each;
    `adapters`: names in the order of their indexes; `bidirectional`: as in `ModelSpec`.
    """
    count = len(table)
    done = np.zeros(count, np.bool_) if done is None else done
    adapter = _adapters(table, adapters)
    encodes = bidirectional == "text"
    spans = None if bidirectional is None or (table.media is None and not encodes) else _spans(table, bidirectional)
    whole = equal = _equal_prompts(table, spans.lengths) if isinstance(spans, PromptSpans) else None
    if encodes:  # nothing of a row is stored, so that rows share nothing
        whole = np.arange(count, dtype=np.int64)
    tree = build_tree(table.tokens, table.offsets, _keys(adapter, table.embeds_id, whole))
    own = leader = np.arange(count, dtype=np.int32)
    scored = table.score_start >= 0
    if dedup:
        greedy = table.by_params([p.greedy for p in table.params], np.bool_)
        ends = equal if encodes and equal is not None else tree.node_of_request
        leader = find_dedup(ends, table.params_id, greedy & ~scored, table.max_new_tokens)
    num_samples = table.by_params([p.samples for p in table.params], np.int32)
    reads_prompt = table.by_params([p.returns_prompt_values for p in table.params], np.bool_)
    idle = ~done & (table.max_new_tokens == 0) & ~reads_prompt & ~scored
    samples = np.where(done | idle, np.int32(0), num_samples)
    del num_samples
    # A duplicate whose leader was committed by an earlier run is generated, because the leader's tokens are in a file.
    copies = (leader != own) & ~done & ~done[leader] & (samples > 0)
    samples[copies] = 0
    followers = np.flatnonzero(copies)
    followers = followers[np.argsort(leader[followers], kind="stable")]
    followed, empty = leader[followers], np.flatnonzero(idle)
    return JobWorkload(table, tree, samples, leader, done, followers, followed, empty, adapter=adapter, spans=spans)


def _spans(table: RequestTable, kind: Bidirectional) -> Spans:
    """The spans of all prompts of an encoder, or of those with items.

    Features of sounds are causal, as is a text that is scored.
    """
    if kind == "text":
        return PromptSpans(np.diff(table.offsets).astype(np.int64), alone=True)
    items = table.media
    assert items is not None
    if kind == "prompt":
        lengths, sizes = np.zeros(len(table), np.int64), np.diff(table.offsets)
        for part in blocks(len(table.tokens)):
            places = np.flatnonzero(table.tokens[part] >= items.vocab_size) + part.start
            having = np.unique(np.searchsorted(table.offsets, places, side="right") - 1)
            lengths[having] = sizes[having]
        scored = (lengths > 0) & (table.score_start >= 0)
        lengths[scored] = table.score_start[scored]
        return PromptSpans(lengths)
    listed = (items[number] for number in range(len(items)))
    features = np.array([item.features if item.kind == "image" else 1 for item in listed], np.int64)
    return ItemSpans(table.tokens, table.offsets, items.vocab_size, features)


def _equal_prompts(table: RequestTable, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[N] equal numbers for requests whose first `lengths` tokens are equal; -1 for a length of 0."""
    leaders, numbers = np.full(len(table), -1, np.int64), dict[bytes, int]()
    for request in np.flatnonzero(lengths).tolist():
        ids = table.stored_ids(request)[: lengths[request]]
        leaders[request] = numbers.setdefault(blake2b(ids.tobytes(), digest_size=16).digest(), len(numbers))
    return leaders


def _adapters(table: RequestTable, names: Sequence[str]) -> npt.NDArray[np.int32] | None:
    """[N] adapter index of each request, -1 for none; None: no request has one."""
    if not any(params.lora_path for params in table.params):
        return None
    places = {name: index for index, name in enumerate(names)}
    by_params = [-1 if params.lora_path is None else places[params.lora_path] for params in table.params]
    return np.array(by_params, np.int32)[table.params_id]


def _keys(
    adapter: npt.NDArray[np.int32] | None, embeds_id: npt.NDArray[np.int32] | None, whole: npt.NDArray[np.int64] | None
) -> npt.NDArray[np.int64] | None:
    """[N] cache keys: requests share keys and values of equal ids only if their keys are equal; None: all share.

    `whole`: numbers of prompts that share with equal ones alone, -1 for others; they have no embeddings.
    """
    if adapter is None and embeds_id is None and whole is None:
        return None
    high = np.int64(0) if adapter is None else adapter.astype(np.int64) + 1
    low = np.int64(0) if embeds_id is None else embeds_id.astype(np.int64) + 1
    if whole is not None:
        low = np.where(whole < 0, low, whole + 1 + np.max(low))
    return np.asarray((high << np.int64(32)) | low, np.int64)
