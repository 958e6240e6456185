"""The last layer only computes tokens whose logits are needed, unless prompts are scored."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from batchgen.engine.engine import Engine
from batchgen.models.base import ModelInput
from tests.engine.reference import save_with_words, shared_prefix_prompts
from tests.kernels.cpu.products import with_threads
from tests.models.tiny import VOCAB


@pytest.mark.parametrize(
    ("implementation", "threads", "scored"),
    [("native", 1, True), ("native", 2, False), ("transformers", 1, False), ("transformers", 2, True)],
)
def test_only_needed_tokens_pass_the_last_layer(
    scored: bool, implementation: str, threads: int, tmp_path: Path
) -> None:
    """With two threads and compiled kernels, steps that only return tokens run on the background thread."""
    with with_threads(threads):
        check(scored, implementation, tmp_path)


def check(scored: bool, implementation: str, tmp_path: Path) -> None:
    folder = save_with_words("llama", tmp_path)
    engine = Engine(str(folder), dtype="float32", model_impl=implementation, max_tokens_per_step=40)
    compute, counts = engine.model.hidden, [0, 0]

    def counted(inputs: ModelInput) -> Tensor:
        hidden = compute(inputs)
        assert len(hidden) == len(inputs.input_ids if inputs.wanted is None else inputs.wanted)
        counts[0] += len(inputs.input_ids)
        counts[1] += len(hidden)
        return hidden

    rows = [
        {"input_ids": ids, "max_new_tokens": 3, "ignore_eos": True, "temperature": 0, "n": 1 + i % 2}
        for i, ids in enumerate(shared_prefix_prompts(30, VOCAB, seed=1))
    ]
    plain = {(c.row_index, c.sample_index): list(c.output_ids or ()) for c in engine.generate(rows)}
    engine.model.hidden = counted  # type: ignore[method-assign]
    if scored:
        rows[3] |= {"return_logprob": True, "logprob_start_len": 0}
    selected = {(c.row_index, c.sample_index): list(c.output_ids or ()) for c in engine.generate(rows)}
    assert selected == plain
    stats = engine.last_run.scheduler.stats
    again = stats.recomputed_tokens + stats.recomputed_last_tokens
    assert counts[0] == stats.prompt_tokens + again + stats.decode_tokens
    # Samples of one prompt share the logits of their first token.
    sampled = stats.sampled_tokens - sum(row["n"] == 2 for row in rows)
    assert counts[1] == counts[0] if scored else counts[1] <= sampled < counts[0]
