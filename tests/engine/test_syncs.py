"""The host never waits for the GPU: whole jobs on the simulated GPU, where each wait is recorded with its line."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from batchgen.engine.engine import Engine
from batchgen.engine.step.sampler import SampledTokens, SamplingMetadata
from batchgen.plan.scheduler import Scheduler
from batchgen.plan.step_plan import StepPlan
from batchgen.request.completion import Completion
from tests.engine.fake_cuda import Sync, fake_cuda
from tests.engine.fake_device import Counts, Wait
from tests.engine.reference import assert_all_same, save_with_words
from tests.engine.sampling.grammar_model import save_grammar_model
from tests.engine.test_hybrid import TYPES
from tests.models.adapters import KINDS, save_adapter


@dataclass(frozen=True, slots=True)
class Step:
    """Counts between two plans."""

    plan: StepPlan
    syncs: list[Sync]
    copies: list[str]
    """Lines that copied pinned memory without the `Device`."""
    uploads: int
    uploads_into: int
    downloads: Counter[str]


@dataclass(frozen=True, slots=True)
class Job:
    """Results and counts of a job, from its first step on; its start may wait."""

    done: list[Completion]
    steps: list[Step]
    syncs: list[Sync]
    """Host waits"""
    waits: list[Wait]
    """Waits for tokens"""
    counts: Counts
    """Counts of the whole run, including its start"""


def run_job(folder: Path, work: list[dict[str, Any]], *, run_dummy: bool = False, **options: Any) -> Job:
    """Run the rows `work` on the simulated GPU with Triton's kernels.

    `run_dummy`: also run the dummy run first, as on a GPU, which takes as long as the job.
    """
    options = {"max_num_seqs": 8, "max_tokens_per_step": 32, "page_size": 4, **options}
    with fake_cuda(captures=options.pop("captures", False)) as gpu:
        engine = Engine(str(folder), attention="triton", dtype="float32", device="cuda", **options)
        snapshots: list[tuple[StepPlan | None, int, int, Counts]] = []
        plan_step = Scheduler.step

        def step(scheduler: Scheduler) -> StepPlan | None:
            plan = plan_step(scheduler)
            counts = gpu.device.counts
            snapshots.append((plan, len(gpu.syncs), len(gpu.copies), deepcopy(counts)))
            return plan

        with ExitStack() as stack:
            stack.enter_context(patch.object(Scheduler, "step", step))
            if not run_dummy:
                stack.enter_context(patch("batchgen.engine.engine.measure_largest_step", lambda *args: (0, args[4][1])))
            done = list(engine.generate(work, ordered=True))
        steps = []
        for (plan, syncs, copies, before), (_, next_syncs, next_copies, after) in pairwise(snapshots):
            if plan is not None:
                uploads = after.uploads - before.uploads, after.uploads_into - before.uploads_into
                downloads = Counter(after.downloads) - Counter(before.downloads)
                waits = gpu.syncs[syncs:next_syncs], gpu.copies[copies:next_copies]
                steps.append(Step(plan, *waits, *uploads, downloads))
        counts = gpu.device.counts
        first = len(snapshots[0][3].waits)
        late = [wait for wait in counts.waits[first:] if wait.lane == "tokens"]
        return Job(done, steps, gpu.syncs[snapshots[0][1] :], late, counts)


def steady_steps(job: Job) -> list[Step]:
    """Decode-only steps between two other decode-only steps with the same rows."""

    def rows(step: Step) -> list[int] | None:
        plan = step.plan
        return None if plan.prefills or plan.starts or plan.copies else [row.sequence for row in plan.decodes]

    found = []
    for before, step, after in zip(job.steps, job.steps[1:], job.steps[2:], strict=False):
        if rows(step) is not None and rows(before) == rows(step) == rows(after):
            found.append(step)
    return found


VOCAB = 64
NEW_TOKENS = 5

FREE: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "n": 2},
    {"temperature": 0, "return_logprob": True, "top_logprobs_num": 2},
    {"temperature": 1.0, "return_logprob": True, "token_ids_logprob": [4, 9]},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "frequency_penalty": 0.5, "presence_penalty": 0.3, "return_logprob": True},
    {"temperature": 0, "logit_bias": {"5": 3.0}},
    {"temperature": 1.0, "allowed_token_ids": [10, 20, 30], "bad_words": [[20]]},
    {"temperature": 0, "min_new_tokens": 5, "stop_token_ids": list(range(3, VOCAB, 2)), "ignore_eos": False},
    {"temperature": 0, "stop": ["1 1 1 1 1 1 1"]},
    {"temperature": 0, "return_hidden_states": {"layers": [0, -1], "tokens": "all"}},
    {"temperature": 0, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1},
]
"""Rows whose sampling does not need earlier tokens on the host."""
STATES: list[dict[str, Any]] = [
    {"temperature": 0, "return_hidden_states": {"layers": [1, 0, -1], "tokens": tokens, "pool": pool}}
    for tokens, pool in [("all", "none"), ("all", "mean"), ("prompt", "last"), ("last", "none")]
]
RETURNED = ("logprob_start_len", "top_logprobs_num", "token_ids_logprob")
PROMPTS: list[dict[str, Any]] = [
    {"temperature": 0, "return_logprob": True, **dict(zip(RETURNED, values, strict=True))}
    for values in [(0, 0, []), (2, 5, [4, 9]), (0, 3, [7])]
]
"""Rows that return prompt logprobs; some share a prefix, and one branches at its end."""
BOUND: list[dict[str, Any]] = [
    {"temperature": 0, "bad_words": [[8, 9], [7]]},
    {"temperature": 1.0, "bad_words": [[9, 10]], "return_logprob": True},
    {"temperature": 1.0, "bad_words": [[11, 12, 13]], "presence_penalty": 0.5},
]
"""Rows whose next token depends on earlier tokens on the host."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return save_with_words("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=1, vocab_size=VOCAB, **sizes)


