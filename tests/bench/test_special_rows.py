"""`batchgen bench`: special rows on real engines with a tiny model, and sampling of peers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

from batchgen.bench.adapters import adapter_folders, merge_adapter
from batchgen.bench.command import run_command
from batchgen.bench.correctness import GateFailed, check_adapter, check_fields, check_samples, returned_counts
from batchgen.bench.engines import engine_batchgen, engine_transformers, engine_transformers_continuous, peer_tools
from batchgen.bench.peers import EngineSource
from batchgen.bench.process import EngineFailed, EngineProcess, Generated, LoadSpec
from batchgen.bench.run import BenchConfig, run_bench
from batchgen.bench.shapes import Shape, build_model
from batchgen.bench.workload_defs import MORE_WORKLOADS
from batchgen.bench.workloads import AdapterSet, BenchRow
from batchgen.text.tokenizer import Tokenizer
from tests.bench.test_bench import InProcess, console_text, silent_console
from tests.bench.toys import TOY

TEXT = Shape(2, 32, 4, 2, 8, 48, 400, context=128, text=True)
ROWS = [BenchRow([7, 11, 300 + i], 12) for i in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text")
    build_model(TEXT, path)
    return path


class InProcessEngine:
    """An engine loaded in this process."""

    version, device, threads, dtype = "0", "cpu", 1, "float32"

    def __init__(self, module: ModuleType, folder: Path, **options: object) -> None:
        self.name = module.__name__.rpartition("_")[2]
        self._engine = module.load(asdict(LoadSpec(str(folder), "float32", "cpu", 1, options)))
        self.settings: list[dict[str, int]] = self._engine.describe()["settings"]

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        outputs, counted = self._engine.generate([asdict(row) for row in rows], dict(setting))
        return Generated(outputs, 1.0, 1.0, counted)


@pytest.mark.parametrize("name", ["json-constrained", "logprobs", "hidden-states"])
def test_special_rows_of_batchgen_pass_the_gate(folder: Path, name: str) -> None:
    workload = MORE_WORKLOADS[name]
    rows = [replace(row, fields=workload.fields if i % workload.every == 0 else {}) for i, row in enumerate(ROWS)]
    engine = InProcessEngine(engine_batchgen, folder)
    check_fields(name, engine, {}, rows, Tokenizer.load(folder))
    found = engine.generate(rows, {})
    assert [len(ids) for ids in found.outputs] == [12] * 4, "constrained rows keep their length"
    expected = {"logprobs": {"top_logprobs": 20 * 48}, "hidden-states": {"output_states": 48}}.get(name, {})
    assert returned_counts(rows, found.outputs) == expected


@pytest.mark.parametrize(
    ("module", "replays"),
    [(engine_batchgen, True), (engine_transformers, False), (engine_transformers_continuous, False)],
)
def test_engines_generate_different_samples(folder: Path, module: ModuleType, replays: bool) -> None:
    engine = InProcessEngine(module, folder)
    check_samples("toy", engine, engine.settings[0], [replace(row, samples=3) for row in ROWS[:2]], replays=replays)
    (greedy,) = engine.generate(ROWS[:1], engine.settings[0]).outputs
    assert engine.generate(ROWS[:1], engine.settings[0]).outputs == [greedy], "rows of one sample are still greedy"


def test_rows_of_an_adapter_equal_those_of_the_merged_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pairs = adapter_folders(str(folder), AdapterSet(2))
    merge_adapter(str(folder), pairs[1][1], tmp_path)
    bare, merged = (
        InProcessEngine(engine_transformers, path).generate(ROWS, {"batch": 1}).outputs for path in (folder, tmp_path)
    )
    rows = [replace(row, fields={"lora_path": pairs[1][0]}) for row in ROWS]
    check_adapter("toy", InProcessEngine(engine_batchgen, folder, lora=pairs), {}, rows, merged, bare)


# Whole runs

SPECIAL_TOY = TOY + "\n[fields]\nreturn_logprob = true\ntop_logprobs_num = 3\n"
ADAPTED_TOY = TOY.replace('"toy"', '"adapted"') + "\n[adapters]\ncount = 2\nrank = 2\n"
SAMPLED_TOY = TOY.replace('"toy"', '"sampled"\nsamples = 2')


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast_rates: None) -> tuple[str, ...]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paths = []
    for number, text in enumerate((ADAPTED_TOY, SPECIAL_TOY, SAMPLED_TOY)):
        paths.append(tmp_path / f"{number}.toml")
        paths[-1].write_text(text)
    return tuple(map(str, paths))


class RecordingEngine(InProcess):
    """Engine that records what it loads and runs."""

    seen: ClassVar[list[tuple[str, str, bool, int]]] = []
    """(engine, dtype, whether adapters are loaded, samples of the first row of each pass)"""

    @staticmethod
    @contextmanager
    def start(source: EngineSource, spec: LoadSpec) -> Iterator[RecordingEngine]:
        engine = RecordingEngine(source, spec)
        engine.adapted = "lora" in spec.options
        yield engine

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        RecordingEngine.seen.append((self.name, self.dtype, self.adapted, rows[0].samples))
        return super().generate(rows, setting)


def test_peers_get_the_dtype_that_pytorch_multiplies_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peer_tools.matmul_seconds("bfloat16") > 0
    seconds = {"bfloat16": 2.5, "float32": 1.0}
    monkeypatch.setattr(peer_tools, "matmul_seconds", seconds.__getitem__)

    def chosen(dtype: str, device: str, *, keep: bool = False) -> str:
        return peer_tools.fastest_dtype(asdict(LoadSpec("none", dtype, device, 1, keep_dtype=keep)))

    assert chosen("bfloat16", "cpu") == "float32"
    assert chosen("bfloat16", "cpu", keep=True) == "bfloat16"
    assert chosen("bfloat16", "cuda") == "bfloat16"
    assert chosen("float32", "cpu") == "float32"
    seconds["bfloat16"] = 1.5
    assert chosen("bfloat16", "cpu") == "float32"
    seconds["bfloat16"] = 1.2
    assert chosen("bfloat16", "cpu") == "bfloat16"


@pytest.mark.parametrize("module", [engine_transformers, engine_transformers_continuous])
def test_transformers_loads_that_dtype(folder: Path, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fastest_dtype", lambda request: "bfloat16")
    assert module.load(asdict(LoadSpec(str(folder), "float32", "cpu", 1))).describe()["dtype"] == "bfloat16"


def test_special_workloads_run_with_and_without_their_fields(
    folder: Path, toys: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_transformers, "fastest_dtype", lambda request: request["dtype"])  # otherwise measured
    lines: list[str] = []
    RecordingEngine.seen.clear()
    console = silent_console()
    chart = tmp_path / "toys.html"
    config = BenchConfig(toys, str(folder), "transformers", 2, "bfloat16", "cpu", 1, chart=chart)
    run_command(config, lines.append, console, RecordingEngine.start)
    figures = [json.loads(line) for line in lines]
    rates = [(f["workload"], f["engine"]) for f in figures if f["metric"] == "output_tokens_per_second"]
    assert rates == [
        ("toy", "batchgen"),
        ("sampled", "batchgen"),
        ("sampled", "transformers"),
        ("adapted", "batchgen"),
    ], "transformers does not run rows that it does not support; adapters come last, in separate processes"
    console_output = console_text(console)
    for name in ("toy", "adapted"):
        assert console_output.count(f"left out: transformers of {name}: its script does not support") == 2, (
            "when it is skipped, and after the table"
        )
    assert "transformers of sampled" not in console_output
    reasons = {f["workload"]: f["reason"] for f in figures if f["metric"] == "left_out"}
    assert reasons.keys() == {"toy", "adapted"}
    assert reasons["adapted"].endswith("does not support lora_path")
    slower = [(f["workload"], f["engine"], f["value"]) for f in figures if f["metric"] == "slowdown"]
    assert slower == [("toy", "batchgen", 0.0), ("adapted", "batchgen", 0.0)], (
        "every pass of this engine takes a second"
    )
    measured = {(name, adapted) for name, dtype, adapted, _ in RecordingEngine.seen if dtype == "bfloat16"}
    assert measured == {("batchgen", False), ("transformers", False), ("batchgen", True)}
    counted = {f["workload"]: f["counted"] for f in figures if f["engine"] == "batchgen"}
    assert counted["toy"]["top_logprobs"] == 3 * counted["toy"]["output_tokens"]
    assert counted["sampled"]["output_tokens"] == 2 * counted["toy"]["output_tokens"]
    assert counted["adapted"]["distinct_prompt_tokens"] == counted["adapted"]["prompt_tokens"]
    page = chart.read_text(encoding="utf-8")
    assert re.findall(r">(\S+ %)<", page) == ["0.0 %", "0.0 %"], "slowdowns of toy and adapted only"
    assert "adapted" in page


class WithoutLogprobs(InProcess):
    """Engine that returns no logprobs."""

    @staticmethod
    @contextmanager
    def start(source: EngineSource, spec: LoadSpec) -> Iterator[InProcess]:
        yield WithoutLogprobs(source, spec)

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        found = super().generate(rows, setting)
        return replace(found, counted={k: v for k, v in found.counted.items() if k != "top_logprobs"})


def test_missing_logprobs_fail_the_run_without_figures(folder: Path, toys: tuple[str, ...]) -> None:
    lines: list[str] = []
    config = BenchConfig(toys[1:2], str(folder), "none", 1, "float32", "cpu", 1)
    with pytest.raises(GateFailed, match="batchgen on toy in float32: None top logprobs came back, not"):
        run_bench(config, lines.append, silent_console(), WithoutLogprobs.start)
    assert lines == []


def test_every_engine_gets_the_same_threads(tmp_path: Path) -> None:
    """The environment variables for the number of threads are set independently of this process's."""
    python = tmp_path / "python"
    recorded = tmp_path / "environment"
    python.write_text(f"#!/bin/sh\nenv > {recorded}\n")
    python.chmod(0o755)
    with pytest.raises(EngineFailed):
        EngineProcess(EngineSource("vllm", str(python)), LoadSpec("none", "float32", "cpu", 3))
    found = dict(line.partition("=")[::2] for line in recorded.read_text().splitlines())
    assert {name for name, value in found.items() if name.endswith("_THREADS") and value == "3"} >= {
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "RAYON_NUM_THREADS",
    }
