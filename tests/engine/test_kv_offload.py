"""Keys and values larger than the device: jobs whose layers are streamed against the same jobs without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchgen.engine.engine import Engine
from batchgen.engine.memory.kv_offload import plan_pages, streamed_cache
from batchgen.errors import UsageError
from batchgen.kernels.kv_stream import StreamedPool
from batchgen.kernels.stream import plan_stream
from tests.engine.fake_device import LateDevice
from tests.engine.reference import assert_all_same, save_with_words, shared_prefix_prompts
from tests.engine.test_offload import KV, LAYERS, counts, device_for
from tests.engine.test_syncs import run_job
from tests.models.tiny import VOCAB

LIST = shared_prefix_prompts(14, VOCAB, seed=5)
ROWS: list[dict[str, Any]] = [
    {"input_ids": ids, "max_new_tokens": 4 + i % 5, "ignore_eos": True, "return_logprob": True, "temperature": 0.0}
    for i, ids in enumerate(LIST)
]
SAMPLED = [{**row, "temperature": 0.8, "seed": 3, "n": 1 + i % 3, "logprob_start_len": 0} for i, row in enumerate(ROWS)]


def run(folder: Path, rows: list[dict[str, Any]] = ROWS, **options: Any) -> tuple[Engine, list[Any]]:
    engine = Engine(str(folder), **{"dtype": "float32", "attention": "torch", "device": "cpu", **options})
    return engine, list(engine.generate(rows, ordered=True, progress=False))


def small_device(patch: pytest.MonkeyPatch, engine: Engine, share: float, host: int = 1 << 40) -> dict[str, Any]:
    """Options of a device with room for a share of the bytes of the last job's cache; `host`: bytes of the host."""
    assert engine.last_run is not None
    room = int(engine.last_run.pool.nbytes * share)

    def cache(config: Any, spec: Any, workload: Any, device: int, _: int, limits: Any) -> Any:
        return streamed_cache(config, spec, workload, min(device, room), host, limits)

    patch.setattr("batchgen.engine.engine.streamed_cache", cache)
    return {"offload": "kv", "device_memory": "1GiB"}


def assert_as_planned(engine: Engine) -> None:
    done = counts(engine)
    for way in ("in", "out"):
        assert done[f"offload_kv_bytes_{way}"] == done[f"offload_kv_planned_bytes_{way}"] > 0


