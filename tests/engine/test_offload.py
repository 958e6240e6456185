"""Models larger than the device: jobs with streamed weights against the same jobs with all weights on the device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchgen.engine.engine import Engine
from batchgen.engine.machine import STREAMED_ROWS
from batchgen.engine.memory.offload import STEP_SHARE
from batchgen.errors import BatchgenError, UsageError
from batchgen.kernels.stream import in_lines, plan_stream
from batchgen.models.base import ModelSpec
from tests.engine.fake_cuda import fake_cuda
from tests.engine.fake_device import LateDevice
from tests.engine.reference import assert_all_same, save_with_words, shared_prefix_prompts
from tests.engine.test_syncs import run_job
from tests.models.adapters import save_adapter
from tests.models.tiny import VOCAB

KV = 1 << 26
ROWS: list[dict[str, Any]] = [
    {"input_ids": ids, "max_new_tokens": 6, "ignore_eos": True, "return_logprob": True, "temperature": 0.0}
    for ids in shared_prefix_prompts(12, VOCAB, seed=3)
]


def device_for(spec: ModelSpec, blocks: float) -> int:
    """Bytes of a device with room for all but the blocks' weights, some blocks, keys and values, and steps."""
    others = spec.parameters * spec.dtype.itemsize - sum(spec.block_bytes)
    return int((others + blocks * max(spec.block_bytes) + KV) / (1 - STEP_SHARE)) + 16


def run(folder: Path, **options: Any) -> tuple[Engine, list[Any]]:
    engine = Engine(str(folder), **{"dtype": "float32", "attention": "torch", "device": "cpu", **options})
    return engine, list(engine.generate(ROWS, ordered=True, progress=False))


def counts(engine: Engine) -> dict[str, int]:
    assert engine.last_run is not None
    return engine.last_run.loop.counts()


LAYERS = "num_hidden_layers"


@pytest.mark.parametrize(
    ("model_type", "implementation", "config", "room"),
    [
        ("llama", "native", {LAYERS: 6}, 2),
        ("llama", "native", {LAYERS: 7, "attention_bias": True, "mlp_bias": True}, 4),
        ("qwen3", "native", {LAYERS: 5, "head_dim": 32}, 3),
        ("llama", "native", {LAYERS: 3}, 2),
        ("llama", "native", {LAYERS: 3}, 1),
        ("llama", "native", {LAYERS: 2}, 1),
        ("llama", "transformers", {LAYERS: 5}, 2),
        ("llama", "transformers", {LAYERS: 6, "tie_word_embeddings": True}, 4),
        ("llama", "transformers", {LAYERS: 2}, 1),
        ("mixtral", "transformers", {LAYERS: 4}, 2),
        ("gpt_oss", "transformers", {}, 1),
        ("gemma2", "transformers", {}, 2),
        ("deepseek_v3", "transformers", {}, 2),
        ("qwen3_next", "transformers", {}, 2),
        ("gpt2", "transformers", {}, 1),
    ],
)  # fmt: skip
def test_results_are_those_of_the_whole_model_and_a_pass_copies_what_is_planned(
    model_type: str, implementation: str, config: dict[str, Any], room: int, tmp_path: Path
) -> None:
    save_with_words(model_type, tmp_path, **config)
    whole, expected = run(tmp_path, model_impl=implementation)
    limit = device_for(whole.model.spec, room)
    engine, got = run(tmp_path, model_impl=implementation, offload="auto", device_memory=limit, kv_memory=KV)
    assert_all_same(got, expected)
    plan = engine.model.spec.stream
    assert plan is not None
    assert plan.streamed
    assert plan.blocks == whole.model.spec.block_bytes, "what was counted before weights were read"
    done = counts(engine)
    assert done["offload_passes"] > 0
    assert done["offload_weight_bytes"] == done["offload_planned_bytes"] == done["offload_passes"] * plan.pass_bytes
    again = list(engine.generate(ROWS, ordered=True, progress=False))
    assert_all_same(again, expected)
    assert counts(engine) == {**counts(engine), **{key: done[key] for key in done if key.startswith("offload_")}}


