"""`batchgen bench --config`: options of a file, and the command's flags over them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchgen.bench import command
from batchgen.bench.config import ENGINELESS_WORKLOADS, BenchConfig, bench_config, load_bench
from batchgen.bench.process import PEERS, VARIANTS, EngineFailed
from batchgen.bench.results import StoredFigures
from batchgen.bench.shapes import DEMO, RANDOM, SHAPES
from batchgen.bench.workload_defs import find_workloads
from batchgen.cli.app import run_command
from batchgen.errors import UsageError

RUNS = Path(__file__).parents[2] / "configs" / "bench" / "runs"
FILE = """\
workloads = ["unique", "logprobs"]
model = "random:5m"
peers = ["transformers", "vllm"]
cpu_threads = 2
timeout = 5
"""


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bench.toml"
    path.write_text(FILE)
    loaded = BenchConfig(("unique", "logprobs"), "random:5m", "transformers,vllm", cpu_threads=2, timeout=5)
    assert bench_config({}, path) == loaded
    given = {"workloads": ("demo",), "peers": "none", "repeat": 2, "cpu_threads": None, "model": None}
    assert bench_config(given, path) == BenchConfig(("demo",), "random:5m", "none", 2, cpu_threads=2, timeout=5)
    assert bench_config({}, None) == BenchConfig()
    path.write_text("peers = []")
    assert load_bench(path).peers == "none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = 3", "`model` has the wrong type, got 3"),
        ("repeat = true", "`repeat` has the wrong type"),
        ("workloads = [1]", "`workloads` must be a list of texts"),
        ('workloads = "unique"', "`workloads` has the wrong type"),
        ("threads = 2", r"unknown key `threads` \(did you mean cpu_threads\?\); known: workloads, model"),
        ('repeat = "3"', "`repeat` has the wrong type, got '3'; it must be a whole number"),
        ("model", "is not valid TOML"),
        ("timeout = nan", "--timeout must be at least 1, got nan"),
        ("timeout = inf", "--timeout must be finite, got inf"),
        ("repeat = 0", "--repeat must be at least 1, got 0"),
        ("cpu_threads = 0", "--cpu-threads must be at least 1"),
        ('peer_dtype = "float32"', "--peer-dtype must be best or asked, got 'float32'"),
    ],
)
def test_errors_name_the_wrong_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bench.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        bench_config({}, path)
    with pytest.raises(UsageError, match="--config: cannot read"):
        load_bench(tmp_path / "none.toml")


@pytest.mark.parametrize("path", sorted(RUNS.glob("*.toml")), ids=lambda path: path.stem)
def test_published_run_files_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RUNS.parents[2])  # paths in the files are relative to the repository root
    config = load_bench(path)
    assert f"configs/bench/runs/{path.name}" in path.read_text(encoding="utf-8").splitlines()[0]
    find_workloads([name for name in config.workloads if name not in ENGINELESS_WORKLOADS])
    assert config.model == DEMO or config.model.removeprefix(RANDOM) in SHAPES
    assert set(config.peers.split(",")) <= {"auto", "none", *VARIANTS, *PEERS}


def test_the_command_merges_flags_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[BenchConfig] = []
    monkeypatch.setattr(command, "run_command", lambda config, emit, console: configs.append(config))
    path = tmp_path / "bench.toml"
    path.write_text(FILE)
    arguments = ["bench", "unique", "--config", str(path), "--repeat", "3", "--chart", "x.png", "--plan-size", "9x9"]
    assert run_command(arguments) == 0
    base = BenchConfig(("unique",), "random:5m", "transformers,vllm", cpu_threads=2, timeout=5)
    assert configs == [replace(base, repeat=3, chart=Path("x.png"), plan_size="9x9")]
    assert run_command(["bench", "--tuned", "a.jsonl", "--device", "cpu", "--dtype", "float32", "--timeout", "9"]) == 0
    assert configs[1] == BenchConfig(tuned=Path("a.jsonl"), device="cpu", dtype="float32", timeout=9)


def test_a_failed_run_draws_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[StoredFigures] = []
    monkeypatch.setattr(command, "check_chart", lambda path, bars: None)
    monkeypatch.setattr(command, "write_chart", lambda path, stored: drawn.append(stored))

    def fails(*_: object) -> None:
        raise EngineFailed("batchgen fell over")

    monkeypatch.setattr("batchgen.bench.jobs.planning.plan_lines", lambda size: [{"workload": "plan"}])
    monkeypatch.setattr("batchgen.bench.run.run_bench", fails)
    arguments = ["bench", "plan", "unique", "--plan-size", "40x8", "--peers", "none", "--chart", "x.png"]
    assert run_command(arguments) == 1
    captured = capsys.readouterr()
    assert "batchgen fell over" in captured.err
    assert captured.out == '{"workload": "plan"}\n'
    assert [stored.others for stored in drawn] == [[{"workload": "plan"}]]
