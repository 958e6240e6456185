"""Dummy run: the measured memory of the largest step is never exceeded by the job."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from batchgen.engine.engine import Engine
from batchgen.engine.memory.dummy_run import (
    PAGES,
    DummyRun,
    cuda_peak,
    dummy_run,
    estimated_bytes,
    measure_largest_step,
    widest_params,
)
from batchgen.engine.workload import JobWorkload, plan_workload
from batchgen.errors import UsageError
from batchgen.kernels.grouped import GroupedPool
from batchgen.plan.step_plan import StepPlan
from batchgen.request.completion import Completion
from batchgen.request.fields.hidden_states import HiddenStates
from batchgen.request.fields.params import SamplingParams
from batchgen.request.table.request_table import RequestTable
from tests.engine.memory.test_kv_budget import SPEC
from tests.engine.reference import save_with_words, shared_prefix_prompts

VOCAB = 8192
"""Large enough, with the MLP width below, for logits and activations to dominate attention's workspace."""
ROWS, TOKENS = 8, 96
PAGE = 16

KINDS = {
    "plain": [SamplingParams(temperature=0.0)],
    "mixed": [
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=0.0, return_logprob=True, top_logprobs_num=20, logprob_start_len=0),
        SamplingParams(temperature=0.7, frequency_penalty=0.5, top_k=40, min_p=0.1),
        SamplingParams(temperature=0.0, return_hidden_states=HiddenStates((0, 1, -1))),
        SamplingParams(temperature=1.0, n=4, logit_bias=((3, 1.0),), bad_words=((4, 5), (6,))),
        SamplingParams(temperature=0.0, allowed_token_ids=tuple(range(100)), min_new_tokens=3),
        SamplingParams(temperature=1.0, regex="(w[0-9]+ )*", return_logprob=True, token_ids_logprob=(1, 2, 3)),
    ],
}