@pytest.mark.parametrize(("share", "streamed"), [(0.5, True), (0.75, True), (0.85, True), (1.3, False)])
def test_the_device_is_divided_without_a_size_of_the_cache(share: float, streamed: bool, tmp_path: Path) -> None:
    """`share`: of the device, relative to the weights."""
    save_with_words("llama", tmp_path, num_hidden_layers=12, hidden_size=128, intermediate_size=256)
    whole, expected = run(tmp_path)
    limit = int(whole.model.spec.parameters * 4 * share)
    engine, got = run(tmp_path, offload="auto", device_memory=limit)
    assert_all_same(got, expected)
    plan = engine.model.spec.stream
    assert plan is not None
    assert bool(plan.streamed) == streamed
    assert plan.device_bytes <= limit * (0.5 if streamed else 0.8)
    assert engine.last_run is not None
    assert plan.device_bytes + engine.last_run.pool.nbytes <= limit


def test_which_blocks_are_streamed_changes_no_bit(tmp_path: Path) -> None:
    save_with_words("llama", tmp_path, num_hidden_layers=6)
    spec = Engine(str(tmp_path), dtype="float32", device="cpu").model.spec
    results = []
    for room in (2, 4, 5, 8):
        options = {"offload": "auto", "device_memory": device_for(spec, room), "kv_memory": KV, "attention": "auto"}
        results.append([each.output_logprobs.tolist() for each in run(tmp_path, **options)[1]])
    assert results[1:] == results[:1] * 3


def test_parameters_in_float32_change_no_choice(tmp_path: Path) -> None:
    """A router of this model is in float32 whatever the dtype, which is known when it is read."""
    save_with_words("deepseek_v3", tmp_path, num_hidden_layers=6)
    spec = Engine(str(tmp_path), dtype="bfloat16", device="cpu").model.spec
    for room in (2, 3, 5):
        options = {"offload": "auto", "device_memory": device_for(spec, room), "kv_memory": KV, "dtype": "bfloat16"}
        engine, _ = run(tmp_path, **options)
        plan, counted = engine.model.spec.stream, plan_stream(spec.block_bytes, 0, room * max(spec.block_bytes))
        assert plan is not None
        assert plan.blocks > spec.block_bytes
        assert (plan.streamed, plan.slots) == (counted.streamed, counted.slots)
        done = counts(engine)
        assert done["offload_weight_bytes"] == done["offload_passes"] * plan.pass_bytes > 0


def test_nothing_is_streamed_without_need(tmp_path: Path) -> None:
    save_with_words("llama", tmp_path)
    engine, _ = run(tmp_path, offload="weights", device_memory="1GiB")
    assert engine.model.stream is None
    assert not any(key.startswith("offload_") for key in counts(engine))


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_blocks_are_read_only_while_they_are_in_place(implementation: str, tmp_path: Path) -> None:
    """On a device that has poison in a slot until its copy is waited for."""
    save_with_words("llama", tmp_path, num_hidden_layers=5)
    whole, expected = run(tmp_path, model_impl=implementation)
    options = {"model_impl": implementation, "device_memory": device_for(whole.model.spec, 3), "kv_memory": KV}
    engine = Engine(str(tmp_path), dtype="float32", attention="torch", device="cpu", offload="auto", **options)
    assert engine.model.stream is not None
    engine.model.stream.device = LateDevice()
    assert_all_same(engine.generate(ROWS, ordered=True, progress=False), expected)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_the_host_does_not_wait_for_copies_to_a_gpu(implementation: str, tmp_path: Path) -> None:
    save_with_words("llama", tmp_path, num_hidden_layers=4)
    work = ROWS[:4]
    whole = run_job(tmp_path, work, model_impl=implementation)
    spec = run(tmp_path, model_impl=implementation)[0].model.spec
    options = {"offload": "auto", "device_memory": device_for(spec, 2), "kv_memory": KV}
    job = run_job(tmp_path, work, model_impl=implementation, captures=True, **options)
    assert_all_same(job.done, whole.done)
    passes = sum(bool(step.plan.tokens) for step in job.steps)
    assert job.counts.copied_ahead >= 3 * max(spec.block_bytes) * passes, "one of four blocks stays there"
    assert not [sync for step in job.steps for sync in step.syncs if "stream.py" in sync.place]
    assert not job.counts.replays, "no graph has the copies"


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_adapters_stay_on_the_device(implementation: str, tmp_path: Path) -> None:
    save_with_words("llama", tmp_path / "base", num_hidden_layers=4)
    adapter = save_adapter(tmp_path / "base", tmp_path / "adapter")
    rows = [{**row, "lora_path": "a"} if i % 2 else row for i, row in enumerate(ROWS)]
    options: dict[str, Any] = {"lora": {"a": str(adapter)}, "model_impl": implementation, "attention": "torch"}
    whole = Engine(str(tmp_path / "base"), dtype="float32", device="cpu", **options)
    limit = device_for(whole.model.spec, 2)
    options |= {"offload": "auto", "device_memory": limit, "kv_memory": KV}
    engine = Engine(str(tmp_path / "base"), dtype="float32", device="cpu", **options)
    assert engine.model.stream is not None
    expected = whole.generate(rows, ordered=True, progress=False)
    assert_all_same(engine.generate(rows, ordered=True, progress=False), expected)


