"""`batchgen bench`: workloads, shapes and floors for GPUs, and transformers' engines with a tiny model on a CPU."""

from __future__ import annotations

import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from batchgen.bench.correctness import gate_rows
from batchgen.bench.engines import engine_batchgen, engine_transformers, engine_transformers_continuous
from batchgen.bench.floors import H200, DeviceRates, Sharing, device_floor
from batchgen.bench.peers import EngineSource
from batchgen.bench.process import EngineFailed, EngineProcess, LoadSpec
from batchgen.bench.shapes import SHAPES, Shape, build_model
from batchgen.bench.workload_defs import GPU_WORKLOADS, WORKLOADS
from batchgen.bench.workloads import BenchRow, Level, Workload
from batchgen.models.load import inspect_model

TINY = Shape(2, 32, 4, 2, 8, 48, 400, context=128, family="qwen3", text=True)
BYTES_OF_POSITION = 2 * 2 * 2 * 8 * 4
"""Bytes per cached position: keys and values of two layers with two heads of 8, in float32."""
ROWS = [BenchRow([5, 6, 7, 8], 3), BenchRow([5, 6, 9], 2, samples=2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    build_model(TINY, path)
    return path


@pytest.mark.parametrize(
    ("workload", "sharing", "concurrency", "known"),
    [
        ("w-nano", "levels", 256, {"0.6b": (36.4, 34.2), "1b": (71.7, 58.1), "8b": (13.7, 10.8)}),
        ("w-prefix", "none", 1024, {"0.6b": (12.6, None), "1b": (17.0, None), "8b": (2.7, None)}),
        ("w-prefix", "cached", 1024, {"0.6b": (17.5, None), "1b": (56.7, None), "8b": (13.4, None)}),
        ("w-prefix", "levels", 1024, {"0.6b": (231, 155), "1b": (206, 167), "8b": (33.5, 28.9)}),
        ("w-tree", "levels", 1024, {"0.6b": (263, None), "1b": (262, None), "8b": (43.6, None)}),
    ],
)
def test_floors_equal_those_of_the_projects_goals(
    workload: str, sharing: Sharing, concurrency: int, known: dict[str, tuple[float, float | None]]
) -> None:
    """Thousands of tokens per second, computed independently; the tolerance covers different rounding of batches."""
    rows = GPU_WORKLOADS[workload].rows(128_256)
    for name, (overlap, serial) in known.items():
        floor = device_floor(rows, SHAPES[name], H200, concurrency, sharing)
        assert floor.overlap / 1e3 == pytest.approx(overlap, rel=0.08)
        if serial is not None:
            assert floor.serial / 1e3 == pytest.approx(serial, rel=0.08)


def test_a_floor_by_hand() -> None:
    """A model of one layer and one head of 2: 8 operations and 8 bytes of attention for a cached position."""
    shape = Shape(layers=1, hidden=2, heads=1, kv_heads=1, head_dim=2, inner=2, vocab=10)
    rates = DeviceRates("slow", 1.0, 1.0)
    layers, head = shape.parameters - 20, 20
    levels = device_floor(ROWS, shape, rates, 3)
    assert levels.output_tokens == 7
    # Segments [5, 6], [7, 8] and [9], read for 3, 3 and 2 steps; outputs attend to 3 earlier outputs and twice to 1.
    assert levels.memory == 3 * 2 * (layers + head) + 8 * (2 * 3 + 2 * 3 + 1 * 2 + 3 + 2)
    assert levels.prefill == 2 * layers * 5 + 8 * (1 + 2 + 3 + 4 + 3)
    assert levels.compute == 2 * (layers + head) * 7 + 8 * (4 * 3 + 2 * 2 * 3 + 3 + 2)
    cached, none = (device_floor(ROWS, shape, rates, 3, sharing) for sharing in ("cached", "none"))
    assert cached.memory == none.memory == 3 * 2 * (layers + head) + 8 * (4 * 3 + 2 * 2 * 3 + 3 + 2)
    assert none.prefill == 2 * layers * 10 + 8 * (10 + 2 * 6)
    assert levels.serial < levels.overlap
    # With one sample at a time each token reads the weights, and each row reads the shared segment.
    alone = device_floor(ROWS, shape, rates, 1)
    assert alone.memory == 7 * 2 * (layers + head) + 8 * (2 * 3 * 3 + 2 * 3 + 1 * 2 * 2 + 3 + 2)


def test_shapes_count_their_parameters(folder: Path) -> None:
    assert SHAPES["0.6b"].parameters == 596_049_920
    assert SHAPES["1b"].parameters == 1_235_814_400
    assert SHAPES["8b"].parameters == 8_030_261_248
    spec = inspect_model(folder, dtype="float32", device="cpu")
    assert (spec.implementation, spec.parameters) == ("native", TINY.parameters)


def test_an_untied_head_is_a_separate_weight(tmp_path: Path) -> None:
    shape = replace(TINY, family="llama", tied=False)
    build_model(shape, tmp_path)
    assert inspect_model(tmp_path, dtype="float32", device="cpu").parameters == shape.parameters
    assert shape.parameters == replace(shape, tied=True).parameters + 400 * 32


def test_text_tokenizers_encode_text(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 400
    assert tokenizer.decode(tokenizer.encode('{"a": 12}').ids) == '{"a": 12}'


def test_gpu_workloads_run_only_if_named() -> None:
    assert not set(GPU_WORKLOADS) & set(WORKLOADS)
    rows = GPU_WORKLOADS["w-tree"].rows(128_256)
    assert (len(rows), rows[0].samples, len(rows[0].ids), rows[0].max_new) == (4096, 4, 1620, 200)
    assert {row.samples for row in gate_rows(rows)} == {1}
    rows = GPU_WORKLOADS["w-nano"].rows(128_256)
    assert len(rows) == 256
    assert sum(row.max_new for row in rows) / 256 == pytest.approx(562, rel=0.05)


@pytest.mark.parametrize("factor", [1.0, 0.5, 0.1, 0.01])
@pytest.mark.parametrize("name", sorted(GPU_WORKLOADS))
def test_a_part_has_about_that_share_of_the_workloads_output(name: str, factor: float) -> None:
    whole = GPU_WORKLOADS[name]
    part, made = whole.part(factor)

    def tokens(workload: Workload) -> float:
        count = workload.samples * sum(workload.output) / 2
        for level in workload.levels:
            count *= level.children
        return count

    assert tokens(part) / tokens(whole) == pytest.approx(made)
    assert made == pytest.approx(factor, rel=0.3)
    assert whole.part(1.0) == (whole, 1.0)


def test_parts_have_fewer_rows_before_they_have_shorter_outputs() -> None:
    part, _ = GPU_WORKLOADS["w-prefix"].part(1 / 8)
    assert (part.levels[-1].children, part.output) == (512, (128, 128))
    part, _ = GPU_WORKLOADS["w-prefix"].part(1 / 32)
    assert (part.levels[-1].children, part.output) == (256, (64, 64))
    part, _ = Workload("toy", "toy", (Level(2, (4, 4)),), (8, 8)).part(1e-9)
    assert (part.levels[-1].children, part.output) == (2, (1, 1))


def test_engines_concatenate_a_rows_samples(folder: Path) -> None:
    spec = LoadSpec(str(folder), "float32", "cpu", 1, {"max_num_seqs": 2})
    rows = [asdict(row) for row in ROWS]
    for module in (engine_batchgen, engine_transformers):
        engine = module.load(asdict(spec))
        outputs, _ = engine.generate(rows, engine.describe()["settings"][0])
        assert [len(ids) for ids in outputs] == [3, 4]


def test_disabling_prefix_groups_changes_no_token(folder: Path) -> None:
    options = {"page_size": 4, "attention": "torch"}  # its prefix groups save time even for few reads
    engine = engine_batchgen.load(asdict(LoadSpec(str(folder), "float32", "cpu", 1, options)))
    rows = [asdict(BenchRow([*range(5, 90), i], 4)) for i in range(12)]
    grouped, flat = (engine.generate(rows, setting) for setting in ({}, {"flat": 1}))
    assert grouped[0] == flat[0]
    assert flat[1]["decode_kv_reads"] == flat[1]["decode_kv_positions"] > grouped[1]["decode_kv_reads"]


def test_batchgen_rows_may_have_fields(folder: Path) -> None:
    engine = engine_batchgen.load(asdict(LoadSpec(str(folder), "float32", "cpu", 1)))
    row = asdict(BenchRow([5, 6], 3, fields={"allowed_token_ids": [9]}))
    assert engine.generate([row], {})[0] == [[9, 9, 9]]


def test_continuous_batching_generates_the_same_tokens(folder: Path) -> None:
    """Greedy, with a different length for each request."""
    request = asdict(LoadSpec(str(folder), "float32", "cpu", torch.get_num_threads()))
    rows = [asdict(row) for row in (BenchRow([5, 6, 7], 3), BenchRow([5, 9], 5))]
    want, _ = engine_transformers.load(request).generate(rows, {"batch": 1})
    engine = engine_transformers_continuous.load(request)
    others = set(threading.enumerate())  # threads of other tests, which may end meanwhile
    assert engine.generate(rows, {})[0] == want
    settings = engine.describe()["settings"]
    assert len(settings) == 2
    for setting in settings:
        engine.warm(rows, setting)  # as before each measured pass
        (begun,) = set(threading.enumerate()) - others
        assert engine.generate(rows, setting)[0] == want
        assert not begun.is_alive()
    assert set(threading.enumerate()) <= others, "a running thread would prevent the process from exiting"


def test_continuous_batching_allocates_blocks_for_all_rows(folder: Path) -> None:
    engine = engine_transformers_continuous.load(asdict(LoadSpec(str(folder), "float32", "cpu", 1)))
    rows = [asdict(BenchRow([5] * 300, 3)), asdict(BenchRow([5], 3, samples=2))]
    small = engine._cpu_config(rows, {"batched_tokens": 1024})
    assert (small.num_blocks, small.max_batch_tokens) == (3 + 2 * 2, 1024)
    large = engine._cpu_config([asdict(BenchRow([5], 1 << 40))], {})
    assert large.num_blocks * large.page_size * BYTES_OF_POSITION <= 4 << 30
    assert large.num_blocks > small.num_blocks


def test_an_engine_is_killed_after_its_lifetime(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    spec = LoadSpec("none", "float32", "cpu", 1)
    with pytest.raises(EngineFailed, match="ended without an answer"):
        EngineProcess(EngineSource("transformers", str(python)), spec, lifetime=0.1)


def test_engines_of_gpus_have_scripts() -> None:
    folder = Path(engine_batchgen.__file__).parent
    for name in ("transformers", "transformers-continuous", "vllm", "batchgen", "baseline"):
        assert (folder / f"{EngineSource(name).script}.py").is_file()
