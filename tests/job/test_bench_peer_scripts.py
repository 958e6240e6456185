"""Peers' scripts in processes of their own, under the protocol of the benchmark, against packages that only record
what they are asked. What the real packages compute, the correctness gate says where they are installed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from batchgen.job.bench.engines.peer_tools import apart, converted, shared_waves, together
from batchgen.job.bench.peers import EngineSource
from batchgen.job.bench.process import EngineFailed, EngineProcess, LoadSpec
from batchgen.job.bench.workloads import BenchRow
from tests.job import fake_peers

ROWS = [BenchRow([5, 6, 7], 2), BenchRow([5, 6], 3), BenchRow([4], 1, samples=2)]
EXPECTED = [[8, 9], [7, 8, 9], [5, 5]]
"""The fakes' token after the i-th is the prompt's last plus i."""


@pytest.fixture
def spec(tmp_path: Path) -> LoadSpec:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return LoadSpec(str(model), "float32", "cpu", 2, cache=str(tmp_path / "cache" / "converted"))


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the fakes, which are put before all else on the path, write what they are asked."""
    fakes = tmp_path / "fakes"
    fake_peers.write(fakes)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(fakes), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("FAKE_RECORD", str(tmp_path / "record"))
    return tmp_path / "record"


def asked(record: Path, what: str) -> list[Any]:
    """Arguments of every call of this name, in order."""
    lines = map(json.loads, record.read_text().splitlines())
    return [arguments for name, arguments in lines if name == what]


# Tools


def test_samples_go_apart_and_together() -> None:
    rows = [{"ids": [1], "max_new": 2}, {"ids": [2], "max_new": 1, "samples": 3}]
    alone = apart(rows)
    assert [row["ids"] for row in alone] == [[1], [2], [2], [2]]
    assert together(rows, [[5, 6], [7], [8], [9]]) == [[5, 6], [7, 8, 9]]


def test_waves_compute_every_shared_beginning_once() -> None:
    root = list(range(10))
    tree = [[*root, group, group, group, group, leaf] for group in (50, 60) for leaf in (1, 2, 3)]
    mixed = [tree[i] for i in (4, 0, 3, 1, 5, 2)]
    waves = shared_waves(mixed, 4)
    assert [[mixed[i] for i in wave] for wave in waves] == [[tree[0]], [tree[3]]]
    assert shared_waves([[1, 2], [3, 4]], 2) == []
    assert shared_waves([[1, 2, 3]] * 3, 2) == [[0]]
    assert shared_waves([[1, 2, 3]] * 3, 4) == []
    assert shared_waves([], 1) == []


def test_a_model_is_converted_once_and_again_when_it_or_the_converter_changes(tmp_path: Path) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    (model / "config.json").write_text("{}")
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "weights").write_text("w")

    first = converted(str(cache), str(model), "tool 1", build)
    assert first.name.startswith("tool-")
    assert (first / "weights").is_file()
    assert converted(str(cache), str(model), "tool 1", build) == first
    assert len(built) == 1
    second = converted(str(cache), str(model), "tool 2", build)
    (model / "config.json").write_text('{"a": 1}')
    third = converted(str(cache), str(model), "tool 1", build)
    assert len({first, second, third}) == len(built) == 3
    assert sorted(cache.iterdir()) == sorted((first, second, third)), "nothing is left beside them"

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("cannot convert this")

    with pytest.raises(RuntimeError, match="cannot convert"):
        converted(str(cache), str(model), "tool 3", fail)
    assert len(list(cache.iterdir())) == 3


# OpenVINO GenAI


def test_openvino(record: Path, spec: LoadSpec) -> None:
    with EngineProcess(EngineSource("openvino"), spec) as engine:
        assert (engine.version, engine.dtype, engine.device, engine.threads) == ("fake-ov", "float32", "cpu", 2)
        for setting in engine.settings:
            assert engine.generate(ROWS, setting).outputs == EXPECTED
    with EngineProcess(EngineSource("openvino"), spec):
        assert len(asked(record, "export")) == 1, "the second process finds it converted"
    built = asked(record, "pipeline")
    assert len(built) == 2 + len(engine.settings), "anew for each pass, with an empty cache"
    for folder, device, properties, _ in built:
        assert Path(folder).parent == Path(spec.cache)
        assert device == "CPU"
        assert properties == {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "INFERENCE_NUM_THREADS": 2,
        }
    assert [call[3]["enable_prefix_caching"] for call in built[1:-1]] == [
        bool(setting["prefix_cache"]) for setting in engine.settings
    ]


def test_openvino_warms_its_cache_by_hand(record: Path, spec: LoadSpec) -> None:
    prefix = [9] * 40
    rows = [BenchRow([*prefix, i], 2) for i in (3, 2, 1)]
    with EngineProcess(EngineSource("openvino"), spec) as engine:
        warm, cold = ({"prefix_cache": 1, "batched_tokens": 64, "warm": warm} for warm in (1, 0))
        assert engine.generate(rows, warm).outputs == engine.generate(rows, cold).outputs == [[4, 5], [3, 4], [2, 3]]
    passes = asked(record, "generate")
    assert [[ids[-1] for ids, _ in one] for one in passes] == [[1], [3, 2, 1], [3, 2, 1]]
    assert [[config["max_new_tokens"] for _, config in one] for one in passes] == [[1], [2] * 3, [2] * 3]
    for ids, config in (row for one in passes for row in one):
        assert len(ids) == 41
        assert config["ignore_eos"]
        assert not config["do_sample"]
        assert config["min_new_tokens"] == config["max_new_tokens"]


def test_openvino_is_measured_on_a_cpu_only(record: Path, spec: LoadSpec) -> None:
    with pytest.raises(EngineFailed, match="openvino failed at load: RuntimeError: it is measured on a CPU only"):
        EngineProcess(EngineSource("openvino"), LoadSpec(spec.model, "float32", "cuda", 1, cache=spec.cache))


# SGLang


def test_sglang(record: Path, spec: LoadSpec) -> None:
    with EngineProcess(EngineSource("sglang"), spec) as engine:
        assert (engine.version, engine.settings) == ("fake-sglang", [{}])
        assert engine.generate(ROWS, {}).outputs == EXPECTED
    ((made,),) = asked(record, "engine")
    assert made["model_path"] == spec.model
    assert made["skip_tokenizer_init"]
    assert (made["dtype"], made["device"]) == ("float32", "cpu")
    assert len(asked(record, "flush_cache")) == 1, "prompts of earlier passes are forgotten"
    ((ids, params),) = asked(record, "generate")
    assert ids == [row.ids for row in ROWS]
    assert [(p["temperature"], p["n"], p["max_new_tokens"], p["ignore_eos"]) for p in params] == [
        (0.0, 1, 2, True), (0.0, 1, 3, True), (1.0, 2, 1, True)
    ]  # fmt: skip