def rows(kinds: list[dict[str, Any]], prefix: int = 2) -> list[dict[str, Any]]:
    common = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    prompts = [[*range(5, 5 + prefix), 20 + i] for i in range(len(kinds))]
    return [{"input_ids": p, "seed": i, **common, **k} for i, (p, k) in enumerate(zip(prompts, kinds, strict=True))]


def assert_late(job: Job, *, downloads: int) -> None:
    """Every step but the last is read after the next one was queued."""
    *waits, _ = job.waits
    assert all(wait.uploads for wait in waits), waits
    assert all(wait.downloads >= downloads for wait in waits)
    assert not any(wait.overtook for wait in waits)
    assert max(wait.downloads for wait in waits) <= 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_steady_step_is_two_uploads_and_one_download(model: Path, deterministic: bool) -> None:
    job = run_job(model, rows(FREE[:3]), run_dummy=not deterministic, deterministic=deterministic)
    assert job.syncs == []
    assert_late(job, downloads=1)
    steady = steady_steps(job)
    assert steady
    for step in steady:
        assert (step.uploads, step.uploads_into, step.downloads) == (2, 0, {"tokens": 1})
        assert step.copies == []


def test_a_warm_up_compiles_the_kernels_of_plain_rows(model: Path) -> None:
    with fake_cuda() as gpu:
        engine = Engine(str(model), attention="triton", dtype="float32", device="cuda", page_size=4, max_num_seqs=4)
        engine.warm_up()
        compiled = set(gpu.kernels)
        done = list(engine.generate(rows(FREE[:3], prefix=5)))
        assert all(c.error is None for c in done)
        assert gpu.kernels == compiled != set()


@pytest.mark.parametrize(("kinds", "downloads"), [(FREE, 1), (BOUND + FREE[:2], 0)], ids=["free", "bound"])
def test_no_kind_of_row_waits(model: Path, kinds: list[dict[str, Any]], downloads: int) -> None:
    """Also when rows start and end. Results equal those of plain PyTorch on a CPU."""
    work = rows(kinds, prefix=5)
    job = run_job(model, work)
    assert all(c.error is None for c in job.done)
    assert job.syncs == []
    assert_late(job, downloads=downloads)
    assert steady_steps(job)
    assert all(step.downloads["tokens"] == 1 for step in steady_steps(job))
    assert all(step.downloads["outputs"] <= 1 for step in steady_steps(job))  # hidden states
    engine = Engine(str(model), attention="torch", dtype="float32", page_size=4)
    assert_all_same(job.done, engine.generate(work, ordered=True))


def test_chunks_behind_a_graph_do_not_wait(model: Path) -> None:
    """Rows begin while others decode; the next step reads the tokens of both."""
    job = run_job(model, rows(FREE[:2] + FREE[3:4], prefix=5), captures=True, max_num_seqs=2)
    assert all(c.error is None for c in job.done)
    assert job.counts.replays > 0
    assert any(step.plan.prefills and len(step.plan.decodes) for step in job.steps)
    assert job.syncs == []
    assert all(wait.downloads and not wait.overtook for wait in job.waits[:-1]), "parts are read in order, and late"


