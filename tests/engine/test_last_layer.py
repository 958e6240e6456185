"""Of the last layer a step computes what is drawn from, and no more, unless prompts are scored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from batchgen.engine.engine import Engine
from batchgen.models.base import ModelInput
from tests.engine.reference import save_word_tokenizer, shared_prefix_prompts
from tests.kernels.cpu.products import with_threads
from tests.models.tiny import VOCAB, save_tiny


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of two, where kernels are compiled, steps that ask for tokens alone are computed beside Python."""
    with with_threads(request.param):
        yield


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize("scored", [False, True])
def test_tokens_that_are_drawn_from_are_wanted(scored: bool, implementation: str, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    save_word_tokenizer(folder, VOCAB)
    engine = Engine(str(folder), dtype="float32", model_impl=implementation, max_tokens_per_step=40)
    compute, seen = engine.model.hidden, [0, 0]

    def counted(inputs: ModelInput) -> Tensor:
        hidden = compute(inputs)
        assert len(hidden) == len(inputs.input_ids if inputs.wanted is None else inputs.wanted)
        seen[0] += len(inputs.input_ids)
        seen[1] += len(hidden)
        return hidden

    rows = [
        {"input_ids": ids, "max_new_tokens": 3, "ignore_eos": True, "temperature": 0, "n": 1 + i % 2}
        for i, ids in enumerate(shared_prefix_prompts(30, VOCAB, seed=1))
    ]
    plain = {(c.row_index, c.sample_index): list(c.output_ids or ()) for c in engine.generate(rows)}
    engine.model.hidden = counted  # type: ignore[method-assign]
    if scored:
        rows[3] |= {"return_logprob": True, "logprob_start_len": 0}
    found = {(c.row_index, c.sample_index): list(c.output_ids or ()) for c in engine.generate(rows)}
    assert found == plain
    assert engine.last_run is not None
    stats = engine.last_run.scheduler.stats
    assert seen[0] == stats.prompt_tokens + stats.recomputed_tokens + stats.relogit_tokens + stats.decode_tokens
    # Samples of one prompt draw their first token from the same states.
    drawn = stats.sampled_tokens - sum(row["n"] == 2 for row in rows)
    assert seen[1] == seen[0] if scored else seen[1] <= drawn < seen[0]


def test_a_model_may_be_asked_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is picked of all states is what is computed of the wanted ones alone, token by token."""
    folder = save_tiny("qwen3", tmp_path)
    save_word_tokenizer(folder, VOCAB)
    rows = [{"input_ids": ids, "max_new_tokens": 4, "seed": 5} for ids in shared_prefix_prompts(12, VOCAB, seed=3)]
    engine = Engine(str(folder), dtype="float32")
    found = [list(c.output_ids or ()) for c in engine.generate(rows, ordered=True)]
    compute = engine.model.hidden
    monkeypatch.setattr(engine.model, "recordable", lambda: False)  # what picks is no kernel that could be
    engine.model.hidden = lambda inputs: inputs.pick(compute(replace(inputs, wanted=None)))  # type: ignore[method-assign]
    assert [list(c.output_ids or ()) for c in engine.generate(rows, ordered=True)] == found