def test_a_deterministic_run_streams_each_of_its_passes(tmp_path: Path) -> None:
    save_with_words("llama", tmp_path, num_hidden_layers=4)
    whole, expected = run(tmp_path, deterministic=True)
    limit = device_for(whole.model.spec, 2)
    engine, got = run(tmp_path, deterministic=True, offload="auto", device_memory=limit, kv_memory=KV)
    assert [list(each.output_ids) for each in got] == [list(each.output_ids) for each in expected]
    done = counts(engine)
    assert done["offload_weight_bytes"] == done["offload_planned_bytes"] > 0


def test_steps_grow_to_what_the_memory_holds(tmp_path: Path) -> None:
    """More rows at once than without streamed weights, and fewer where a step would take too much of the device."""
    save_with_words("llama", tmp_path, num_hidden_layers=4)
    whole, _ = run(tmp_path)
    rows = [{"input_ids": [3 + i % 50, 4 + i // 50, 5], "max_new_tokens": 2, "ignore_eos": True} for i in range(1200)]
    peaks = {}
    for size, kv in (("large", 1 << 28), ("small", 1 << 22)):
        weights = device_for(whole.model.spec, 2) * (1 - STEP_SHARE) - KV
        limit = int((weights + kv) / (1 - STEP_SHARE)) + 16
        options = {"offload": "auto", "device_memory": limit, "kv_memory": kv}
        engine = Engine(str(tmp_path), dtype="float32", attention="torch", device="cpu", **options)
        assert engine.model.stream is not None
        done = list(engine.generate(rows, progress=False))
        assert all(completion.error is None for completion in done)
        assert engine.last_run is not None
        peaks[size] = engine.last_run.scheduler.stats.max_decode_rows
    assert 256 < peaks["large"] <= STREAMED_ROWS
    assert peaks["small"] < peaks["large"]


REFUSALS = [
    ({"offload": "auto"}, "device_memory=SIZE"),
    ({"device_memory": 1 << 20}, "add `offload=auto`"),
    ({"offload": "auto", "device_memory": "100KiB"}, "take a device with more memory"),
    ({"offload": "auto", "device_memory": "1GiB", "quantization": "int8"}, "leave the option out"),
]


@pytest.mark.parametrize(("options", "message"), REFUSALS)
def test_what_cannot_be_streamed_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_with_words("llama", tmp_path)
    with pytest.raises((BatchgenError, ValueError), match=message):
        run(tmp_path, **options)


def test_a_model_that_does_not_fit_a_gpu_is_refused_with_the_remedy(tmp_path: Path) -> None:
    save_with_words("llama", tmp_path)
    with pytest.raises(UsageError, match="add `offload=auto`"), fake_cuda():
        Engine(str(tmp_path), dtype="float32", device="cuda", attention="triton", device_memory="100KiB")


def test_a_host_that_is_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with_words("llama", tmp_path, num_hidden_layers=4)
    spec = run(tmp_path)[0].model.spec
    free = SimpleNamespace(available=max(spec.block_bytes), total=1 << 30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    with pytest.raises(UsageError, match="free memory of the host"):
        run(tmp_path, offload="auto", device_memory=device_for(spec, 2), kv_memory=KV)


def test_sizes_in_a_buffer_are_whole_lines() -> None:
    assert [in_lines(n) for n in (0, 1, 256, 257)] == [0, 256, 256, 512]