@pytest.mark.parametrize("early", [False, True], ids=["wait", "early read"])
def test_a_planted_wait_is_found(model: Path, monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    draw = SamplingMetadata.sample

    def waiting(self: SamplingMetadata, *args: Any) -> SampledTokens:
        sampled = draw(self, *args)
        assert int(sampled.tokens.max()) < VOCAB if not early else sampled.read() is not None
        return sampled

    monkeypatch.setattr(SamplingMetadata, "sample", waiting)
    job = run_job(model, rows(FREE[:1]))
    if early:
        assert job.syncs == []
        assert {wait.uploads for wait in job.waits} == {0}
        with pytest.raises(AssertionError):
            assert_late(job, downloads=1)
    else:
        assert {len(step.syncs) for step in job.steps if step.plan.samples} == {1}
        assert "reads a number" in str(job.syncs[0])


def test_states_and_prompt_logprobs_do_not_wait(model: Path) -> None:
    """With chunked prompts, and together with scoring rows."""
    work = rows(STATES + PROMPTS, prefix=5)
    work += [{"input_ids": [*range(5, 10), 20], "completions": [[8, 9], [7]]}]
    job = run_job(model, work)
    assert all(c.error is None for c in job.done)
    assert job.syncs == []
    assert_late(job, downloads=1)
    assert all(step.copies == [] for step in job.steps)
    assert all(step.downloads["outputs"] <= 1 for step in steady_steps(job))
    assert job.counts.downloads["outputs"] > 0
    engine = Engine(str(model), attention="torch", dtype="float32", page_size=4)
    assert_all_same(job.done, engine.generate(work, ordered=True))


def test_constrained_rows_do_not_wait(tmp_path: Path) -> None:
    folder = save_grammar_model(tmp_path)
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"regex": "[a-f]{7,8}"}, {"regex": "[xyz]{7,8}", "n": 2}]
    job = run_job(folder, [{"text": f"Row {i}: ", "seed": i, "max_new_tokens": 7, **k} for i, k in enumerate(kinds)])
    assert all(c.error is None for c in job.done), job.done
    assert job.syncs == []
    assert steady_steps(job)
    assert_late(job, downloads=0)


def test_custom_processors_only_wait_for_downloads(model: Path) -> None:
    """Their results decide whether a row ends, so these rows are the only ones that wait."""

    def push(logits: Tensor, rows: object) -> Tensor:
        return logits + 1

    work = rows([{"temperature": 0}, {"temperature": 0, "custom_logit_processor": "push"}])
    job = run_job(model, work, logit_processor={"push": push})
    assert all(c.error is None for c in job.done), job.done
    assert job.syncs == []
    assert steady_steps(job)
    for step in steady_steps(job):
        assert step.downloads == {"tokens": 3}  # NaN rows, the processor's result, the tokens


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
def test_adapters_and_transformers_models_do_not_wait(tmp_path: Path, model_type: str) -> None:
    folder = save_with_words(model_type, tmp_path / "model", num_hidden_layers=1)
    native = model_type == "qwen3"
    adapters = {"all": str(save_adapter(folder, tmp_path / "all", seed=1, **KINDS["all"]))} if native else {}
    work = rows([{"temperature": 0}, {"temperature": 0, "lora_path": "all" if native else None}])
    job = run_job(folder, work, lora=adapters, model_impl="native" if native else "transformers")
    assert all(c.error is None for c in job.done), job.done
    assert job.syncs == []
    assert steady_steps(job)
    assert_late(job, downloads=1)


@pytest.mark.parametrize(
    "model_type", [pytest.param(t, marks=() if t in ("lfm2", "mamba") else pytest.mark.slow) for t in TYPES]
)
def test_recurrent_models_do_not_wait(tmp_path: Path, model_type: str) -> None:
    folder = save_with_words(model_type, tmp_path, **TYPES[model_type])
    job = run_job(folder, rows(FREE[:2]))
    assert all(c.error is None for c in job.done), job.done
    assert job.syncs == []
    assert steady_steps(job)
    assert all(step.uploads <= 2 for step in steady_steps(job))
    assert_late(job, downloads=1)
