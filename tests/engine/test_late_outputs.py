"""Hidden states, routed experts and prompt logprobs that are read one step late, against those of a CPU."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from batchgen.engine.engine import Engine
from batchgen.request.completion import Completion
from tests.engine.fake_device import LateDevice
from tests.engine.reference import assert_all_same, save_with_words, shared_prefix_prompts
from tests.models.tiny import VOCAB

torch.set_num_threads(1)

LAYERS = 2
SPANS = ("prompt", "output", "all", "last")
POOLS = ("none", "last", "mean")
REQUESTED = [
    {"layers": layers, "tokens": tokens, "pool": pool}
    for tokens, pool, layers in product(SPANS, POOLS, ([-1], [2, 0, -1]))
]
SMALL_QUEUE = 8192
"""Bytes of a queue that holds a few rows."""

pytestmark = pytest.mark.field("return_hidden_states", "return_routed_experts", "logprob_start_len")


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_words(request.param, tmp_path_factory.mktemp(request.param), num_hidden_layers=LAYERS)


def mixed_rows(count: int, seed: int, experts: bool) -> list[dict[str, Any]]:
    """Rows with hidden states, experts, prompt logprobs and scored texts, greedy and sampled; some end early."""
    rng = Random(seed)
    rows: list[dict[str, Any]] = []
    for i, prompt in enumerate(shared_prefix_prompts(count, VOCAB, seed=seed, longest=28)):
        params: dict[str, Any] = {"max_new_tokens": rng.choice([0, 1, 3, 9]), "ignore_eos": True, "seed": i}
        if rng.random() < 0.15:
            rows.append({"input_ids": prompt, "completions": [[5, 6], [7]]})
            continue
        params |= {"temperature": rng.choice([0, 0.0, 1.0])}
        if rng.random() < 0.3:
            params["stop_token_ids"] = rng.sample(range(3, VOCAB), VOCAB // 6)
        if rng.random() < 0.6:
            asked = rng.choice(REQUESTED)
            if params["max_new_tokens"] or asked["tokens"] != "output":
                params["return_hidden_states"] = asked
        if experts and rng.random() < 0.6:
            params["return_routed_experts"] = True
        if rng.random() < 0.4:
            params |= {"return_logprob": True, "logprob_start_len": rng.randint(0, len(prompt))}
            params |= {"top_logprobs_num": rng.choice([0, 2, 5]), "token_ids_logprob": rng.choice([[], [4, 9], [3]])}
        if params["max_new_tokens"] and rng.random() < 0.2:
            params["n"] = 3
        rows.append({"input_ids": prompt, "sampling_params": params})
    return rows


def engine_of(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), dtype="float32", page_size=4, **options)


def results(engine: Engine, rows: list[dict[str, Any]]) -> list[Completion]:
    return sorted(engine.generate(rows), key=lambda done: done.key)


@pytest.mark.parametrize(
    ("shape", "small"), [({}, False), ({}, True), ({"max_num_seqs": 6, "max_tokens_per_step": 11}, False)], ids=str
)
def test_late_reads_in_bounded_memory(folder: Path, shape: dict[str, int], small: bool) -> None:
    rows = mixed_rows(32, 7, folder.name.startswith("mixtral"))
    wanted = results(engine_of(folder, **shape), rows)
    assert {done.error is None for done in wanted} == {True}
    engine = engine_of(folder, **shape)
    if small:
        engine.queue_bytes = SMALL_QUEUE
    engine.device = device = LateDevice(poison_uploads=True)
    assert_all_same(results(engine, rows), wanted)
    loop = engine.last_run.loop
    d2h_queue = loop.outputs
    assert loop.state.discarded > 0, "samples ended while they were in the next step"
    assert loop.prompts.buffers.nbytes == 0
    assert loop.states.nbytes == 0
    assert loop.states.num_samples == 0
    assert device.unread == {"tokens": 0, "outputs": 0}
    waits = device.counts.waits_of("outputs")
    assert not any(wait.overtook for wait in waits)
    if small:
        assert d2h_queue.forced_syncs > 0
        assert 0 < d2h_queue.peak_bytes <= SMALL_QUEUE
    else:
        assert d2h_queue.forced_syncs == 0
        at_once = sum(wait.uploads == 0 for wait in waits)
        assert at_once <= len(waits) // 10, "what a step sends is read after the next has been issued"


def test_in_a_pool_for_two_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and outputs are recomputed after evictions and preemptions."""
    rows = mixed_rows(10, 1, folder.name.startswith("mixtral"))
    monkeypatch.setattr("batchgen.engine.engine.pool_pages", lambda *_: 2 * (28 + 12) // 4 + 4)
    wanted = results(engine_of(folder, max_tokens_per_step=12, max_num_seqs=8), rows)
    engine = engine_of(folder, max_tokens_per_step=12, max_num_seqs=8)
    engine.queue_bytes = SMALL_QUEUE
    engine.device = LateDevice(poison_uploads=True)
    assert_all_same(results(engine, rows), wanted)
    assert engine.last_run.loop.outputs.peak_bytes <= SMALL_QUEUE
