"""`batchgen bench`: the gate of special rows on real engines at toy size, and that peers draw their samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest

from batchgen.job.bench.adapters import adapter_folders, merge_adapter
from batchgen.job.bench.engines import engine_batchgen, engine_transformers, engine_transformers_continuous
from batchgen.job.bench.named import MORE_WORKLOADS
from batchgen.job.bench.process import Generated, LoadSpec
from batchgen.job.bench.shapes import Shape, build_model
from batchgen.job.bench.special import check_adapted, check_fields, check_samples, returned_counts
from batchgen.job.bench.workloads import AdapterSet, BenchRow
from batchgen.text.tokenizer import Tokenizer

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
