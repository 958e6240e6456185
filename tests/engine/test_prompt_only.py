"""Requests with `max_new_tokens: 0`: their prompt only runs if something of it is returned."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.engine.engine import Engine
from batchgen.request.fields.params import SamplingParams
from tests.engine.jobs import finish
from tests.engine.reference import save_with_words


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_words("llama", tmp_path_factory.mktemp("llama"))


def nothing(**asked: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=0, **asked)  # type: ignore[arg-type]


SOME = [nothing(return_logprob=True, logprob_start_len=0)]
SOME += [nothing(return_hidden_states=states) for states in (True, {"pool": "mean"})]


@pytest.mark.field("max_new_tokens")
@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_a_prompt_with_returned_values_runs_without_output(folder: Path, max_num_seqs: int) -> None:
    engine = Engine(str(folder), dtype="float32", max_num_seqs=max_num_seqs, max_tokens_per_step=8, page_size=4)
    prompts = [[3, 4, 5, 6, 7, 8, 9, 10, 11 + i] for i in range(len(SOME))]
    done = finish(engine, list(zip(prompts, SOME, strict=True)))
    for completion, ids in zip(done, prompts, strict=True):
        assert completion.error is None
        assert (completion.finish_reason, completion.text, completion.completion_tokens) == ("length", "", 0)
        assert list(completion.output_ids or []) == []
        assert list(completion.prompt_ids) == ids
        assert completion.effective_max_new_tokens == 0
        assert completion.output_logprobs is None or len(completion.output_logprobs) == 0
    assert engine.last_run.scheduler.stats.prompt_tokens == 8 + len(SOME)
    assert engine.last_run.loop.state.output_tokens == 0
    assert engine.last_run.scheduler.stats.sampled_tokens == 0


def test_a_prompt_without_returned_values_does_not_run(folder: Path) -> None:
    engine = Engine(str(folder), dtype="float32")
    (first, second) = finish(engine, [([3, 4], nothing(return_logprob=True)), ([3, 4, 5], nothing(temperature=0.0))])
    assert (first.completion_tokens, second.completion_tokens) == (0, 0)
    assert engine.last_run.scheduler.stats.steps == 0


def test_prompt_only_rows_among_rows_that_generate(folder: Path) -> None:
    """Several samples and identical prompts, too."""
    engine = Engine(str(folder), dtype="float32", page_size=4)
    wanted = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)
    alone = finish(engine, [([3, 4, 5], wanted)])[0]
    twice = nothing(return_logprob=True, logprob_start_len=0, n=2)
    greedy = nothing(return_logprob=True, logprob_start_len=0, temperature=0.0)
    rows = [([3, 4, 5], params) for params in (twice, greedy, greedy, wanted)]
    done = finish(engine, [*rows, ([3, 4, 5, 6], SOME[1])])
    assert [c.sample_index for c in done] == [0, 1, 0, 0, 0, 0]
    assert [c.dedup_of for c in done] == [None, None, None, 1, None, None]
    assert [c.completion_tokens for c in done] == [0, 0, 0, 0, 3, 0]
    assert done[4].output_ids == alone.output_ids
    assert engine.last_run.loop.state.output_tokens == 3
    stats = engine.last_run.scheduler.stats
    assert (stats.sampled_tokens, stats.prompt_tokens) == (3, 4)
