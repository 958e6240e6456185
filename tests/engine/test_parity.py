"""Both model paths against transformers' eager greedy generation, in different batches and pools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchgen.demo import model_path
from batchgen.demo.tasks import draw
from batchgen.engine.engine import Engine
from batchgen.request.fields.prompts import ChatPrompt
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.engine.reference import Greedy, eager_greedy, save_with_words, shared_prefix_prompts
from tests.models.tiny import VOCAB

PROMPTS = 24
NEW_TOKENS = 8
ALONE_EVERY = 12
"""One of this many prompts also runs alone."""


MODELS = [
    ("llama", "native", {"tie_word_embeddings": True, "attention_bias": True}),
    ("mistral", "native", {"sliding_window": 16}),
    ("qwen3", "native", {"head_dim": 32}),
    ("llama", "transformers", {}),
    ("gemma2", "transformers", {}),
    ("gpt_oss", "transformers", {}),
    ("deepseek_v3", "transformers", {}),
    ("gpt2", "transformers", {}),
]
"""Windows, soft caps, sinks, experts, keys and values of different sizes, and learned positions."""


def every_way(
    monkeypatch: pytest.MonkeyPatch, implementation: str, folder: Path, prompts: list, expected: Greedy, room: int = 6
) -> None:
    """Compare in one batch, alone, and preempted in a pool for `room` of the longest prompts."""
    # Many prompts start in a step, so that they run out of pages together.
    engine = Engine(str(folder), model_impl=implementation, dtype="float32", page_size=4, max_tokens_per_step=2048)
    assert engine.model.spec.implementation == implementation
    everything = list(range(len(prompts)))
    expected.check(engine, prompts, everything)
    for i in range(0, len(prompts), ALONE_EVERY):
        expected.check(engine, prompts, [i])
    longest = max(len(p) for p in prompts) + NEW_TOKENS
    with monkeypatch.context() as patch:
        patch.setattr("batchgen.engine.engine.pool_pages", lambda *_: room * longest // 4 + 4)
        patch.setattr(engine, "order", "tree")
        patch.setattr(engine, "admission", "free")
        expected.check(engine, prompts, everything)
    assert engine.last_run.scheduler.stats.preemptions > 0


@pytest.mark.field("input_ids", "temperature", "return_logprob", "ignore_eos")
@pytest.mark.parametrize(("model_type", "implementation", "overrides"), MODELS)
def test_a_model_equals_eager(
    model_type: str, implementation: str, overrides: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_with_words(model_type, tmp_path, **overrides)
    prompts = shared_prefix_prompts(PROMPTS, VOCAB, seed=len(model_type))
    every_way(monkeypatch, implementation, tmp_path, prompts, eager_greedy(tmp_path, prompts, NEW_TOKENS))


@pytest.fixture(scope="module")
def demonstration():
    """(folder, prompts, reference) of the demonstration model on its own held-out prompts."""
    folder = model_path()
    tokenizer = Tokenizer.load(folder)
    examples = [draw("heldout", 11, i) for i in range(PROMPTS)]
    prompts = [
        tokenizer.encode_chat(ChatPrompt(tuple(e.messages()))) if e.chat else tokenizer.encode([e.content.raw])[0]
        for e in examples
    ]
    return folder, prompts, eager_greedy(folder, prompts, NEW_TOKENS)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_the_demonstration_model_equals_eager(
    demonstration, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_way(monkeypatch, implementation, *demonstration, room=1)