def live_peak(body: Callable[[], None]) -> int:
    """Peak bytes of CPU tensors, including kernel workspaces, from the memory events of PyTorch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as watched:
        body()
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("llama")
    save_with_words("llama", folder, vocab_size=VOCAB, max_position_embeddings=1024, intermediate_size=4096)
    # Attention that allocates its memory with PyTorch, as on a GPU.
    return Engine(str(folder), dtype="float32", attention="torch", max_num_seqs=ROWS, max_tokens_per_step=TOKENS)


def table(kind: str, longest: int = 150) -> RequestTable:
    made, params = RequestTable(), KINDS[kind]
    for i, prompt in enumerate(shared_prefix_prompts(16, VOCAB, 1, longest)):
        made.append(i, 0, prompt, params[i % len(params)], i, 1 + i % 7)
    return made


def mixed(job: DummyRun) -> list[StepPlan]:
    """The steps with prefill."""
    return [step for step in job.steps if step.prefills]


@pytest.mark.parametrize("kind", ["plain", pytest.param("mixed", marks=pytest.mark.slow)])
def test_no_step_takes_more_than_the_largest(engine: Engine, kind: str) -> None:
    spec, rows = engine.model.spec, table(kind)
    workload = plan_workload(rows)
    engine.grammars.prepare(p.constraint for p in KINDS[kind] if p.constraint is not None)
    limits = ROWS, TOKENS
    run = engine.dummy_runner(engine.resources(workload, limits), limits)
    measured, tokens = measure_largest_step(run, workload, spec, PAGE, limits, live_peak)
    assert tokens == TOKENS
    running = engine.start(rows)
    done: list[list[Completion]] = []
    needed = live_peak(lambda: done.extend(running.loop.run()))
    assert len(done) == 16
    assert all(sample.error is None for group in done for sample in group)
    assert 0 < needed <= measured
    assert measured <= estimated_bytes(spec, dummy_run(workload, spec, PAGE, ROWS, TOKENS))


def test_a_dummy_run_is_as_large_as_the_job_can_be() -> None:
    made = RequestTable()
    for i, length in enumerate([5, 40, 7]):
        made.append(i, 0, [i] * length, SamplingParams(n=2), i, 10)
    job = dummy_run(plan_workload(made), SPEC, 4, 100, 1000)
    assert job.rows == 6
    steps = mixed(job)
    assert steps[0].tokens == 52 + 6, "at most the job's tokens"
    assert steps[0].decodes[0].position == 40 + 10 - 2
    assert [(c.start, c.end) for c in steps[1].prefills] == [(0, 40)]
    assert [(g.rows, g.end_page) for g in steps[1].groups] == [([0, 1, 2, 3, 4, 5], 10)]
    assert {(c.start, c.end) for c in steps[2].prefills} == {(36, 40)}
    assert len(steps[2].prefills) == 13
    cut = dummy_run(plan_workload(made), SPEC, 4, 4, 30)
    assert cut.rows == 4
    steps = mixed(cut)
    assert [(c.start, c.end) for c in steps[1].prefills] == [(10, 40)]
    assert [c.end for c in steps[0].prefills] == [30]
    assert {page for c in steps[0].prefills for page in c.pages} == {1}


def test_graphs_are_captured_before_the_largest_steps() -> None:
    made = RequestTable()
    made.append(0, 0, [1] * 40, SamplingParams(n=2), 0, 10)
    steps = dummy_run(plan_workload(made), SPEC, 4, 100, 1000).steps
    assert [bool(step.prefills) for step in steps] == [False] * 3 + [True] * 3


@pytest.mark.parametrize("length", [7, 8])
def test_a_dummy_run_has_only_positions_of_the_job(length: int) -> None:
    """A prompt may fill the context, where learned position embeddings end."""
    made = RequestTable()
    made.append(0, 0, [1] * length, SamplingParams(max_new_tokens=0), 0, 0)
    made.set_score_start(1)
    made.append(1, 0, [2] * (length - 2), SamplingParams(), 0, 1)
    job = dummy_run(plan_workload(made), SPEC, 4, 100, 1000)
    for step in (job.start, *job.steps):
        assert all(chunk.end <= length for chunk in step.prefills)
        assert all(row.position < length for row in step.decodes)
        ends = [(group.end_page * 4, step.decodes[i].position) for group in step.groups for i in group.rows]
        assert all(end <= position for end, position in ends), "each row has a page outside the prefix group"


def test_short_prompts_fill_a_step_together() -> None:
    made = RequestTable()
    for i in range(500):
        made.append(i, 0, [i % 60, i // 60, 3], SamplingParams(), i, 1)
    job = dummy_run(plan_workload(made), SPEC, 16, 8, 100)
    assert [c.end for c in mixed(job)[0].prefills] == [3] * 33 + [1]
    assert mixed(job)[0].tokens == 108
    assert len(job.workload.tree) > 30, "the prompts do not share their values"


def test_widest_params_combines_the_fields_of_all_rows() -> None:
    widest = widest_params([p for params in KINDS.values() for p in params])
    assert (widest.temperature, widest.top_p, widest.top_k, widest.min_p) == (1.0, 0.9, 40, 0.1)
    assert widest.has_penalties
    assert widest.bad_words == ((4, 5), (6,))
    assert (widest.top_logprobs_num, widest.token_ids_logprob, widest.logprob_start_len) == (20, (1, 2, 3), 0)
    assert widest.return_hidden_states == HiddenStates((-1, 0, 1), "all")
    assert widest.constraint is not None
    assert widest_params([SamplingParams(temperature=0.0)]) == SamplingParams(max_new_tokens=None, temperature=0.0)


class Narrow:
    """Runs no steps; raises an out-of-memory error for steps of more than `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.tried: list[int] = []

    def __call__(self, job: DummyRun, pool: GroupedPool) -> None:
        assert pool.num_pages == PAGES
        self.tried.append(sum(c.end for c in mixed(job)[0].prefills))
        if self.tried[-1] > self.tokens:
            raise torch.OutOfMemoryError("CUDA out of memory.")


def calling(body: Callable[[], None]) -> int:
    body()
    return 77


def long_prompts() -> JobWorkload:
    made = RequestTable()
    for i in range(40):
        made.append(i, 0, [i] * 200, SamplingParams(temperature=0.0), i, 9)
    return plan_workload(made)


def test_a_step_that_does_not_fit_is_halved() -> None:
    steps = Narrow(1500)
    assert measure_largest_step(steps, long_prompts(), SPEC, PAGE, (16, 4096), calling) == (77, 1024)
    assert steps.tried == [4096, 2048, 1024]


def test_too_little_memory_for_a_step_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"a step of 16 tokens and 16 sequences .* lower --max-num-seqs"):
        measure_largest_step(Narrow(10), long_prompts(), SPEC, PAGE, (16, 128), calling)


def test_an_empty_job_needs_no_memory() -> None:
    assert measure_largest_step(Narrow(0), plan_workload(RequestTable()), SPEC, PAGE, (16, 128), calling) == (0, 128)


def test_the_peak_of_a_gpu_is_that_of_the_allocator_s_reserved_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    held = {"now": 300, "most": 300}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: held.update(now=100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: held["now"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: held.update(most=held["now"]))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: held["most"])

    def body() -> None:
        assert calls == ["synchronize"]
        held.update(now=700, most=900)

    assert cuda_peak(torch.device("cuda"), body) == 800
    assert calls == ["synchronize"] * 2
