"""`batchgen bench` with a tiny model: models, peers, the correctness gate and whole runs. Tests no times."""

from __future__ import annotations

import importlib
import io
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pytest
from rich.console import Console

import batchgen
from batchgen.bench.correctness import GateFailed, agreement, check_agreement, check_exact_ids, gate_rows
from batchgen.bench.figures import Spread, ratios
from batchgen.bench.peers import VARIANTS, EngineSource, parse_peers
from batchgen.bench.process import EngineFailed, EngineProcess, Generated, LoadSpec
from batchgen.bench.run import BenchConfig, run_bench
from batchgen.bench.shapes import Shape, build_model, resolve_bench_model
from batchgen.bench.workloads import BenchRow
from batchgen.cli.app import run_command
from batchgen.demo import model_path
from batchgen.errors import UsageError
from batchgen.models.load import inspect_model
from tests.bench.toys import TOY

TINY = Shape(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, inner=48, vocab=64, context=128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    build_model(TINY, path)
    return path


@pytest.fixture
def toy(tmp_path: Path, fast_rates: None) -> str:
    path = tmp_path / "toy.toml"
    path.write_text(TOY)
    return str(path)


# Models


def test_random_model_is_reproducible_and_has_its_shape(tmp_path: Path, folder: Path) -> None:
    build_model(TINY, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    spec = inspect_model(folder, dtype="float32", device="cpu")
    layer = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 48 + 2 * 32
    assert spec.parameters == 64 * 32 + 2 * layer + 32
    assert spec.context_length == 128


def test_random_model_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("batchgen.bench.shapes.SHAPES", {"tiny": TINY})
    first = Path(resolve_bench_model("random:tiny"))
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve_bench_model("random:tiny") == str(first)
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert [p.name for p in first.parent.iterdir()] == [first.name], "no temporary folder is left"
    assert resolve_bench_model("some/folder") == "some/folder"
    assert resolve_bench_model("demo") == str(model_path())
    with pytest.raises(UsageError, match="use one of random:tiny, demo, or"):
        resolve_bench_model("random:7b")


# Peers


def test_peers() -> None:
    assert parse_peers("none") == []
    assert parse_peers("auto") == [EngineSource("transformers", sys.executable)]
    assert parse_peers(f"transformers={sys.executable}") == [EngineSource("transformers", sys.executable)]
    for name, variant in zip(VARIANTS, parse_peers(",".join(VARIANTS)), strict=True):
        assert (variant.name, variant.script) == (name, "engine_batchgen")
    with pytest.raises(UsageError, match=r"unknown peer 'sglan' \(did you mean sglang\?\); known: transformers"):
        parse_peers("sglan")
    with pytest.raises(UsageError, match="given more than once"):
        parse_peers("transformers,transformers")
    with pytest.raises(UsageError, match="cannot run /no/such/python"):
        parse_peers("transformers=/no/such/python")
    with pytest.raises(UsageError, match="a name is missing; known"):
        parse_peers("transformers,")
    with pytest.raises(UsageError, match=r"vllm= must name a Python .*, got the folder /tmp; .* vllm=/tmp/bin/python"):
        parse_peers("vllm=/tmp")
    with pytest.raises(UsageError, match=r"vllm= must name a Python .*, got nothing; .* vllm=ENVIRONMENT/bin/python"):
        parse_peers("vllm=")


def test_peer_not_installed_in_its_python_is_an_error(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # no site-packages
    python.chmod(0o755)
    with pytest.raises(UsageError, match=r"cannot import transformers; install it there, or give --peers tr"):
        parse_peers(f"transformers={python}")


# Figures


def test_spread_and_ratios_are_computed_pair_by_pair() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert ratios([10.0, 20.0, 40.0], [10.0, 10.0, 10.0]) == Spread(2.0, 1.0, 4.0)
    # A slow phase of the machine affects both values of a pair.
    assert ratios([10.0, 1.0, 10.0], [5.0, 0.5, 5.0]) == Spread(2.0, 2.0, 2.0)


# The gate


@dataclass
class Stub:
    """An engine that returns fixed outputs."""

    answers: list[list[int]]
    name: str = "stub"
    version: str = "0"
    dtype: str = "bfloat16"
    device: str = "cpu"
    threads: int = 1
    settings: list[dict[str, int]] = field(default_factory=lambda: [{}])

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        return Generated(self.answers, 1.0, 1.0)


ROWS = [BenchRow([5, 6], 2), BenchRow([7], 2)]
TRUTH = [[1, 2], [3, 4]]


def test_gate_passes_only_on_equal_ids() -> None:
    check_exact_ids("toy", Stub(TRUTH), {}, ROWS, TRUTH)
    for wrong, message in (
        ([[1, 2], [3, 5]], "checked row 1 .1 prompt tokens.: output position 1 is 5, the reference has 4"),
        ([[1], [3, 4]], "output position 1 is missing, the reference has 2"),
        ([[1, 2, 3], [3, 4]], "output position 2 is 3, the reference has missing"),
    ):
        with pytest.raises(GateFailed, match=message):
            check_exact_ids("toy", Stub(wrong), {}, ROWS, TRUTH)


def test_measured_dtype_must_agree_on_a_share_of_first_tokens() -> None:
    truth = [[i, 0] for i in range(8)]
    rows = [BenchRow([5], 2)] * 8
    half = [[i, 9] if i % 2 else [60, 0] for i in range(8)]
    assert agreement(half, truth) == 0.5
    assert check_agreement("toy", Stub(half), {}, rows, truth) == 0.5
    with pytest.raises(GateFailed, match="0% of the first tokens"):
        check_agreement("toy", Stub([[60, 0]] * 8), {}, rows, truth)
    with pytest.raises(GateFailed, match="checked row 0 has 1 new tokens, asked for 2"):
        check_agreement("toy", Stub([[0]] * 8), {}, rows, truth)


def test_gate_rows_are_spread_over_the_workload() -> None:
    rows = [BenchRow([i], 30) for i in range(64)]
    picked = gate_rows(rows)
    assert picked[0].ids == [0]
    assert picked[-1].ids[0] > 48
    assert {row.max_new for row in picked} == {8}
    assert gate_rows(rows[:1]) == [BenchRow([0], 8)]


def test_random_models_output_depends_on_the_whole_prompt(folder: Path) -> None:
    """Otherwise the gate checks nothing: a model that repeats its last token passes with any attention."""
    spec = LoadSpec(str(folder), "float32", "cpu", 1)
    last = [11, 12, 13, 14]
    rows = [BenchRow([start, *last], 6) for start in range(3, 15)]
    outputs = InProcess(EngineSource("batchgen"), spec).generate(rows, {}).outputs
    assert len({tuple(ids) for ids in outputs}) > len(rows) // 2


# Whole runs


def silent_console() -> Console:
    return Console(file=io.StringIO(), width=160)


def console_text(console: Console) -> str:
    """Text written to a `silent_console`."""
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


class InProcess(Stub):
    """An engine loaded in this process, which saves the imports of a separate one."""

    @staticmethod
    @contextmanager
    def start(source: EngineSource, spec: LoadSpec) -> Iterator[InProcess]:
        yield InProcess(source, spec)

    def __init__(self, source: EngineSource, spec: LoadSpec) -> None:
        module = importlib.import_module(f"batchgen.bench.engines.engine_{source.name}")
        self._engine = module.load(asdict(spec))
        super().__init__([], source.name, self._engine.version, **self._engine.describe())

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        outputs, counted = self._engine.generate([asdict(row) for row in rows], setting)
        return Generated(outputs, 1.0, 1.0, counted)


class WrongToken(InProcess):
    """Changes one token of one row."""

    @staticmethod
    @contextmanager
    def start(source: EngineSource, spec: LoadSpec) -> Iterator[InProcess]:
        yield (WrongToken if source.name == "batchgen" else InProcess)(source, spec)

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        result = super().generate(rows, setting)
        result.outputs[1][1] ^= 1
        return result


def test_run_alone(folder: Path, toy: str) -> None:
    lines: list[str] = []
    console = silent_console()
    run_bench(BenchConfig((toy,), str(folder), "none", 2, "float32", "cpu", 1), lines.append, console, InProcess.start)
    figures = [json.loads(line) for line in lines]
    assert [(f["engine"], f["metric"]) for f in figures] == [
        ("batchgen", "output_tokens_per_second"),
        ("batchgen", "output_tokens_per_cpu_second"),
    ]
    first = figures[0]
    assert first["workload"] == "toy"
    assert first["dtype"] == "float32"
    assert first["repeat"] == 2
    assert first["ratio"] == {}
    assert first["min"] <= first["value"] <= first["max"]
    counted = first["counted"]
    assert counted["prompt_tokens_computed"] == counted["distinct_prompt_tokens"] < counted["prompt_tokens"]
    assert counted["decode_rows"] == counted["output_tokens"] - 2
    assert first["threads"] == 1
    assert first["cpu"]
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "batchgen equals the reference in float32" in text
    assert "toy" in text.splitlines()[-1]


@pytest.mark.slow
def test_run_with_transformers_as_peer(folder: Path, toy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the command: stdout contains JSON lines only."""
    arguments = ["bench", toy, "--model", str(folder), "--peers", "transformers", "--repeat", "1", "--cpu-threads", "1"]
    arguments += ["--dtype", "bfloat16", "--peer-dtype", "asked", "--device", "cpu"]
    assert run_command(arguments) == 0
    captured = capsys.readouterr()
    figures = [json.loads(line) for line in captured.out.splitlines()]
    assert [f["engine"] for f in figures] == ["batchgen", "batchgen", "transformers", "transformers"]
    assert {f["dtype"] for f in figures} == {"bfloat16"}
    assert set(figures[0]["ratio"]) == {"transformers"}
    assert figures[0]["ratio"]["transformers"]["median"] == pytest.approx(1 / figures[2]["ratio"]["batchgen"]["median"])
    assert figures[2]["setting"] == {"batch": 8}, "two rows fill no larger batch"
    peer = figures[2]["counted"]
    assert peer["prompt_tokens_computed"] >= peer["prompt_tokens"]
    assert 0 <= figures[0]["agreement"] <= 1
    assert "transformers" in captured.err


def test_wrong_ids_fail_the_run_without_figures(folder: Path, toy: str) -> None:
    lines: list[str] = []
    config = BenchConfig((toy,), str(folder), "none", 1, "float32", "cpu", 1)
    with pytest.raises(GateFailed, match=r"batchgen on toy in float32, checked row 1 .* output position 1 is") as red:
        run_bench(config, lines.append, silent_console(), WrongToken.start)
    assert lines == []
    assert red.value.exit_code == 1


def test_rows_longer_than_the_context_are_an_error(folder: Path) -> None:
    with pytest.raises(UsageError, match="shared-prefix has rows of up to 1088 tokens, the model's context is 128"):
        run_bench(BenchConfig(("shared-prefix",), str(folder)), print, silent_console())


def test_engine_process_reports_the_engines_errors(tmp_path: Path, folder: Path) -> None:
    spec = LoadSpec(str(tmp_path / "none"), "float32", "cpu", 1)
    with pytest.raises(EngineFailed, match=r"batchgen failed at load: ModelError: There is no model folder"):
        EngineProcess(EngineSource("batchgen"), spec)
    with pytest.raises(EngineFailed, match="cannot start"):
        EngineProcess(EngineSource("batchgen", str(tmp_path / "python")), spec)
    with pytest.raises(EngineFailed, match="ended without an answer"):
        EngineProcess(EngineSource("batchgen", "/bin/false"), spec)
    with EngineProcess(EngineSource("batchgen"), replace(spec, model=str(folder))) as engine:
        with pytest.raises(EngineFailed, match="batchgen failed at generate: RuntimeError: row 0"):
            engine.generate([BenchRow([99], 1)], {})
        assert len(engine.generate([BenchRow([9], 1)], {}).outputs[0]) == 1, "the process survives the error"


def test_baseline_runs_another_checkout(tmp_path: Path, folder: Path) -> None:
    """The other checkout's modules run in a separate process, driven by this version."""
    root = tmp_path / "older"
    shutil.copytree(Path(batchgen.__file__).parent, root / "batchgen", ignore=shutil.ignore_patterns("__pycache__"))
    init = root / "batchgen" / "__init__.py"
    init.write_text(init.read_text().replace(f'"{batchgen.__version__}"', '"0.0.9"'))
    (source,) = parse_peers(f"baseline={root}")
    with EngineProcess(source, LoadSpec(str(folder), "float32", "cpu", 1)) as engine:
        assert (engine.name, engine.version) == ("baseline", "0.0.9")
        assert len(engine.generate([BenchRow([9], 2)], {}).outputs[0]) == 2
    for wrong in ("baseline", f"baseline={tmp_path}"):
        with pytest.raises(UsageError, match="baseline=FOLDER"):
            parse_peers(wrong)


def test_command_line_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["nothing"], "unknown workload 'nothing'"),
        (["plan", "uniqe"], "unknown workload 'uniqe' (did you mean unique?)"),
        (["strtup"], "did you mean startup?"),
        (["plan", "--plan-size", "many"], "--plan-size must be ROWSxTOKENS"),
        (["job", "--cpu-threads", "1"], "--cpu-threads has no effect on job, which run no engines; leave it out"),
        (["plan", "startup", "--model", "random:5m"], "--model has no effect on plan and startup"),
        (["startup", "--dtype", "bfloat16"], "--dtype has no effect on startup"),
        (["plan", "--repeat", "3"], "--repeat has no effect on plan, which is measured once; leave it out"),
        (["job", "--plan-size", "9x9"], "--plan-size has no effect on job; only workload plan uses it; leave it out"),
        (["--plan-size", "9x9"], "--plan-size has no effect on the default workloads"),
        (["--peers", "unknown"], "unknown peer 'unknown'"),
        (["--model", "random:1t"], "unknown random model"),
        (["--dtype", "int3"], "dtype"),
        (["--repeat", "0"], "--repeat"),
    ):
        assert run_command(["bench", "--peers", "none", *arguments]) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.out == ""
