"""Hidden states, routed experts and prompt logprobs that are read one step late, against those of a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.engine.d2h_queue import D2HQueue
from batchgen.engine.engine import Engine
from batchgen.engine.model_runner import ModelRunner
from batchgen.engine.sampling.sampler import SamplingMetadata
from batchgen.request.completion import Completion
from tests.engine.fake_device import LateDevice
from tests.engine.reference import save_word_tokenizer, shared_prefix_prompts
from tests.models.tiny import VOCAB, save_tiny

torch.set_num_threads(1)

LAYERS = 2
SPANS = ("prompt", "output", "all", "last")
POOLS = ("none", "last", "mean")
REQUESTED = [
    {"layers": layers, "tokens": tokens, "pool": pool}
    for tokens, pool, layers in product(SPANS, POOLS, ([-1], [2, 0, -1]))
]
SMALL_QUEUE, SMALL_CHUNK = 8192, 1024

pytestmark = pytest.mark.field("return_hidden_states", "return_routed_experts", "logprob_start_len")


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, path, num_hidden_layers=LAYERS)
    save_word_tokenizer(path, VOCAB)
    return path


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
            params |= {
                "return_logprob": True,
                "logprob_start_len": rng.randint(0, len(prompt)),
                "top_logprobs_num": rng.choice([0, 2, 5]),
                "token_ids_logprob": rng.choice([[], [4, 9], [3]]),
            }
        if params["max_new_tokens"] and rng.random() < 0.2:
            params["n"] = 3
        rows.append({"input_ids": prompt, "sampling_params": params})
    return rows


def engine_of(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), dtype="float32", page_size=4, **options)


def results(engine: Engine, rows: list[dict[str, Any]]) -> list[Completion]:
    return sorted(engine.generate(rows), key=lambda done: done.key)


def numbers(values: Any) -> np.ndarray:
    """The values as an array, with NaN for masked entries."""
    return np.ma.filled(np.ma.asarray(values, np.float64), np.nan)


def assert_same(got: list[Completion], wanted: list[Completion]) -> None:
    assert [done.key for done in got] == [done.key for done in wanted]
    for a, b in zip(got, wanted, strict=True):
        assert (a.error, a.finish_reason) == (b.error, b.finish_reason)
        assert list(a.output_ids or ()) == list(b.output_ids or ())
        for name in (
            *("output_logprobs", "input_logprobs", "input_top_ids", "input_top_logprobs", "input_ids_logprobs"),
            *("routed_experts", "score_logprobs"),
        ):
            one, other = getattr(a, name), getattr(b, name)
            assert (one is None) == (other is None), name
            if one is not None:
                np.testing.assert_allclose(numbers(one), numbers(other), atol=2e-5, err_msg=name)
        assert len(a.states or ()) == len(b.states or ())
        for one, other in zip(a.states or (), b.states or (), strict=True):
            assert (one.layer, one.span, one.token_start, one.dtype) == (
                *(other.layer, other.span, other.token_start, other.dtype),
            )
            np.testing.assert_allclose(one.values, other.values, atol=2e-5)


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a queue that holds a few rows, and pieces of about one row."""
    monkeypatch.setattr("batchgen.engine.loop.D2HQueue", partial(D2HQueue, budget=SMALL_QUEUE))
    monkeypatch.setattr("batchgen.engine.capture.hidden_states.CHUNK_BYTES", SMALL_CHUNK)


def queue_of(engine: Engine) -> D2HQueue:
    assert engine.last_run is not None
    return engine.last_run.loop.outputs


@pytest.mark.parametrize("shape", [{}, {"max_num_seqs": 6, "max_tokens_per_step": 11}], ids=["wide", "narrow"])
@pytest.mark.parametrize("small", [False, True], ids=["roomy", "small"])
def test_late_reads_in_bounded_memory(
    folder: Path, shape: dict[str, int], small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = mixed_rows(32, 7, folder.name.startswith("mixtral"))
    wanted = results(engine_of(folder, **shape), rows)
    assert {done.error is None for done in wanted} == {True}
    if small:
        make_small(monkeypatch)
    engine = engine_of(folder, **shape)
    engine.device = device = LateDevice(poison_uploads=True)
    assert_same(results(engine, rows), wanted)
    assert engine.last_run is not None
    loop, d2h_queue = engine.last_run.loop, queue_of(engine)
    assert loop.state.discarded > 0, "samples ended while they were in the next step"
    assert loop.prompts.buffers.nbytes == 0
    assert loop.states is not None
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


@pytest.mark.parametrize("seed", range(2))
def test_in_a_pool_for_two_rows(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and outputs are recomputed after evictions and preemptions."""
    rows = mixed_rows(10, seed, folder.name.startswith("mixtral"))
    monkeypatch.setattr("batchgen.engine.engine.pool_pages", lambda *_: 2 * (28 + 12) // 4 + 4)
    wanted = results(engine_of(folder, max_tokens_per_step=12, max_num_seqs=8), rows)
    make_small(monkeypatch)
    engine = engine_of(folder, max_tokens_per_step=12, max_num_seqs=8)
    engine.device = LateDevice(poison_uploads=True)
    assert_same(results(engine, rows), wanted)
    assert queue_of(engine).peak_bytes <= SMALL_QUEUE


def failing(call: Callable[..., Any], number: int) -> Callable[..., Any]:
    """`call`, but its `number`-th call raises an out-of-memory error."""
    count = 0

    def run(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            raise torch.OutOfMemoryError("out of memory")
        return call(*args)

    return run


@pytest.mark.parametrize(("part", "number"), [("hidden", 1), ("logits", 2), ("logits", 4), ("sample", 1)])
def test_a_failed_step_is_cancelled_and_issued_again(
    folder: Path, part: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is added twice or left out."""
    rows = mixed_rows(16, 3, folder.name.startswith("mixtral"))
    asked = {"layers": [0, 1, 2, -1], "tokens": "all", "pool": "mean"}
    rows += [
        {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 2, "return_hidden_states": asked}}
        for ids in shared_prefix_prompts(6, VOCAB, seed=4, longest=28)
    ]
    shape = {"max_num_seqs": 8, "max_tokens_per_step": 24}
    monkeypatch.setattr("batchgen.engine.capture.prompt_logprobs.LOGITS_BYTES", 3 * 4 * VOCAB)
    plain = engine_of(folder, **shape)
    wanted = results(plain, rows)
    make_small(monkeypatch)
    monkeypatch.setattr("batchgen.engine.loop.D2HQueue", partial(D2HQueue, budget=SMALL_CHUNK))
    engine = engine_of(folder, **shape)
    engine.device = LateDevice()
    owner: Any = SamplingMetadata if part == "sample" else engine.model
    whole = getattr(owner, part)
    issue, failed = ModelRunner._issue, 0

    def stubborn(*args: Any) -> Any:
        nonlocal failed
        monkeypatch.setattr(owner, part, failing(whole, number))
        try:
            return issue(*args)
        except torch.OutOfMemoryError:
            failed += 1
            monkeypatch.setattr(owner, part, whole)
            return issue(*args)

    monkeypatch.setattr(ModelRunner, "_issue", stubborn)
    assert_same(results(engine, rows), wanted)
    assert failed > 1
    for run in (plain.last_run, engine.last_run):
        assert run is not None
        assert run.loop.prompts.buffers.nbytes == 0
    assert engine.last_run is not None
    assert plain.last_run is not None
    assert engine.last_run.loop.prompts.buffers.positions == plain.last_run.loop.prompts.buffers.positions
