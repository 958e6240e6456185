"""`batchgen bench`: the gate of special rows on real engines at toy size, and that peers draw their samples."""

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

from batchgen.job.bench.adapters import adapter_folders, merge_adapter
from batchgen.job.bench.command import run_command
from batchgen.job.bench.engines import engine_batchgen, engine_transformers, engine_transformers_continuous, peer_tools
from batchgen.job.bench.gate import GateRed
from batchgen.job.bench.named import MORE_WORKLOADS
from batchgen.job.bench.peers import EngineSource
from batchgen.job.bench.process import EngineFailed, EngineProcess, Generated, LoadSpec
from batchgen.job.bench.run import BenchConfig, run_bench
from batchgen.job.bench.shapes import Shape, build_model
from batchgen.job.bench.special import check_adapted, check_fields, check_samples, returned_counts
from batchgen.job.bench.workloads import AdapterSet, BenchRow
from batchgen.text.tokenizer import Tokenizer
from tests.job.bench_toys import TOY
from tests.job.test_bench import InProcess, quiet, said

TEXT = Shape(2, 32, 4, 2, 8, 48, 400, context=128, text=True)
ROWS = [BenchRow([7, 11, 300 + i], 12) for i in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text")
    build_model(TEXT, path)
    return path


class Here:
    """The engine that a process would hold."""

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
    engine = Here(engine_batchgen, folder)
    check_fields(name, engine, {}, rows, Tokenizer.load(folder))
    found = engine.generate(rows, {})
    assert [len(ids) for ids in found.outputs] == [12] * 4, "constrained rows keep their length"
    expected = {"logprobs": {"top_logprobs": 20 * 48}, "hidden-states": {"output_states": 48}}.get(name, {})
    assert returned_counts(rows, found.outputs) == expected


@pytest.mark.parametrize(
    ("module", "replays"),
    [(engine_batchgen, True), (engine_transformers, False), (engine_transformers_continuous, False)],
)
def test_engines_draw_their_samples(folder: Path, module: ModuleType, replays: bool) -> None:
    engine = Here(module, folder)
    check_samples("toy", engine, engine.settings[0], [replace(row, samples=3) for row in ROWS[:2]], replays=replays)
    (greedy,) = engine.generate(ROWS[:1], engine.settings[0]).outputs
    assert engine.generate(ROWS[:1], engine.settings[0]).outputs == [greedy], "rows of one sample are greedy again"


def test_an_adapters_rows_are_those_of_the_merged_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pairs = adapter_folders(str(folder), AdapterSet(2))
    merge_adapter(str(folder), pairs[1][1], tmp_path)
    bare, merged = (Here(engine_transformers, path).generate(ROWS, {"batch": 1}).outputs for path in (folder, tmp_path))
    rows = [replace(row, fields={"lora_path": pairs[1][0]}) for row in ROWS]
    check_adapted("toy", Here(engine_batchgen, folder, lora=pairs), {}, rows, merged, bare)


# Whole runs

SPECIAL_TOY = TOY + "\n[fields]\nreturn_logprob = true\ntop_logprobs_num = 3\n"
ADAPTED_TOY = TOY.replace('"toy"', '"adapted"') + "\n[adapters]\ncount = 2\nrank = 2\n"
SAMPLED_TOY = TOY.replace('"toy"', '"sampled"\nsamples = 2')


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hasty: None) -> tuple[str, ...]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paths = []
    for number, text in enumerate((ADAPTED_TOY, SPECIAL_TOY, SAMPLED_TOY)):
        paths.append(tmp_path / f"{number}.toml")
        paths[-1].write_text(text)
    return tuple(map(str, paths))


class Loads(InProcess):
    """Writes down what each engine loads and runs."""

    seen: ClassVar[list[tuple[str, str, bool, int]]] = []
    """(engine, dtype, whether adapters are loaded, samples of the first row of each pass)"""

    @staticmethod
    @contextmanager
    def start(source: EngineSource, spec: LoadSpec) -> Iterator[Loads]:
        engine = Loads(source, spec)
        engine.adapted = "lora" in spec.options
        yield engine

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        Loads.seen.append((self.name, self.dtype, self.adapted, rows[0].samples))
        return super().generate(rows, setting)


