"""Simulated engine that stores, instead of keys and values, the token prefix each was computed from.

Every slot of the simulated pool holds the identity of a token prefix. Each attention is checked to read, at every
position, the prefix of its sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from batchgen.plan.cache_groups import held_groups
from batchgen.plan.scheduler import Scheduler, SchedulerConfig
from batchgen.plan.spans import ItemSpans, PromptSpans, Spans
from batchgen.plan.state_slots import StateGroup
from batchgen.plan.step_plan import PrefillChunk, StepPlan
from batchgen.plan.tree import build_tree
from batchgen.plan.window_pages import WindowGroup

FIRST_ITEM = 100
"""First id of a feature."""


class Simulator:
    """Runs the scheduler on `prompts` to the end; sample s of request r generates `targets[r][s]` tokens."""

    def __init__(
        self,
        prompts: list[list[int]],
        targets: list[list[int]],
        max_new: list[int],
        config: SchedulerConfig,
        keys: list[int] | None = None,
        lag: int = 0,
        kinds: list[int] | None = None,
        features: dict[int, int] | None = None,
        lengths: list[int] | None = None,
    ) -> None:
        """`features`: item -> number of its features; ids from `FIRST_ITEM` on are features of items.

        `lengths`: tokens of each prompt that see one another, from its start.
        """
        tokens = np.array([t for p in prompts for t in p], np.int32)
        offsets = np.cumsum([0] + [len(p) for p in prompts]).astype(np.int64)
        self.tree = build_tree(tokens, offsets, None if keys is None else np.array(keys, np.int64))
        samples = np.array([len(t) for t in targets], np.int32)
        ends = None if kinds is None else np.array(kinds, np.int32)
        self.spans: Spans | None = None
        if features is not None:
            sizes = np.array([features[item] for item in sorted(features)], np.int64)
            self.spans = ItemSpans(tokens, offsets, FIRST_ITEM, sizes)
        if lengths is not None:
            self.spans = PromptSpans(np.array(lengths, np.int64))
        self.scheduler = Scheduler(self.tree, samples, np.array(max_new, np.int32), config, ends, self.spans)
        self.prompts, self.targets, self.config, self.lag = prompts, targets, config, lag
        self.keys = keys or [0] * len(prompts)
        self.size = config.page_size
        self.memory: list[list[int | None]] = [[None] * self.size for _ in range(config.num_pages)]
        held = held_groups(config.cache_groups)
        self.held = [group for group in held if isinstance(group, WindowGroup)]
        """At most one group, the last of all but that of states."""
        self.slots: list[int | None] = [None] * sum(group.num_pages for group in held if isinstance(group, StateGroup))
        """The prefix after which the state of each slot is; empty: the model has no states."""
        self.state_tokens = 0
        """Prompt and output tokens that states were computed over."""
        self.window_memory: list[list[int | None]] = [
            [None] * self.size for group in self.held for _ in range(group.num_pages)
        ]
        self.interned: dict[tuple[int, object], int] = {}
        self.owners: dict[int, tuple[int, int]] = {}
        """Sequence id -> (request, sample)."""
        self.tokens: dict[int, list[int]] = {}
        """Sequence id -> identity of every prefix of the sequence, prompt and output."""
        self.generated: dict[int, int] = {}
        self.ended: set[int] = set()
        self.failed: set[int] = set()
        pages = [
            -(-(len(prompt) + limit - 1) // config.page_size) for prompt, limit in zip(prompts, max_new, strict=True)
        ]
        self.too_large = [r for r, count in enumerate(pages) if count >= config.num_pages]
        for request in self.too_large:
            assert self.scheduler.cancel(request) == []
        self.prompt_ids = [self.chain(-1 - k, p) for k, p in zip(self.keys, prompts, strict=True)]
        self.previous: StepPlan | None = None
        self.decode_positions = 0
        self.saved = 0
        self.most_groups = 0
        self.most_spare = 0
        """Most pages of the window layers that were held for samples that had not begun."""
        self.delayed: list[list[int]] = [[] for _ in range(lag)]

    def chain(self, root: int, items: list[int]) -> list[int]:
        """Identities of all prefixes of `items` that continue the prefix `root`."""
        out = []
        for item in items:
            root = self.interned.setdefault((root, item), len(self.interned))
            out.append(root)
        return out

    def run(self, between: Callable[[int], None] | None = None, limit: int = 100_000) -> None:
        for step in range(limit):
            plan = self.scheduler.step()
            if plan is None:
                break
            self.execute(plan)
            finished = self.count(plan)
            self.delayed.append(finished)
            self.scheduler.commit(self.delayed.pop(0))
            if between is not None:
                between(step)
        else:
            raise AssertionError("the job did not finish")
        assert not any(self.scheduler.group_pages_in_use)
        assert self.scheduler.unended == 0
        expected = {
            (r, s): n
            for r, targets in enumerate(self.targets)
            if r not in self.failed and r not in self.too_large
            for s, n in enumerate(targets)
        }
        got = {self.owners[q]: n for q, n in self.generated.items() if self.owners[q][0] not in self.failed}
        assert got == expected

    def run_cancelling(self, cancels: list[tuple[int, int]]) -> None:
        """Run with requests that are cancelled; `cancels`: (step, request), which may not exist."""

        def between(step: int) -> None:
            for when, request in cancels:
                if when == step and request < len(self.prompts):
                    self.cancel(request)

        self.run(between)

    def run_withdrawing(self, shares: list[tuple[int, float]], together: set[int]) -> int:
        """Run while requests that have not begun are withdrawn; returns how many were. `shares`: (step, share)."""
        stay = np.array([request in together for request in range(len(self.prompts))])

        def between(step: int) -> None:
            for share in (share for when, share in shares if when == step):
                most = share * self.scheduler.unbegun
                withdrawn = self.scheduler.withdraw(share, stay)
                assert sum(len(self.targets[request]) for request in withdrawn) <= most
                assert not stay[withdrawn].any()
                assert not {request for request, _ in self.owners.values()} & {*withdrawn}
                assert not self.failed & {*withdrawn}
                self.failed |= {*withdrawn}

        self.run(between)
        return len(self.failed)

    def cancel(self, request: int) -> None:
        self.failed.add(request)
        for sequence in self.scheduler.cancel(request):
            assert self.owners[sequence][0] == request
            self.ended.add(sequence)
            for delayed in self.delayed:
                if sequence in delayed:
                    delayed.remove(sequence)

    def execute(self, plan: StepPlan) -> None:
        """Run a step on the simulated pool: copies, then stores, then reads."""
        config = self.config
        assert plan.tokens <= config.max_tokens_per_step
        if not self.lag:
            assert plan.tokens > 0
        for start in plan.starts:
            assert start.sequence == len(self.owners)
            self.owners[start.sequence] = (start.request, start.sample_index)
            self.tokens[start.sequence] = list(self.prompt_ids[start.request])
            self.generated[start.sequence] = 0
            assert start.request not in self.failed
        assert len(self.owners) - len(self.ended) <= config.max_num_seqs
        self.copy(plan)
        stores: dict[tuple[int, int], int] = {}
        for chunk in plan.prefills:
            assert len(chunk.pages) == -(-chunk.end // self.size)
            if chunk.store:
                ids = self.ids(chunk)
                for position in range(chunk.start, chunk.end):
                    self.store(stores, chunk.pages, position, ids[position])
        for row in plan.decodes:
            self.store(stores, row.pages, row.position, self.tokens[row.sequence][row.position])
        for (page, slot), value in stores.items():
            self.memory[page][slot] = value
        if self.held:
            self.store_in_window(plan, stores)
        for chunk in plan.prefills:
            self.attend(chunk.pages, chunk.end, self.ids(chunk))
            self.attend_in_window(plan, chunk.pages, chunk.start, chunk.end, self.ids(chunk))
        for row in plan.decodes:
            assert row.position == len(self.tokens[row.sequence]) - 1
            assert len(row.pages) == row.position // self.size + 1
            self.attend(row.pages, row.position + 1, self.tokens[row.sequence])
            self.attend_in_window(plan, row.pages, row.position, row.position + 1, self.tokens[row.sequence])
        if self.held and not self.lag:
            self.count_window_pages(plan)
        if self.slots:
            self.compute_states(plan)
        self.check_groups(plan)
        self.check_samples(plan)

    def compute_states(self, plan: StepPlan) -> None:
        """Each row reads the state after its prefix, and writes its own. No other row of the step reads that slot."""
        before, writers, readers = list(self.slots), dict[int, int](), list[tuple[int, int]]()

        def compute(row: int, source: int, slot: int, ids: list[int], begin: int, end: int) -> None:
            assert before[source] == (ids[begin - 1] if begin else None)
            assert slot not in (0, *writers)
            readers.append((source, row))
            writers[slot], before[slot] = row, ids[end - 1]
            self.state_tokens += end - begin

        for number, chunk in enumerate(plan.prefills):
            ids, begin = self.ids(chunk), chunk.start
            assert chunk.states[-1].end == chunk.end
            for end, source, slot in chunk.states:
                if chunk.store:
                    compute(number, source, slot, ids, begin, end)
                    begin = end
                else:
                    readers.append((source, number))
                    assert before[source] == ids[end - 1]
        for at, row in enumerate(plan.decodes):
            source, slot = plan.decodes.states[:, at].tolist()
            compute(-1 - at, source, slot, self.tokens[row.sequence], row.position, row.position + 1)
        assert all(writers.get(source, row) == row for source, row in readers)
        self.slots = before

    def count_window_pages(self, plan: StepPlan) -> None:
        """The window layers hold pages for what the step sees and for what starts later, and for nothing else."""
        spans = [(chunk.pages, chunk.start, chunk.end) for chunk in plan.prefills]
        spans += [(row.pages, row.position, row.position + 1) for row in plan.decodes]
        seen = {
            self.page_in_window(plan, page)
            for pages, start, end in spans
            for page in pages[self.first_visible(start) // self.size : -(-end // self.size)]
        }
        number = self.config.cache_groups.index(self.held[0])
        spare = self.scheduler.group_pages_in_use[number] - len(seen)
        assert spare >= 0
        decoding = {row.sequence for row in plan.decodes}
        alive = set(self.owners) - self.ended
        starting = self.nodes_to_start(alive - decoding)
        each = self.held[0].most_pages(self.size) + 1
        assert spare <= len(starting) * each, "no sample starts at the other nodes"
        if not starting and not plan.prefills:
            assert spare == 0
        self.most_spare = max(self.most_spare, spare)

    def nodes_to_start(self, waiting: set[int]) -> set[int]:
        """Nodes on the paths to samples that have not begun, or have begun and hold no pages."""
        begun = [0] * len(self.prompts)
        for request, _ in self.owners.values():
            begun[request] += 1
        requests = {self.owners[s][0] for s in waiting}
        unbegun = {r for r, targets in enumerate(self.targets) if begun[r] < len(targets)}
        requests |= unbegun - self.failed - set(self.too_large)
        nodes: set[int] = set()
        for request in requests:
            node = int(self.tree.node_of_request[request])
            while node >= 0:
                nodes.add(node)
                node = int(self.tree.parent[node])
        return nodes

    def copy(self, plan: StepPlan) -> None:
        """Copy pages, one after the other."""
        targets = [c.target for c in plan.copies]
        assert len(set(targets)) == len(targets)
        for copy in plan.copies:
            assert copy.source != 0
            assert copy.target != 0
            assert 0 < copy.tokens < self.size
            self.memory[copy.target][: copy.tokens] = self.memory[copy.source][: copy.tokens]
            if self.held:
                source, target = copy.pages[-1]
                assert source != 0
                assert target != 0
                self.window_memory[target][: copy.tokens] = self.window_memory[source][: copy.tokens]

    def ids(self, chunk: PrefillChunk) -> list[int]:
        ids = self.prompt_ids[chunk.request]
        if chunk.sequence is not None:
            assert self.owners[chunk.sequence][0] == chunk.request
            ids = self.tokens[chunk.sequence]
        assert 0 <= chunk.start < chunk.end <= len(ids)
        return ids

    def store(self, stores: dict[tuple[int, int], int], pages: list[int], position: int, value: int) -> None:
        page = pages[position // self.size]
        assert page != 0
        assert (page, position % self.size) not in stores
        stores[page, position % self.size] = value

    def attend(self, pages: list[int], end: int, ids: list[int]) -> None:
        assert 0 not in pages
        held = [value for page in pages for value in self.memory[page]][:end]
        assert held == ids[:end]

    def store_in_window(self, plan: StepPlan, stores: dict[tuple[int, int], int]) -> None:
        """Store into the window layers' pages; no two positions of a step share a slot there either."""
        slots = [(self.page_in_window(plan, page), slot) for page, slot in stores]
        assert len(set(slots)) == len(slots)
        for (page, slot), value in zip(slots, stores.values(), strict=True):
            assert page != 0
            self.window_memory[page][slot] = value

    def attend_in_window(self, plan: StepPlan, pages: list[int], start: int, end: int, ids: list[int]) -> None:
        """Read what tokens at positions [start, end) see in the window layers."""
        if not self.held:
            return
        for position in range(self.first_visible(start), end):
            page = self.page_in_window(plan, pages[position // self.size])
            assert self.window_memory[page][position % self.size] == ids[position]

    def first_visible(self, position: int) -> int:
        return max(0, self.held[0].first_visible(position))

    def page_in_window(self, plan: StepPlan, page: int) -> int:
        """The window layers' page of a page of the tables."""
        pages = plan.group_pages[-1]
        return int(pages[page])

    def check_groups(self, plan: StepPlan) -> None:
        covered = [0] * len(plan.decodes)
        for group in plan.groups:
            assert len(group.rows) >= 2
            assert len(group.pages) == group.end_page - group.start_page > 0
            saving = (len(group.rows) - 1) * len(group.pages) * self.size
            pass_cost, row_cost = self.config.group_costs
            assert saving >= pass_cost + len(group.rows) * row_cost
            self.saved += saving
            assert group.rows == list(range(group.rows[0], group.rows[-1] + 1))
            for row in group.rows:
                assert plan.decodes[row].pages[group.start_page : group.end_page] == group.pages
                assert covered[row] == group.start_page
                covered[row] = group.end_page
                assert group.end_page * self.size <= plan.decodes[row].position
        self.most_groups = max(self.most_groups, len(plan.groups))
        self.decode_positions += sum(row.position + 1 for row in plan.decodes)
        rows = [row.sequence for row in plan.decodes]
        if self.previous is not None and rows == [row.sequence for row in self.previous.decodes]:
            assert plan.groups == self.previous.groups
        self.previous = plan

    def check_samples(self, plan: StepPlan) -> None:
        flat: list[tuple[list[int], int]] = []
        for chunk in plan.prefills:
            flat += [(self.ids(chunk), position) for position in range(chunk.start, chunk.end)]
        flat += [(self.tokens[row.sequence], row.position) for row in plan.decodes]
        sequences = [row.sequence for row in plan.samples]
        assert len(set(sequences)) == len(sequences)
        assert not self.ended & set(sequences)
        assert {row.sequence for row in plan.decodes} <= set(sequences)
        for row in plan.samples:
            ids, position = flat[row.token]
            own = self.tokens[row.sequence]
            assert position == len(own) - 1
            assert ids[position] == own[position]

    def count(self, plan: StepPlan) -> list[int]:
        finished = []
        for row in plan.samples:
            request, sample = self.owners[row.sequence]
            self.generated[row.sequence] += 1
            generated = self.generated[row.sequence]
            assert generated <= self.targets[request][sample]
            ids = self.tokens[row.sequence]
            ids += self.chain(ids[-1], [("output", request, sample, generated)])  # type: ignore[list-item]
            if generated == self.targets[request][sample]:
                finished.append(row.sequence)
                self.ended.add(row.sequence)
        return finished
