"""Peers' scripts in engine processes, with fake packages that record their calls.

The outputs of the real packages are checked by the correctness gate, where they are installed.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import batchgen.bench.engines as scripts
from batchgen.bench.engines import peer_tools
from batchgen.bench.engines.peer_tools import (
    cached_conversion,
    expand_samples,
    join_samples,
    prefix_waves,
    static_batches,
)
from batchgen.bench.peers import EngineSource, parse_peers
from batchgen.bench.process import EngineFailed, EngineProcess, LoadSpec
from batchgen.bench.run import distinct_settings
from batchgen.bench.shapes import Shape, build_model
from batchgen.bench.workloads import BenchRow
from tests.bench import fake_peers

TINY = Shape(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, inner=48, vocab=64, context=128)
ROWS = [BenchRow([5, 6, 7], 2), BenchRow([5, 6], 3), BenchRow([4], 1, samples=2)]
EXPECTED = [[8, 9], [7, 8, 9], [5, 5]]
"""Outputs of the fakes: the i-th new token is the prompt's last token plus i."""


@pytest.fixture
def spec(tmp_path: Path) -> LoadSpec:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return LoadSpec(str(model), "float32", "cpu", 2, cache=str(tmp_path / "cache" / "converted"))


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the fakes at the front of the path and return the file in which they record their calls."""
    fakes = tmp_path / "fakes"
    fake_peers.write(fakes)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(fakes), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("FAKE_RECORD", str(tmp_path / "record"))
    return tmp_path / "record"


def calls(record: Path, what: str) -> list[Any]:
    """Arguments of every call of this name, in order."""
    lines = map(json.loads, record.read_text().splitlines())
    return [arguments for name, arguments in lines if name == what]


# Tools


def test_samples_are_expanded_and_joined() -> None:
    rows = [{"ids": [1], "max_new": 2}, {"ids": [2], "max_new": 1, "samples": 3}]
    alone = expand_samples(rows)
    assert [row["ids"] for row in alone] == [[1], [2], [2], [2]]
    assert join_samples(rows, [[5, 6], [7], [8], [9]]) == [[5, 6], [7, 8, 9]]


def test_static_batches_have_similar_lengths_and_one_kind_of_sampling() -> None:
    rows = [
        {"ids": [1] * n, "max_new": new, "samples": k} for n, new, k in ((3, 2, 1), (1, 9, 2), (5, 2, 1), (2, 8, 1))
    ]
    assert static_batches(rows, 2) == [(False, [3, 2]), (False, [0]), (True, [1])]
    assert static_batches(rows[1:2], 2) == [(True, [0])]
    lengths = [{"ids": [5] * prompt, "max_new": new} for prompt, new in ((1, 4), (3, 1), (2, 2), (3, 3))]
    assert static_batches(lengths, 2) == [(False, [0, 3]), (False, [2, 1])]
    assert static_batches(lengths, 2, prompt_first=True) == [(False, [3, 1]), (False, [2, 0])]
    assert static_batches([], 2) == []


def test_waves_compute_every_shared_prefix_once() -> None:
    root = list(range(10))
    tree = [[*root, group, group, group, group, leaf] for group in (50, 60) for leaf in (1, 2, 3)]
    mixed = [tree[i] for i in (4, 0, 3, 1, 5, 2)]
    waves = prefix_waves(mixed, 4)
    assert [[mixed[i] for i in wave] for wave in waves] == [[tree[0]], [tree[3]]]
    assert prefix_waves([[1, 2], [3, 4]], 2) == []
    assert prefix_waves([[1, 2, 3]] * 3, 2) == [[0]]
    assert prefix_waves([[1, 2, 3]] * 3, 4) == []
    assert prefix_waves([], 1) == []


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


# OpenVINO GenAI


def test_openvino(record: Path, spec: LoadSpec) -> None:
    with EngineProcess(EngineSource("openvino"), spec) as engine:
        assert (engine.version, engine.dtype, engine.device, engine.threads) == ("fake-ov", "float32", "cpu", 2)
        for setting in engine.settings:
            assert engine.generate(ROWS, setting).outputs == EXPECTED
    with EngineProcess(EngineSource("openvino"), spec):
        assert len(calls(record, "export")) == 1, "the second process finds it converted"
    built = calls(record, "pipeline")
    assert len(built) == 2 + len(engine.settings), "one for each setting, and at each load"
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


@pytest.mark.parametrize(("lacks", "dtype", "precision"), [("", "bfloat16", "bf16"), ("bf16", "float32", "f32")])
def test_openvino_falls_back_to_float32_without_bfloat16(
    record: Path, spec: LoadSpec, monkeypatch: pytest.MonkeyPatch, lacks: str, dtype: str, precision: str
) -> None:
    monkeypatch.setattr(peer_tools, "matmul_seconds", lambda dtype: 1.0)
    monkeypatch.setenv("FAKE_OV_LACKS", lacks)
    with EngineProcess(EngineSource("openvino"), replace(spec, dtype="bfloat16")) as engine:
        assert engine.dtype == dtype
    properties = calls(record, "pipeline")[-1][2]
    assert properties["KV_CACHE_PRECISION"] == properties["INFERENCE_PRECISION_HINT"] == precision


def test_openvino_fails_if_no_allowed_dtype_is_supported(
    record: Path, spec: LoadSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_OV_LACKS", "bf16 f32")
    for dtype in ("bfloat16", "float32"):
        with pytest.raises(EngineFailed, match="expect kvcache type f32"):
            EngineProcess(EngineSource("openvino"), replace(spec, dtype=dtype))
    monkeypatch.setenv("FAKE_OV_LACKS", "bf16")
    with pytest.raises(EngineFailed, match="expect kvcache type f32"):
        EngineProcess(EngineSource("openvino"), replace(spec, dtype="bfloat16", keep_dtype=True))


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
    for ids, config in (row for one in passes for row in one):
        assert len(ids) == 41
        assert config["ignore_eos"]
        assert not config["do_sample"]
        assert config["min_new_tokens"] == config["max_new_tokens"]


def test_openvino_reuses_a_pipeline_without_prefix_cache(record: Path, spec: LoadSpec) -> None:
    rows = [BenchRow([5, 7], 2)]
    with EngineProcess(EngineSource("openvino"), spec) as engine:
        for cache in (0, 0, 1, 1):
            engine.generate(rows, {"prefix_cache": cache, "batched_tokens": 64, "warm": 0})
    assert [call[3]["enable_prefix_caching"] for call in calls(record, "pipeline")[1:]] == [False, True, True]
    own, other = [5, 7], [7, 5]
    assert [ids for one in calls(record, "generate") for ids, _ in one] == [other, own, own, other, own, other, own]


def test_openvino_samples_have_different_seeds(record: Path, spec: LoadSpec) -> None:
    with EngineProcess(EngineSource("openvino"), spec) as engine:
        rows = [BenchRow([5], 2, samples=2), BenchRow([6], 2)]
        engine.generate(rows, {"prefix_cache": 1, "batched_tokens": 64, "warm": 0})
    _, (*drawn, greedy) = [[config for _, config in one] for one in calls(record, "generate")]
    assert [(c["do_sample"], c["temperature"], c["rng_seed"]) for c in drawn] == [(True, 1.0, 0), (True, 1.0, 1)]
    assert not greedy["do_sample"]


def test_openvino_runs_on_a_cpu_only(record: Path, spec: LoadSpec) -> None:
    with pytest.raises(EngineFailed, match="openvino failed at load: RuntimeError: supported on CPUs only"):
        EngineProcess(EngineSource("openvino"), replace(spec, device="cuda"))


# SGLang


def test_sglang(record: Path, spec: LoadSpec) -> None:
    with EngineProcess(EngineSource("sglang"), replace(spec, device="cuda")) as engine:
        assert (engine.version, engine.settings) == ("fake-sglang", [{}])
        assert engine.generate(ROWS[:2], {}).outputs == EXPECTED[:2]
        drawn = [replace(row, samples=2) for row in ROWS]
        assert engine.generate(drawn, {}).outputs == [[8, 9, 8, 9], [7, 8, 9, 7, 8, 9], [5, 5]]
        with pytest.raises(EngineFailed, match="differ in their number of samples"):
            engine.generate(ROWS, {})
    ((made,),) = calls(record, "engine")
    assert made["model_path"] == spec.model
    assert made["skip_tokenizer_init"]
    assert (made["dtype"], made["device"], made["attention_backend"]) == ("float32", "cuda", "triton")
    assert len(calls(record, "flush_cache")) == 3, "the prefix cache is cleared before each pass"
    greedy, sampled, _ = calls(record, "generate")
    assert greedy[0] == [row.ids for row in ROWS[:2]]
    assert [(p["temperature"], p["n"], p["max_new_tokens"], p["ignore_eos"]) for p in greedy[1] + sampled[1]] == [
        (0.0, 1, 2, True), (0.0, 1, 3, True), (1.0, 2, 2, True), (1.0, 2, 3, True), (1.0, 2, 1, True)
    ]  # fmt: skip


def test_sglang_has_its_default_attention_except_in_float32(record: Path, spec: LoadSpec) -> None:
    with EngineProcess(EngineSource("sglang"), replace(spec, device="cuda", dtype="bfloat16")) as engine:
        assert engine.dtype == "bfloat16"
    ((made,),) = calls(record, "engine")
    assert made["attention_backend"] is None


def test_sglang_runs_on_a_gpu_only(record: Path, spec: LoadSpec) -> None:
    with pytest.raises(EngineFailed, match="sglang failed at load: RuntimeError: supported on GPUs only"):
        EngineProcess(EngineSource("sglang"), spec)


# vLLM


def test_vllm(record: Path, spec: LoadSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)
    processors = sorted(os.sched_getaffinity(0))[:2]
    with EngineProcess(EngineSource("vllm"), spec) as engine:
        assert engine.settings == [{"eager": 0}, {"eager": 1}]
        assert engine.threads == len(processors)
        for setting in (*engine.settings, engine.settings[0]):
            made = engine.generate(ROWS, setting)
            assert made.outputs == EXPECTED
            assert made.counted == {"prompt_tokens_computed": 6 - 3}
    built = calls(record, "llm")
    assert [options["enforce_eager"] for options, _ in built] == [False, True], "each once"
    for options, environment in built:
        assert options["model"] == spec.model
        assert options["skip_tokenizer_init"]
        assert options["enable_prefix_caching"]
        assert "gpu_memory_utilization" not in options
        assert environment["VLLM_CPU_KVCACHE_SPACE"] == "4"
        assert environment["VLLM_CPU_OMP_THREADS_BIND"] == ",".join(map(str, processors))
        assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert calls(record, "reset") == [[False], [True], [False]], "the prefix cache is cleared before each pass"
    eager, prompts, params = calls(record, "generate")[1]
    assert eager
    assert prompts == [{"prompt_token_ids": row.ids} for row in ROWS]
    assert [(p["temperature"], p["n"], p["max_tokens"], p["ignore_eos"]) for p in params] == [
        (0.0, 1, 2, True), (0.0, 1, 3, True), (1.0, 2, 1, True)
    ]  # fmt: skip


def test_vllm_runs_in_a_separate_process_on_a_gpu(
    record: Path, spec: LoadSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROCESSING_METHOD"):
        monkeypatch.delenv(name, raising=False)
    with EngineProcess(EngineSource("vllm"), replace(spec, device="cuda")) as engine:
        assert engine.settings == [{}]
        assert engine.generate(ROWS, {}).outputs == EXPECTED
    ((options, environment),) = calls(record, "llm")
    assert options["gpu_memory_utilization"] == 0.5
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment
    assert environment["VLLM_WORKER_MULTIPROCESSING_METHOD"] == "spawn"


def test_a_script_as_python_sets_the_environment_of_one_peer(record: Path, spec: LoadSpec, tmp_path: Path) -> None:
    """As documented for `LD_PRELOAD`, which must not affect other engines."""
    script = tmp_path / "vllm-python"
    script.write_text(f'#!/bin/sh\nLD_PRELOAD="" exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    (source,) = parse_peers(f"vllm={script}")
    for one in (source, EngineSource("vllm")):
        with EngineProcess(one, spec):
            pass
    (_, with_script), (_, without) = calls(record, "llm")
    assert with_script["LD_PRELOAD"] == ""
    assert without.get("LD_PRELOAD") == os.environ.get("LD_PRELOAD")


def test_vllm_keeps_the_dtype_with_keep_dtype(record: Path, spec: LoadSpec) -> None:
    with EngineProcess(EngineSource("vllm"), replace(spec, dtype="bfloat16", keep_dtype=True)) as engine:
        assert engine.dtype == "bfloat16"
    assert [options["dtype"] for options, _ in calls(record, "llm")] == ["bfloat16"]


# CTranslate2


def test_ctranslate2(record: Path, spec: LoadSpec) -> None:
    with EngineProcess(EngineSource("ctranslate2"), spec) as engine:
        assert (engine.version, engine.dtype, engine.threads) == ("fake-ct2", "float32", 2)
        for static in (0, 1):
            assert {s["batch"] for s in engine.settings if s["static_prompt"] == static} >= {16, 64, 128, 256}
        made = engine.generate(ROWS, {"batch": 2, "static_prompt": 0})
        assert made.outputs == EXPECTED
        assert made.counted == {"prompt_tokens_computed": 7, "decode_rows": 2 * 2}
        with pytest.raises(EngineFailed, match="the prompts have no common prefix for a static prompt"):
            engine.generate(ROWS, {"batch": 2, "static_prompt": 1})
    config, options = calls(record, "generator")[0]
    assert config == {"unk_token": "w0", "bos_token": "w1", "eos_token": "w3"}, "no token is null"
    assert options == {"device": "cpu", "compute_type": "float32", "inter_threads": 1, "intra_threads": 2}
    first, second = calls(record, "generate")
    assert first[0] == [["w5", "w6"], ["w5", "w6", "w7"]], "those with the longest output first"
    assert second[0] == [["w4"], ["w4"]]
    assert [one[1]["sampling_topk"] for one in (first, second)] == [1, 0], "several samples are not greedy"
    assert (first[1]["min_length"], first[1]["max_length"]) == (3, 3)
    assert first[1]["static_prompt"] is None


def test_ctranslate2_caches_the_common_prefix(record: Path, spec: LoadSpec) -> None:
    prefix = [9] * 70
    rows = [BenchRow([*prefix, 5, 6], 2), BenchRow([*prefix, 5, 8, 9], 2)]
    with EngineProcess(EngineSource("ctranslate2"), spec) as engine:
        made = engine.generate(rows, {"batch": 8, "static_prompt": 1})
    assert made.outputs == [[7, 8], [10, 11]]
    assert made.counted["prompt_tokens_computed"] == 71 + 1 + 2
    ((prompts, options),) = calls(record, "generate")
    assert prompts == [["w8", "w9"], ["w6"]]
    assert options["static_prompt"] == ["w9"] * 70 + ["w5"]


def test_ctranslate2_has_no_bfloat16_on_a_cpu(record: Path, spec: LoadSpec) -> None:
    with EngineProcess(EngineSource("ctranslate2"), replace(spec, dtype="bfloat16")) as engine:
        assert engine.dtype == "float32"
    assert calls(record, "generator")[0][1]["compute_type"] == "float32"
    message = r"RuntimeError: bfloat16 is not supported on this processor; supported: float32, int8"
    with pytest.raises(EngineFailed, match=message):
        EngineProcess(EngineSource("ctranslate2"), replace(spec, dtype="bfloat16", keep_dtype=True))


# ONNX Runtime GenAI


def test_onnxruntime_genai(record: Path, spec: LoadSpec) -> None:
    with EngineProcess(EngineSource("onnxruntime-genai"), spec) as engine:
        assert [setting["batch"] for setting in engine.settings] == [8, 16, 32, 64, 128, 256]
        made = engine.generate(ROWS, {"batch": 2})
        assert made.outputs == EXPECTED
        assert made.counted == {"prompt_tokens_computed": 2 * 3 + 2, "decode_rows": 2 * 2}
    (built,) = calls(record, "build")
    arguments = built[0]
    assert arguments[:2] == ["-i", spec.model]
    assert arguments[-4:] == ["-p", "fp32", "-e", "cpu"]
    (options,) = calls(record, "model")[0]
    assert options["model"]["decoder"]["session_options"]["intra_op_num_threads"] == 2
    first, second = calls(record, "append")
    assert first[0] == [[5, 6, 0], [5, 6, 7]], "padded on the right"
    assert first[1] == {"batch_size": 2, "do_sample": False, "min_length": 6, "max_length": 6}
    assert second[0] == [[4], [4]]
    assert (second[1]["do_sample"], second[1]["temperature"], second[1]["top_k"]) == (True, 1.0, 0)
    message = "RuntimeError: bfloat16 is not supported on a CPU; supported: float32"
    with pytest.raises(EngineFailed, match=message):
        EngineProcess(EngineSource("onnxruntime-genai"), replace(spec, dtype="bfloat16", keep_dtype=True))
    with EngineProcess(EngineSource("onnxruntime-genai"), replace(spec, dtype="bfloat16")) as engine:
        assert engine.dtype == "float32"
    assert calls(record, "build") == [built], "the float32 model is in the cache"


# llama.cpp


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    build_model(TINY, path)
    return str(path)


@pytest.mark.parametrize("shared", [0, 1])
def test_llama_cpp(record: Path, spec: LoadSpec, tiny: str, shared: int) -> None:
    with EngineProcess(EngineSource("llama.cpp"), replace(spec, model=tiny)) as engine:
        assert (engine.version, engine.dtype, engine.threads) == ("fake-llama", "float32", 2)
        assert {s["batch"] for s in engine.settings if s["shared"] == shared} == {16, 64, 128, 256}
        assert len(distinct_settings(engine.settings, 64)) == 4, "batches larger than all rows are equal"
        made = engine.generate(ROWS, {"batch": 3, "shared": shared, "ubatch": 64})
    assert made.outputs == EXPECTED
    assert made.counted == {"prompt_tokens_computed": 7, "decode_rows": 1 + 2}
    assert "copy" not in record.read_text(), "no common prefix is long enough to share"
    ((context,),) = calls(record, "context")
    assert (context["n_seq_max"], context["n_ubatch"], context["n_threads"]) == (3, 64, 2)
    assert (context["type_k"], context["type_v"]) == (0, 0)
    assert context["n_ctx"] == 3 * 256


def test_llama_cpp_computes_a_shared_prefix_once(record: Path, spec: LoadSpec, tiny: str) -> None:
    root, groups = [9] * 40, ([10] * 40, [11] * 40)
    rows = [BenchRow([*root, *group, i], 2) for i in (5, 4, 3) for group in groups]
    with EngineProcess(EngineSource("llama.cpp"), replace(spec, model=tiny)) as engine:
        made = engine.generate(rows, {"batch": 64, "shared": 1, "ubatch": 64})
        separate = engine.generate(rows, {"batch": 64, "shared": 0, "ubatch": 64})
    assert made.outputs == separate.outputs == [[row.ids[-1] + 1, row.ids[-1] + 2] for row in rows]
    assert made.counted["prompt_tokens_computed"] == 40 + 2 * 40 + 6
    assert separate.counted["prompt_tokens_computed"] == 6 * 81
    assert sorted(end for *_, end in calls(record, "copy")) == [40, 80, 80, 80, 80]


@pytest.mark.parametrize(("slower", "dtype"), [(9.0, "float32"), (1.0, "bfloat16")])
def test_openvino_gets_the_fastest_dtype(
    record: Path, spec: LoadSpec, monkeypatch: pytest.MonkeyPatch, slower: float, dtype: str
) -> None:
    monkeypatch.setattr(peer_tools, "matmul_seconds", {"bfloat16": slower, "float32": 1.0}.__getitem__)
    with EngineProcess(EngineSource("openvino"), replace(spec, dtype="bfloat16")) as engine:
        assert engine.dtype == dtype
    precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    assert {properties["INFERENCE_PRECISION_HINT"] for _, _, properties, _ in calls(record, "pipeline")} == {precision}


@pytest.mark.parametrize(("slower", "dtype"), [(9.0, "float32"), (1.0, "bfloat16")])
def test_llama_cpp_gets_the_fastest_dtype(
    record: Path, spec: LoadSpec, tiny: str, monkeypatch: pytest.MonkeyPatch, slower: float, dtype: str
) -> None:
    """The parent process chooses it, because the peer has no torch."""
    monkeypatch.setattr(peer_tools, "matmul_seconds", {"bfloat16": slower, "float32": 1.0}.__getitem__)
    with EngineProcess(EngineSource("llama.cpp"), replace(spec, model=tiny, dtype="bfloat16")) as engine:
        assert engine.dtype == dtype
    kinds = {kind for name, _, kind, _ in calls(record, "tensor") if "attn_k." in name}
    assert kinds == {{"float32": "F32", "bfloat16": "BF16"}[dtype]}


def test_gguf_of_a_llama(record: Path, spec: LoadSpec, tiny: str) -> None:
    """The file has the right names, shapes and types, and contains every number once."""
    with EngineProcess(EngineSource("llama.cpp"), replace(spec, model=tiny, dtype="bfloat16", keep_dtype=True)):
        pass
    assert calls(record, "family") == [["llama"]]
    tensors = {name: values for name, *values in calls(record, "tensor")}
    weights = load_file(Path(tiny) / "model.safetensors")
    assert len(tensors) == len(weights)
    assert tensors["token_embd.weight"][:2] == [[64, 32], "BF16"]
    assert tensors["blk.1.attn_k.weight"][:2] == [[16, 32], "BF16"]
    assert tensors["blk.0.ffn_norm.weight"][:2] == [[32], "F32"]
    assert sorted(total for *_, total in tensors.values()) == pytest.approx(
        sorted(float(values.double().sum()) for values in weights.values()), abs=1e-3
    )
    for name, value in (("block_count", 2), ("head_count_kv", 2), ("key_length", 8), ("vocab_size", 64)):
        assert calls(record, f"add_{name}") == [[value]]
    (path,) = calls(record, "load")[0]
    assert Path(path).parent.parent == Path(spec.cache)


def test_rows_of_a_projection_are_interleaved(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotating adjacent pairs in the new order equals rotating halves in the old one."""
    monkeypatch.syspath_prepend(str(record.parent / "fakes"))
    writer = runpy.run_path(str(Path(scripts.__file__).with_name("llama_gguf.py")))
    heads, size = 3, 8
    values = np.random.default_rng(0).normal(size=(heads * size, 1))
    angles = np.arange(size // 2) * 0.3
    halves = values.reshape(heads, 2, size // 2)
    rotated = np.stack(
        [halves[:, 0] * np.cos(angles) - halves[:, 1] * np.sin(angles),
         halves[:, 1] * np.cos(angles) + halves[:, 0] * np.sin(angles)], axis=1
    )  # fmt: skip
    pairs = writer["_interleaved"](values, heads).reshape(heads, size // 2, 2)
    neighbours = np.stack(
        [pairs[..., 0] * np.cos(angles) - pairs[..., 1] * np.sin(angles),
         pairs[..., 1] * np.cos(angles) + pairs[..., 0] * np.sin(angles)], axis=-1
    )  # fmt: skip
    expected = writer["_interleaved"](rotated.reshape(-1, 1), heads).reshape(heads, size // 2, 2)
    np.testing.assert_allclose(neighbours, expected)
    with pytest.raises(ValueError, match=r"cannot convert the tensor model.layers.0.mlp.experts.weight"):
        writer["_gguf_name"]("model.layers.0.mlp.experts.weight")
