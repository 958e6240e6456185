"""Both model paths against transformers' eager greedy generation, in different batches and pools."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from batchgen.bench.demo_tasks.tasks import draw
from batchgen.demo import model_path
from batchgen.engine.engine import Engine
from batchgen.request.completion import Completion
from batchgen.request.prompts import ChatPrompt
from batchgen.text.tokenizer import Tokenizer
from tests.engine.reference import Greedy, eager_greedy, save_word_tokenizer, shared_prefix_prompts
from tests.models.tiny import NATIVE_TYPES, TYPES, VOCAB, save_tiny

PROMPTS = 80
NEW_TOKENS = 8
ALONE_EVERY = 16
"""One of this many prompts also runs alone."""


def run(engine: Engine, prompts: list[list[int]], order: list[int] | None = None) -> dict[int, Completion]:
    """Generate prompts in the given order; returns prompt index -> completion."""
    order = list(range(len(prompts))) if order is None else order
    rows = [
        {
            "input_ids": prompts[i],
            "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            "return_logprob": True,
        }
        for i in order
    ]
    return {order[c.row_index]: c for c in engine.generate(rows)}


def assert_same(results: dict[int, Completion], expected: Greedy, members: list[int] | None = None) -> None:
    for i in members if members is not None else range(len(expected.ids)):
        expected.assert_same(i, results[i])


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(folder, prompts, reference) of one random model."""
    model_type, overrides = request.param
    folder = tmp_path_factory.mktemp(model_type)
    save_tiny(model_type, folder, **overrides)
    save_word_tokenizer(folder, VOCAB)
    prompts = shared_prefix_prompts(PROMPTS, VOCAB, seed=len(model_type))
    return folder, prompts, eager_greedy(folder, prompts, NEW_TOKENS)


NATIVE = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    ("mistral", {"sliding_window": 16}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
]
# Granite checkpoints divide logits by 4 to 16; the tiny default would double them, and the rounding errors too.
OVERRIDES = {"granite": {"logits_scaling": 4.0}}
OTHERS = [(name, OVERRIDES.get(name, {})) for name in TYPES if name not in NATIVE_TYPES]


def every_way(
    monkeypatch: pytest.MonkeyPatch, implementation: str, folder: Path, prompts: list, expected: Greedy, room: int = 6
) -> None:
    """Compare in one batch, shuffled, alone, and preempted in a pool for `room` of the longest prompts."""
    # Many prompts start in a step, so that they run out of pages together.
    engine = Engine(str(folder), model_impl=implementation, dtype="float32", page_size=4, max_tokens_per_step=2048)
    assert engine.model.spec.implementation == implementation
    assert_same(run(engine, prompts), expected)
    order = np.random.default_rng(1).permutation(len(prompts)).tolist()
    assert_same(run(engine, prompts, order), expected)
    for i in range(0, len(prompts), ALONE_EVERY):
        assert_same({i: run(engine, [prompts[i]])[0]}, expected, [i])
    longest = max(len(p) for p in prompts) + NEW_TOKENS
    with monkeypatch.context() as patch:
        patch.setattr("batchgen.engine.engine.pool_pages", lambda *_: room * longest // 4 + 4)
        patch.setattr(engine, "order", "tree")
        patch.setattr(engine, "admission", "free")
        assert_same(run(engine, prompts), expected)
    assert engine.last_run is not None
    assert engine.last_run.scheduler.stats.preemptions > 0


@pytest.mark.field("input_ids", "temperature", "return_logprob", "ignore_eos")
@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize("checkpoint", NATIVE, ids=lambda p: "-".join([p[0], *p[1]]), indirect=True)
def test_native_families_equal_eager(checkpoint, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every_way(monkeypatch, implementation, *checkpoint)


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
    every_way(monkeypatch, implementation, *demonstration, room=2)


@pytest.mark.parametrize("checkpoint", OTHERS, ids=lambda p: p[0], indirect=True)
def test_transformers_path_equals_eager(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    every_way(monkeypatch, "transformers", *checkpoint)
