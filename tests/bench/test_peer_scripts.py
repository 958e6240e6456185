"""Peers' scripts in engine processes, with fake packages.

The outputs of the real packages are checked by the correctness gate, where they are installed.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from batchgen.bench.engines import peer_tools
from batchgen.bench.engines.engine_transformers import static_batches
from batchgen.bench.engines.peer_tools import cached_conversion, prefix_waves
from batchgen.bench.process import EngineFailed, EngineProcess, EngineSource, LoadSpec
from batchgen.bench.workloads import BenchRow
from tests.bench import fake_peers

ROWS = [BenchRow([5, 6, 7], 2), BenchRow([5, 6], 3), BenchRow([4], 1, samples=2)]
EXPECTED = [[8, 9], [7, 8, 9], [5, 5]]
"""Outputs of the fakes: the i-th new token is the prompt's last token plus i."""
FAKED = ("openvino", "vllm", "vllm-zentorch", "sglang", "llama.cpp")
EMPTIED = {"vllm": "reset", "vllm-zentorch": "reset", "sglang": "reset"}
"""Peer -> call that empties its prefix cache."""


@pytest.fixture
def spec(folder: Path, tmp_path: Path) -> LoadSpec:
    return LoadSpec(str(folder), "float32", "cpu", 2, cache=str(tmp_path / "cache" / "converted"))


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the fakes at the front of the path and return the file in which they record their calls."""
    fakes = tmp_path / "fakes"
    fake_peers.write(fakes)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(fakes), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("FAKE_RECORD", str(tmp_path / "record"))
    monkeypatch.setenv("FAKE_PLATFORM", "ZenCpuPlatform")
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    return tmp_path / "record"


def calls(record: Path, what: str) -> list[Any]:
    """Arguments of every call of this name, in order."""
    lines = map(json.loads, record.read_text().splitlines()) if record.exists() else ()
    return [arguments for name, arguments in lines if name == what]


def on_device(spec: LoadSpec, name: str) -> LoadSpec:
    return replace(spec, device="cuda") if name == "sglang" else spec


# The interface


@pytest.mark.parametrize("name", FAKED)
def test_every_script_generates_the_rows_in_each_setting(record: Path, spec: LoadSpec, name: str) -> None:
    """A prefix cache is empty at the begin of each pass: it is cleared, or its engine built again."""
    empty = EMPTIED.get(name, "built")
    with EngineProcess(EngineSource(name), on_device(spec, name)) as engine:
        assert engine.version.startswith("fake-")
        assert engine.dtype == "float32"
        processors = len(os.sched_getaffinity(0)) if name.startswith("vllm") else 2
        assert (engine.name, engine.threads) == (name, min(2, processors))
        for setting in [*engine.settings, engine.settings[0]]:
            emptied = len(calls(record, empty))
            made = engine.generate(ROWS, setting)
            assert made.outputs == EXPECTED
            assert made.seconds > 0
            assert made.counted.get("prompt_tokens_computed", 7) in (7, 6 - 3)
            assert len(calls(record, empty)) > emptied or not setting.get("prefix_cache", name in EMPTIED)
    sampled = [p for call in calls(record, "generate") for p in (call[0] if isinstance(call[0][0], dict) else ())]
    assert all((p["temperature"], p["n"]) in ((0.0, 1), (1.0, 2)) and p["ignore_eos"] for p in sampled)
    if name == "openvino":
        drawn = [config for _, config in calls(record, "generate")[-1] if config["do_sample"]]
        assert [(c["temperature"], c["rng_seed"]) for c in drawn] == [(1.0, 2), (1.0, 3)], (
            "samples have different seeds"
        )


@pytest.mark.parametrize("name", ["openvino", "llama.cpp", "sglang"])
def test_a_device_that_is_not_supported_is_refused(record: Path, spec: LoadSpec, name: str) -> None:
    other = replace(spec, device="cpu" if name == "sglang" else "cuda")
    with pytest.raises(EngineFailed, match=r"RuntimeError: supported on [CG]PUs only; give --device"):
        EngineProcess(EngineSource(name), other)


# OpenVINO GenAI


def test_openvino_computes_in_the_dtype_that_the_processor_has(
    record: Path, spec: LoadSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_tools, "matmul_seconds", lambda dtype: 1.0)
    for lacks, dtype, precision in (("", "bfloat16", "bf16"), ("bf16", "float32", "f32")):
        monkeypatch.setenv("FAKE_OV_LACKS", lacks)
        with EngineProcess(EngineSource("openvino"), replace(spec, dtype="bfloat16")) as engine:
            assert engine.dtype == dtype
        properties, _ = calls(record, "built")[-1]
        assert properties["KV_CACHE_PRECISION"] == properties["INFERENCE_PRECISION_HINT"] == precision
        assert properties["INFERENCE_NUM_THREADS"] == 2
    with pytest.raises(EngineFailed, match="expect kvcache type f32"):
        EngineProcess(EngineSource("openvino"), replace(spec, dtype="bfloat16", keep_dtype=True))
    assert len(calls(record, "export")) == 1, "later processes find it converted"


def test_openvino_fills_its_prefix_cache_before_a_pass(record: Path, spec: LoadSpec) -> None:
    prefix = [9] * 40
    rows = [BenchRow([*prefix, i], 2) for i in (3, 2, 1)]
    with EngineProcess(EngineSource("openvino"), spec) as engine:
        warm, cold = ({"prefix_cache": 1, "batched_tokens": 64, "warm": warm} for warm in (1, 0))
        assert engine.generate(rows, warm).outputs == engine.generate(rows, cold).outputs == [[4, 5], [3, 4], [2, 3]]
    passes = calls(record, "generate")
    mirrored = [[7], [7, 8, 9]]  # the warm-up's ids are 10 minus the ids of the rows, which are 1 to 9
    assert [[ids[-1] for ids, _ in one] for one in passes] == [*mirrored, [1], [3, 2, 1], mirrored[1], [3, 2, 1]]
    assert [[config["max_new_tokens"] for _, config in one] for one in passes] == 2 * [[1], [2] * 3] + 2 * [[2] * 3]
    for _, config in (row for one in passes for row in one):
        assert config["ignore_eos"]
        assert not config["do_sample"]
        assert config["min_new_tokens"] == config["max_new_tokens"]


# vLLM


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllm_is_configured_for_the_device(record: Path, spec: LoadSpec, device: str) -> None:
    with EngineProcess(EngineSource("vllm"), replace(spec, device=device, keep_dtype=True, dtype="bfloat16")) as engine:
        for setting in (*engine.settings, engine.settings[0]):
            engine.generate(ROWS, setting)
    built = calls(record, "built")
    assert [options["enforce_eager"] for options, _ in built] == ([False, True] if device == "cpu" else [False])
    for options, environment in built:
        assert (options["model"], options["dtype"]) == (spec.model, "bfloat16")
        assert options["enable_prefix_caching"]
        assert ("gpu_memory_utilization" in options) == (device == "cuda")
        assert environment.get("VLLM_ENABLE_V1_MULTIPROCESSING") == ("0" if device == "cpu" else None)
        assert environment.get("VLLM_WORKER_MULTIPROCESSING_METHOD") == ("spawn" if device == "cuda" else None)
        processors = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
        assert environment.get("VLLM_CPU_OMP_THREADS_BIND") == (processors if device == "cpu" else None)


def test_vllm_is_labelled_by_what_ran(record: Path, spec: LoadSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm-zentorch"):
        with EngineProcess(EngineSource(name), spec) as engine:
            assert engine.version == "fake-vllm, zentorch 2.13"
    monkeypatch.setenv("FAKE_PLATFORM", "CpuPlatform")
    with EngineProcess(EngineSource("vllm"), spec) as engine:
        assert engine.version == "fake-vllm"
    with pytest.raises(EngineFailed, match="vLLM does not compute with zentorch on this processor"):
        EngineProcess(EngineSource("vllm-zentorch"), spec)


# llama.cpp


def test_llama_cpp_computes_a_shared_prefix_once(record: Path, spec: LoadSpec) -> None:
    root, groups = [9] * 40, ([10] * 40, [11] * 40)
    rows = [BenchRow([*root, *group, i], 2) for i in (5, 4, 3) for group in groups]
    with EngineProcess(EngineSource("llama.cpp"), spec) as engine:
        made = engine.generate(rows, {"batch": 64, "shared": 1, "ubatch": 64})
        separate = engine.generate(rows, {"batch": 64, "shared": 0, "ubatch": 64})
        same = engine.generate([BenchRow(root, 2)] * 3, {"batch": 64, "shared": 1, "ubatch": 64})
    assert made.outputs == separate.outputs == [[row.ids[-1] + 1, row.ids[-1] + 2] for row in rows]
    assert made.counted["prompt_tokens_computed"] == 40 + 2 * 40 + 6
    assert separate.counted == {"prompt_tokens_computed": 6 * 81, "decode_rows": 6}
    assert same.outputs == [[10, 11]] * 3
    assert same.counted["prompt_tokens_computed"] == 40 + 2, "the last token's logits are needed"
    assert sorted(end for (end,) in calls(record, "copy")) == [39, 39, 40, 80, 80, 80, 80]


def test_gguf_of_a_llama(record: Path, spec: LoadSpec, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has the right names, shapes and types, and contains every number once."""
    monkeypatch.setattr(peer_tools, "matmul_seconds", {"bfloat16": 9.0, "float32": 1.0}.__getitem__)
    for keep, dtype in ((False, "float32"), (True, "bfloat16")):
        with EngineProcess(EngineSource("llama.cpp"), replace(spec, dtype="bfloat16", keep_dtype=keep)) as engine:
            assert engine.dtype == dtype, "this process chooses the faster dtype of a peer without torch"
        ((path,),) = calls(record, "model")[-1:]
        reader = gguf.GGUFReader(path)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        weights = load_file(folder / "model.safetensors")
        assert len(tensors) == len(weights)
        kinds = {name: tensors[name].tensor_type.name for name in ("token_embd.weight", "blk.0.ffn_norm.weight")}
        assert list(kinds.values()) == ["F32" if dtype == "float32" else "BF16", "F32"]
        assert tensors["token_embd.weight"].shape.tolist() == [32, 400]
        assert tensors["blk.1.attn_k.weight"].shape.tolist() == [32, 16]
        assert sorted(gguf.quants.dequantize(t.data, t.tensor_type).sum(dtype=float) for t in tensors.values()) == (
            pytest.approx(sorted(float(values.double().sum()) for values in weights.values()), abs=1e-3)
        )
        for name, value in (("block_count", 2), ("attention.head_count_kv", 2), ("attention.key_length", 8)):
            assert reader.fields[f"llama.{name}"].contents() == value


