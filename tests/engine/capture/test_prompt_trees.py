"""Prompt logprobs on random trees, requests and pools, against a model whose logits are a function of the prefix."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.capture.prompt_logprobs import PromptLogprobs
from batchgen.engine.memory.d2h_queue import D2HQueue
from batchgen.engine.workload import JobWorkload
from batchgen.kernels.device import HOST
from batchgen.kernels.ops import TORCH_OPS
from batchgen.plan.scheduler import SchedulerConfig
from batchgen.plan.step_plan import StepPlan
from batchgen.request.completion import Completion
from batchgen.request.fields.params import SamplingParams
from batchgen.request.table.request_table import RequestTable
from tests.engine.capture.test_prompt_logprobs import listed
from tests.plan.simulator import Simulator
from tests.plan.test_scheduler import EITHER, columns

VOCAB = 12
pytestmark = pytest.mark.field("logprob_start_len", "top_logprobs_num", "token_ids_logprob")


def logits_of(prefix: int) -> np.ndarray:
    """[V] logits with few distinct values, so that there are ties."""
    return np.random.default_rng(prefix).integers(-6, 6, VOCAB).astype(np.float32) / 2


ids = st.lists(st.integers(0, VOCAB - 1), max_size=3)
want = st.tuples(st.integers(-1, 25), st.sampled_from([0, 0, 1, 3, VOCAB]), ids, st.booleans())
wants = st.lists(want, min_size=14, max_size=14)


class Scoring(Simulator):
    """Scores every step, whose states are identities of prefixes, and checks each request at its end."""

    def __init__(self, rows: list[tuple], wants: list[tuple], config: SchedulerConfig) -> None:
        prompts, targets, limits, keys = columns(rows)
        super().__init__(prompts, targets, limits, config, keys)
        table = RequestTable()
        for i, (ids, (start, k, named, scored)) in enumerate(zip(prompts, wants, strict=False)):
            first, asked = -1 if scored else min(start, len(ids)), {"token_ids_logprob": tuple(named)}
            params = SamplingParams(return_logprob=True, logprob_start_len=first, top_logprobs_num=k, **asked)
            table.append(i, 0, ids, params, i, 1)
            if scored and max(start, 1) < len(ids):
                table.set_score_start(max(start, 1))
        samples = np.array([0 if i in self.too_large else len(t) for i, t in enumerate(targets)], np.int32)
        own = np.arange(len(rows))
        none = np.zeros(0, np.int64)
        workload = JobWorkload(table, self.tree, samples, own, samples < 0, none, none, none)
        self.table = table
        self.scorer = PromptLogprobs(workload, VOCAB, str, TORCH_OPS)
        self.d2h_queue = D2HQueue(HOST)
        self.unended = [len(t) for t in targets]
        self.read: Counter[int] = Counter()

    def execute(self, plan: StepPlan) -> None:
        super().execute(plan)
        flat = torch.tensor([float(self.ids(c)[p]) for c in plan.prefills for p in range(c.start, c.end)])[:, None]
        scored = self.scorer.score(plan, lambda rows: self.logits(flat[rows]), self.d2h_queue)
        if scored is not None:
            self.scorer.collect(scored)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        prefixes = [int(x) for x in hidden[:, 0]]
        assert 0 < len(prefixes) <= 2
        self.read.update(prefixes)
        return torch.from_numpy(np.stack([logits_of(prefix) for prefix in prefixes]))

    def count(self, plan: StepPlan) -> list[int]:
        finished = super().count(plan)
        for sequence in finished:
            request = self.owners[sequence][0]
            self.unended[request] -= 1
            if not self.unended[request]:
                self.check(request)
                self.scorer.buffers.release(request)
        return finished

    def check(self, index: int) -> None:
        request = self.table[index]
        ids, start, k = self.prompts[index], request.params.logprob_start_len, request.params.top_logprobs_num
        rows = [logits_of(prefix).astype(np.float64) for prefix in self.prompt_ids[index]]
        logprobs = [row - np.log(np.exp(row).sum()) for row in rows]
        if request.score_start >= 0:
            places = range(request.score_start, len(ids))
            expected = [logprobs[j - 1][ids[j]] for j in places]
            np.testing.assert_allclose(self.scorer.target_logprobs(index), expected, atol=1e-5)
            assert self.scorer.most_likely_ids(index).tolist() == [int(rows[j - 1].argmax()) for j in places]
        (done,) = self.scorer.add_to_completions(request, [Completion(index)])
        if start < 0:
            assert done == Completion(index)
            return
        places = range(max(start, 1), len(ids))
        nulls = [None] * (start == 0)

        def same(found: object, values: list[float], width: int) -> None:
            got = listed(found)
            assert got[: len(nulls) * width] == nulls * width
            np.testing.assert_allclose(got[len(nulls) * width :], values, atol=1e-5)

        same(done.input_logprobs, [logprobs[j - 1][ids[j]] for j in places], 1)
        if k:
            best = [np.argsort(-rows[j - 1], kind="stable")[:k] for j in places]
            same(done.input_top_ids, [token for row in best for token in row.tolist()], k)
            top = [logprobs[j - 1][row] for j, row in zip(places, best, strict=True)]
            same(done.input_top_logprobs, [x for row in top for x in row.tolist()], k)
        if named := request.params.token_ids_logprob:
            same(done.input_ids_logprobs, [logprobs[j - 1][token] for j in places for token in named], len(named))


@settings(max_examples=70, deadline=None)
@given(EITHER, wants)
def test_every_request_gets_its_prompt_logprobs(job: tuple[list[tuple], SchedulerConfig], wants: list) -> None:
    """In pools of many pages, and for little more than one request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchgen.engine.capture.prompt_logprobs.LOGITS_BYTES", 2 * 4 * VOCAB)
        sim = Scoring(job[0], wants, job[1])
        sim.run()
    assert not sim.read or max(sim.read.values()) == 1, "a position was scored twice"
    assert sim.scorer.buffers.nbytes == 0