def test_peers_are_given_the_format_that_pytorch_multiplies_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peer_tools.product_seconds("bfloat16") > 0
    took = {"bfloat16": 2.5, "float32": 1.0}
    monkeypatch.setattr(peer_tools, "product_seconds", took.__getitem__)

    def taken(dtype: str, device: str, *, keep: bool = False) -> str:
        return peer_tools.at_its_best(asdict(LoadSpec("none", dtype, device, 1, keep_dtype=keep)))

    assert taken("bfloat16", "cpu") == "float32"
    assert taken("bfloat16", "cpu", keep=True) == "bfloat16"
    assert taken("bfloat16", "cuda") == "bfloat16"
    assert taken("float32", "cpu") == "float32"
    took["bfloat16"] = 1.5
    assert taken("bfloat16", "cpu") == "float32"
    took["bfloat16"] = 1.2
    assert taken("bfloat16", "cpu") == "bfloat16"


@pytest.mark.parametrize("module", [engine_transformers, engine_transformers_continuous])
def test_transformers_takes_that_format(folder: Path, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "at_its_best", lambda request: "bfloat16")
    assert module.load(asdict(LoadSpec(str(folder), "float32", "cpu", 1))).describe()["dtype"] == "bfloat16"


def test_special_workloads_run_beside_their_plain_rows(
    folder: Path, toys: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_transformers, "at_its_best", lambda request: request["dtype"])  # else by a clock
    lines: list[str] = []
    Loads.seen.clear()
    console = quiet()
    chart = tmp_path / "toys.html"
    config = BenchConfig(toys, str(folder), "transformers", 2, "bfloat16", "cpu", 1, chart=chart)
    run_command(config, lines.append, console, Loads.start)
    figures = [json.loads(line) for line in lines]
    rates = [(f["workload"], f["engine"]) for f in figures if f["metric"] == "output_tokens_per_second"]
    assert rates == [
        ("toy", "batchgen"),
        ("sampled", "batchgen"),
        ("sampled", "transformers"),
        ("adapted", "batchgen"),
    ], "transformers is not asked for what it is not known to give; adapters come last, in processes of their own"
    told = said(console)
    for name in ("toy", "adapted"):
        assert told.count(f"left out: transformers of {name}: its script does not ask it for") == 2, (
            "at once, and again"
        )
    assert "transformers of sampled" not in told
    left = {f["workload"]: f["reason"] for f in figures if f["metric"] == "left_out"}
    assert left.keys() == {"toy", "adapted"}
    assert left["adapted"].endswith("ask it for lora_path")
    slower = [(f["workload"], f["engine"], f["value"]) for f in figures if f["metric"] == "slowdown"]
    assert slower == [("toy", "batchgen", 0.0), ("adapted", "batchgen", 0.0)], "every pass takes a second here"
    measured = {(name, adapted) for name, dtype, adapted, _ in Loads.seen if dtype == "bfloat16"}
    assert measured == {("batchgen", False), ("transformers", False), ("batchgen", True)}
    counted = {f["workload"]: f["counted"] for f in figures if f["engine"] == "batchgen"}
    assert counted["toy"]["top_logprobs"] == 3 * counted["toy"]["output_tokens"]
    assert counted["sampled"]["output_tokens"] == 2 * counted["toy"]["output_tokens"]
    assert counted["adapted"]["distinct_prompt_tokens"] == counted["adapted"]["prompt_tokens"]
    drawn = chart.read_text(encoding="utf-8")
    assert re.findall(r">(\S+ %)<", drawn) == ["0.0 %", "0.0 %"], "of toy and adapted, and of nothing else"
    assert "adapted" in drawn


class Deaf(InProcess):
    """Returns no logprobs."""

    @staticmethod
    @contextmanager
    def start(source: EngineSource, spec: LoadSpec) -> Iterator[InProcess]:
        yield Deaf(source, spec)

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        found = super().generate(rows, setting)
        return replace(found, counted={k: v for k, v in found.counted.items() if k != "top_logprobs"})


def test_no_figure_of_special_rows_that_give_too_little(folder: Path, toys: tuple[str, ...]) -> None:
    lines: list[str] = []
    config = BenchConfig(toys[1:2], str(folder), "none", 1, "float32", "cpu", 1)
    with pytest.raises(GateRed, match="batchgen on toy in float32: None top logprobs came back, not"):
        run_bench(config, lines.append, quiet(), Deaf.start)
    assert lines == []


def test_every_engine_gets_the_same_threads(tmp_path: Path) -> None:
    """What libraries read their number of threads from is set for a process whatever this one's says."""
    python = tmp_path / "python"
    told = tmp_path / "told"
    python.write_text(f"#!/bin/sh\nenv > {told}\n")
    python.chmod(0o755)
    with pytest.raises(EngineFailed):
        EngineProcess(EngineSource("vllm", str(python)), LoadSpec("none", "float32", "cpu", 3))
    found = dict(line.partition("=")[::2] for line in told.read_text().splitlines())
    assert {name for name, value in found.items() if name.endswith("_THREADS") and value == "3"} >= {
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "RAYON_NUM_THREADS",
    }
