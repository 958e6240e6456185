"""What is to be computed of a table: which prompts run, which copy another's result, and what sharing saves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchgen.plan.ends import EXACT
from batchgen.plan.estimate import find_dedup
from batchgen.plan.tree import PrefixTree, build_tree
from batchgen.request import RequestTable

__all__ = ["Workload", "plan_workload"]


@dataclass(frozen=True, slots=True)
class Workload:
    """A table with its exact prefix tree and the samples that remain to be generated.

    The tree spans every prompt of the table, those already committed too, so that `cached_tokens` and `dedup_of` do
    not depend on where a run was resumed.
    """

    table: RequestTable
    tree: PrefixTree
    samples: npt.NDArray[np.int32]
    """[N] samples to run; 0 for those done before, copied from a leader, or without anything to compute"""
    leader: npt.NDArray[np.int64]
    """[N] index of the identical greedy request this one copies; itself where it is generated"""
    done: npt.NDArray[np.bool_]
    """[N] finished in an earlier run"""
    followers: npt.NDArray[np.int64]
    """[F] requests to copy, sorted by leader"""
    followed: npt.NDArray[np.int64]
    """[F] the leader of each of them"""
    idle: npt.NDArray[np.int64]
    """[I] requests that remain but compute nothing: no token and nothing of their prompt is asked for"""
    too_large: dict[int, int] = field(default_factory=dict)
    """request -> pages it needs, where that is more than the whole pool"""
    refused: list[int] = field(default_factory=list)
    """requests given as embeddings, where the model takes none"""
    adapter: npt.NDArray[np.int32] | None = None
    """[N] index of each request's adapter, -1 for none; None where no request has one"""

    @property
    def draws(self) -> npt.NDArray[np.int32]:
        """[N] most tokens that a sample draws. One that runs for its prompt alone draws a token, which is dropped."""
        return np.maximum(self.table.max_new_tokens, 1)

    def kinds(self, *, repeats_end: bool = False) -> npt.NDArray[np.int32]:
        """[N] requests of one kind are expected to end alike; `EXACT` where only the limit ends them.

        Args:
            repeats_end: whether samples that go round in circles are ended.
        """
        params = self.table.params
        exact = np.array([p.runs_to_limit and not repeats_end for p in params], np.bool_)[self.table.params_id]
        return np.where(exact | (self.draws == 1), EXACT, self.table.params_id).astype(np.int32)

    @property
    def first_text(self) -> npt.NDArray[np.int64]:
        """[N] for each text to score the request of its prompt's first text; other requests stand for themselves."""
        table, own = self.table, np.arange(len(self.table))
        more = np.zeros(len(own), np.bool_)
        row, prompt = table.row_index, table.prompt_index
        more[1:] = (table.score_start[1:] >= 0) & (row[1:] == row[:-1]) & (prompt[1:] == prompt[:-1])
        return np.maximum.accumulate(np.where(more, 0, own)) if len(own) else own

    def followers_of(self, leader: int) -> list[int]:
        """The requests that take over this one's result, in input order."""
        low = bisect_left(self.followed, leader)
        high = bisect_left(self.followed, leader + 1, low)
        found: list[int] = self.followers[low:high].tolist()
        return found

    def set_aside_too_large(self, pages: int, page_size: int) -> None:
        """Generate nothing for requests that `pages` pages cannot hold even alone; they go to `too_large`."""
        positions = np.diff(self.table.offsets) + self.draws - 1
        needed = -(-positions // page_size)
        large = np.flatnonzero((needed > pages) & (self.samples > 0))
        if not len(large):
            return
        for index in self._set_aside(large):
            self.too_large[index] = int(needed[index])

    def refuse_embeds(self) -> None:
        """Generate nothing for prompts given as embeddings; they go to `refused`."""
        assert self.table.embeds_id is not None
        self.refused.extend(self._set_aside(np.flatnonzero((self.table.embeds_id >= 0) & (self.samples > 0))))

    def _set_aside(self, requests: npt.NDArray[np.int64]) -> list[int]:
        """Generate nothing for these; those returned stand for their prompts.

        The texts of a prompt are one output row: with one of them all are set aside.
        """
        if not len(requests):
            return []
        first = self.first_text
        self.samples[np.isin(first, first[requests])] = 0
        found: list[int] = requests[np.unique(first[requests], return_index=True)[1]].tolist()
        return found


def plan_workload(
    table: RequestTable,
    done: npt.NDArray[np.bool_] | None = None,
    *,
    dedup: bool = True,
    adapters: Sequence[str] = (),
) -> Workload:
    """Build the tree, find identical greedy requests and set aside what needs no computation.

    Args:
        table: every prompt of the job.
        done: [N] requests finished in an earlier run.
        dedup: copy identical greedy requests instead of generating each.
        adapters: names, in the order of their indexes.
    """
    count = len(table)
    done = np.zeros(count, np.bool_) if done is None else done
    adapter = _adapters(table, adapters)
    tree = build_tree(table.tokens, table.offsets, _keys(adapter, table.embeds_id))
    own = np.arange(count, dtype=np.int64)
    params_id = table.params_id
    greedy = np.array([p.greedy for p in table.params], np.bool_)[params_id] if count else np.zeros(0, np.bool_)
    scored = table.score_start >= 0
    leader = own
    if dedup:
        leader = find_dedup(tree.node_of_request, params_id, greedy & ~scored, table.max_new_tokens)
    wanted = np.array([p.samples for p in table.params], np.int32)[params_id] if count else np.zeros(0, np.int32)
    reads_prompt = np.array([p.reads_prompt for p in table.params], np.bool_)[params_id] if count else greedy
    idle = ~done & (table.max_new_tokens == 0) & ~reads_prompt & ~scored
    samples = np.where(done | idle, 0, wanted).astype(np.int32)
    # A follower whose leader was committed by an earlier run is generated itself: the leader's tokens are in a file.
    copies = (leader != own) & ~done & ~done[leader] & (samples > 0)
    samples[copies] = 0
    followers = np.flatnonzero(copies)
    followers = followers[np.argsort(leader[followers], kind="stable")]
    return Workload(
        table, tree, samples, leader, done, followers, leader[followers], np.flatnonzero(idle), adapter=adapter
    )


def _adapters(table: RequestTable, names: Sequence[str]) -> npt.NDArray[np.int32] | None:
    """[N] each request's adapter by index, -1 for none; None where no request has one."""
    if not any(params.lora_path for params in table.params):
        return None
    places = {name: index for index, name in enumerate(names)}
    by_params = [-1 if params.lora_path is None else places[params.lora_path] for params in table.params]
    return np.array(by_params, np.int32)[table.params_id]


def _keys(
    adapter: npt.NDArray[np.int32] | None, embeds_id: npt.NDArray[np.int32] | None
) -> npt.NDArray[np.int64] | None:
    """[N] equal for requests whose equal ids mean the same keys and values; None where that holds for all."""
    if adapter is None and embeds_id is None:
        return None
    high = np.int64(0) if adapter is None else adapter.astype(np.int64) + 1
    low = np.int64(0) if embeds_id is None else embeds_id.astype(np.int64) + 1
    return np.asarray((high << np.int64(32)) | low, np.int64)