@pytest.mark.parametrize(("rows", "size"), [(ROWS, 16), (SAMPLED, 3)])
@pytest.mark.parametrize(
    ("model_type", "implementation", "layers", "attention", "share"),
    [
        ("llama", "native", 6, "torch", 0.5),
        ("llama", "native", 3, "auto", 0.7),
        ("llama", "native", 2, "torch", 0.6),
        ("llama", "transformers", 5, "torch", 0.5),
        ("gemma2", "transformers", 6, "torch", 0.4),
        ("deepseek_v3", "transformers", 4, "torch", 0.6),
        ("qwen3_next", "transformers", 0, "torch", 0.7),
    ],
)  # fmt: skip
def test_results_are_those_of_a_cache_that_fits_and_the_copies_are_planned(
    model_type: str,
    implementation: str,
    layers: int,
    attention: str,
    share: float,
    size: int,
    rows: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_with_words(model_type, tmp_path, **({LAYERS: layers} if layers else {}))
    options = {"model_impl": implementation, "attention": attention}
    whole, expected = run(tmp_path, rows, page_size=size, **options)
    options |= {"page_size": size, **small_device(monkeypatch, whole, share)}
    engine, got = run(tmp_path, rows, **options)
    assert engine.last_run is not None
    assert isinstance(engine.last_run.pool, StreamedPool)
    assert_all_same(got, expected)
    assert_as_planned(engine)
    again = list(engine.generate(rows, ordered=True, progress=False))
    assert_all_same(again, expected)
    assert_as_planned(engine)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_few_pages_preempt_rows(implementation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with_words("llama", tmp_path, num_hidden_layers=6)
    options: dict[str, Any] = {"model_impl": implementation, "page_size": 4}
    _, expected = run(tmp_path, **options)
    pages = (max(map(len, LIST)) + 9) // 4 + 6
    engine = Engine(
        str(tmp_path), dtype="float32", attention="torch", device="cpu", offload="kv", device_memory="1GiB", **options
    )
    engine.order, engine.admission = "tree", "free"
    plan = plan_stream([pages] * 6, 0, 4 * pages)
    monkeypatch.setattr("batchgen.engine.engine.streamed_cache", lambda *_: (pages, plan))
    assert_all_same(engine.generate(ROWS, ordered=True, progress=False), expected)
    assert engine.last_run is not None
    assert engine.last_run.scheduler.stats.preemptions > 0
    assert_as_planned(engine)


@pytest.mark.parametrize("layers", [2, 3, 6])
@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_pages_are_read_only_while_they_are_in_place(
    implementation: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that has poison in pages until their copy is waited for."""
    save_with_words("llama", tmp_path, num_hidden_layers=layers)
    options: dict[str, Any] = {"model_impl": implementation, "page_size": 3}
    whole, expected = run(tmp_path, SAMPLED, **options)
    options |= small_device(monkeypatch, whole, 0.7)
    engine = Engine(str(tmp_path), dtype="float32", attention="torch", device="cpu", **options)
    engine.device = device = LateDevice()
    assert_all_same(engine.generate(SAMPLED, ordered=True, progress=False), expected)
    assert_as_planned(engine)
    done = counts(engine)
    assert device.counts.copied_ahead == done["offload_kv_bytes_in"] + done["offload_kv_bytes_out"]


def test_the_host_does_not_wait_for_pages_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with_words("llama", tmp_path, num_hidden_layers=5)
    work = SAMPLED[:5]
    whole = run_job(tmp_path, work)
    plan = plan_stream([60] * 5, 0, 180)
    monkeypatch.setattr("batchgen.engine.engine.streamed_cache", lambda *_: (60, plan))
    job = run_job(tmp_path, work, captures=True, offload="kv", device_memory="256MiB")
    assert_all_same(job.done, whole.done)
    assert job.counts.copied_ahead
    assert not [
        sync for step in job.steps for sync in step.syncs if "kv_stream.py" in sync.place or "device.py" in sync.place
    ]
    assert not job.counts.replays, "no graph has the copies"


def test_a_job_that_does_not_fit_runs_with_weights_streamed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the cache holds one row at once, and a row's keys and values are few bytes next to the weights."""
    save_with_words("llama", tmp_path, num_hidden_layers=6)
    whole, expected = run(tmp_path)
    small_device(monkeypatch, whole, 0.12)
    options: dict[str, Any] = {"device_memory": device_for(whole.model.spec, 3), "kv_memory": KV}
    engine, _ = run(tmp_path, **options, offload="weights")
    assert engine.last_run is not None
    assert not isinstance(engine.last_run.pool, StreamedPool)
    engine, got = run(tmp_path, **options, offload="auto")
    assert_all_same(got, expected)
    done = counts(engine)
    assert done["offload_weight_bytes"] == done["offload_planned_bytes"] > 0
    assert_as_planned(engine)


def test_auto_leaves_keys_and_values_where_copying_them_does_not_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all weights on the device no pass gets cheaper by more rows, until the longest row does not fit."""
    save_with_words("llama", tmp_path, num_hidden_layers=6)
    whole, expected = run(tmp_path, page_size=4)
    pages = sum(-(-(len(row["input_ids"]) + row["max_new_tokens"]) // 4) for row in ROWS)
    longest = max(-(-(len(row["input_ids"]) + row["max_new_tokens"]) // 4) for row in ROWS)
    assert whole.last_run is not None
    page = whole.last_run.pool.nbytes // whole.last_run.pool.num_pages
    for room, is_streamed in ((pages // 2, False), (longest - 1, True)):
        options = small_device(monkeypatch, whole, room * page / whole.last_run.pool.nbytes)
        engine, got = run(tmp_path, page_size=4, **{**options, "offload": "auto"})
        assert engine.last_run is not None
        assert isinstance(engine.last_run.pool, StreamedPool) == is_streamed
        assert_all_same(got, expected)


def test_pages_are_as_many_as_the_device_and_the_host_hold() -> None:
    assert plan_pages([10] * 8, 5, 400, 0) == (5, plan_stream([50] * 8, 0, 400)), "all stay there"
    for device, host in ((400, 1 << 20), (300, 1 << 20), (300, 200), (90, 1 << 20), (19, 1 << 20), (9, 1 << 20)):
        pages, plan = plan_pages([10] * 8, 1000, device, host)
        assert plan.device_bytes <= device or not pages
        assert plan.pass_bytes <= host
        more = plan_stream([10 * (pages + 1)] * 8, 0, device)
        assert more.device_bytes > device or more.pass_bytes > host
    pages, plan = plan_pages([10] * 8, 1000, 400, 1 << 20)
    assert (pages, len(plan.streamed), plan.slots) == (40, 8, 1), "one slot holds more than two"
    held, plan = plan_pages([10] * 8, 1000, 400, 1 << 20, lambda pages: 10 * pages)
    assert (held, plan.others) == (20, 200)


REFUSALS = [
    ({}, {"deterministic": True}, "computes a step in several passes"),
    ({"num_hidden_layers": 1}, {}, "no two layers of one size"),
    ({}, {"device_memory": "100KiB"}, "add `offload=auto`"),
    ({}, {"quantization": "int8"}, "leave the option out"),
]


@pytest.mark.parametrize(("model", "options", "message"), REFUSALS)
def test_what_cannot_be_streamed_is_refused(
    model: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_with_words("llama", tmp_path, **model)
    with pytest.raises((UsageError, ValueError), match=message):
        run(tmp_path, **{"offload": "kv", "device_memory": "1GiB", **options})


def test_a_device_without_room_for_two_pages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with_words("llama", tmp_path)
    whole, _ = run(tmp_path)
    options = small_device(monkeypatch, whole, 0.7, host=100)
    with pytest.raises((UsageError, ValueError), match="do not hold two pages"):
        run(tmp_path, **{**options, **small_device(monkeypatch, whole, 0.0)})