def test_rows_of_a_projection_are_interleaved(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotating adjacent pairs in the new order equals rotating halves in the old one."""
    monkeypatch.syspath_prepend(str(record.parent / "fakes"))
    interleaved = runpy.run_path(str(Path(peer_tools.__file__).with_name("engine_llama_cpp.py")))["interleaved"]
    heads, size = 3, 8
    values = np.random.default_rng(0).normal(size=(heads * size, 1))
    angles = np.arange(size // 2) * 0.3
    cos, sin = np.cos(angles), np.sin(angles)
    halves = values.reshape(heads, 2, size // 2)
    rotated = np.stack([halves[:, 0] * cos - halves[:, 1] * sin, halves[:, 1] * cos + halves[:, 0] * sin], axis=1)
    pairs = interleaved(values, heads).reshape(heads, size // 2, 2)
    neighbours = np.stack([pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos + pairs[..., 0] * sin], -1)
    expected = interleaved(rotated.reshape(-1, 1), heads).reshape(heads, size // 2, 2)
    np.testing.assert_allclose(neighbours, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "cannot convert model type gpt2; supported: llama, qwen3"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "cannot convert a model with scaled rotary embeddings"),
        ({}, "cannot convert the tensor model.layers.0.mlp.extra.weight"),
    ],
)
def test_gguf_of_another_model_is_refused(
    record: Path, spec: LoadSpec, folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    save_file({"model.layers.0.mlp.extra.weight": torch.zeros(2, 2)}, model / "more.safetensors")
    with pytest.raises(EngineFailed, match=f"ValueError: {message}"):
        EngineProcess(EngineSource("llama.cpp"), replace(spec, model=str(model)))


# Helpers


def test_static_batches_have_similar_lengths_and_one_kind_of_sampling() -> None:
    def rows(*given: tuple[int, int]) -> list[dict[str, Any]]:
        return [{"ids": [5] * prompt, "max_new": new, "sampled": new == 9} for prompt, new in given]

    assert static_batches(rows((3, 2), (1, 9), (5, 2), (2, 8)), 2) == [(False, [3, 2]), (False, [0]), (True, [1])]
    lengths = rows((1, 4), (3, 1), (2, 2), (3, 3))
    assert static_batches(lengths, 2) == [(False, [0, 3]), (False, [2, 1])]
    assert static_batches(lengths, 2, prompt_first=True) == [(False, [3, 1]), (False, [2, 0])]
    assert static_batches([], 2) == []


def test_waves_compute_every_shared_prefix_once() -> None:
    root = list(range(10))
    tree = [[*root, group, group, group, group, leaf] for group in (50, 60) for leaf in (1, 2, 3)]
    mixed = [tree[i] for i in (4, 0, 3, 1, 5, 2)]
    waves = prefix_waves(mixed, 4)
    assert [[mixed[i] for i in wave] for wave in waves] == [[tree[0]], [tree[3]]]
    assert prefix_waves([[1, 2], [3, 4]], 2) == prefix_waves([[1, 2, 3]] * 3, 4) == prefix_waves([], 1) == []
    assert prefix_waves([[1, 2, 3]] * 3, 2) == [[0]]


def test_conversion_is_cached_until_the_model_or_the_converter_changes(tmp_path: Path) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    (model / "config.json").write_text("{}")
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "weights").write_text("w")

    first = cached_conversion(str(cache), str(model), "tool 1", build)
    assert first.name.startswith("tool-")
    assert (first / "weights").is_file()
    assert cached_conversion(str(cache), str(model), "tool 1", build) == first
    assert len(built) == 1
    second = cached_conversion(str(cache), str(model), "tool 2", build)
    (model / "config.json").write_text('{"a": 1}')
    third = cached_conversion(str(cache), str(model), "tool 1", build)
    assert len({first, second, third}) == len(built) == 3
    assert sorted(cache.iterdir()) == sorted((first, second, third)), "no temporary folder is left"

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("cannot convert this")

    with pytest.raises(RuntimeError, match="cannot convert"):
        cached_conversion(str(cache), str(model), "tool 3", fail)
    assert len(list(cache.iterdir())) == 3


def test_peers_get_the_dtype_that_pytorch_multiplies_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peer_tools.matmul_seconds("bfloat16") > 0
    for seconds, dtype, device, keep, chosen in (
        (2.5, "bfloat16", "cpu", False, "float32"),
        (1.5, "bfloat16", "cpu", False, "float32"),
        (1.2, "bfloat16", "cpu", False, "bfloat16"),
        (2.5, "bfloat16", "cpu", True, "bfloat16"),
        (2.5, "bfloat16", "cuda", False, "bfloat16"),
        (2.5, "float32", "cpu", False, "float32"),
    ):
        monkeypatch.setattr(peer_tools, "matmul_seconds", {"bfloat16": seconds, "float32": 1.0}.__getitem__)
        request = {"dtype": dtype, "device": device, "keep_dtype": keep}
        assert peer_tools.fastest_dtype(request) == chosen
