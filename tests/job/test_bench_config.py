"""`batchgen bench --config`: options of a file, and the command's flags over them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchgen.cli.app import run_command
from batchgen.errors import UsageError
from batchgen.job.bench import command
from batchgen.job.bench.config import ALONE, BenchConfig, bench_config, load_bench
from batchgen.job.bench.definitions import find_workloads
from batchgen.job.bench.peers import PEERS, VARIANTS
from batchgen.job.bench.process import EngineFailed
from batchgen.job.bench.shapes import DEMO, RANDOM, SHAPES

RUNS = Path(__file__).parents[2] / "configs" / "bench" / "runs"
FILE = """\
workloads = ["unique", "logprobs"]
model = "random:5m"
peers = ["transformers", "vllm"]
cpu_threads = 2
timeout = 5
"""


def test_flags_take_the_place_of_what_a_file_says(tmp_path: Path) -> None:
    path = tmp_path / "bench.toml"
    path.write_text(FILE)
    loaded = BenchConfig(("unique", "logprobs"), "random:5m", "transformers,vllm", threads=2, timeout=5)
    assert bench_config({}, path) == loaded
    given = {"workloads": ("demo",), "peers": "none", "repeat": 2, "threads": None, "model": None}
    assert bench_config(given, path) == BenchConfig(("demo",), "random:5m", "none", 2, threads=2, timeout=5)
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
        ('repeat = "3"', "`repeat` has the wrong type, got '3'; it takes a whole number"),
        ("model", "is not TOML"),
        ("timeout = nan", "--timeout must be at least 1, got nan"),
        ("timeout = inf", "--timeout must be finite, got inf"),
        ("repeat = 0", "--repeat must be at least 1, got 0"),
        ("cpu_threads = 0", "--cpu-threads must be at least 1"),
        ('peer_dtype = "float32"', "--peer-dtype must be best or asked, got 'float32'"),
    ],
)
def test_wrong_files_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bench.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        bench_config({}, path)
    with pytest.raises(UsageError, match="--config: cannot read"):
        load_bench(tmp_path / "none.toml")


@pytest.mark.parametrize("path", sorted(RUNS.glob("*.toml")), ids=lambda path: path.stem)
def test_runs_of_the_readmes_figures_can_be_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RUNS.parents[2])  # where the README's commands run
    config = load_bench(path)
    assert f"configs/bench/runs/{path.name}" in path.read_text(encoding="utf-8").splitlines()[0]
    find_workloads([name for name in config.workloads if name not in ALONE])
    assert config.model == DEMO or config.model.removeprefix(RANDOM) in SHAPES
    assert set(config.peers.split(",")) <= {"auto", "none", *VARIANTS, *PEERS}


def test_the_command_resolves_its_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[BenchConfig] = []
    monkeypatch.setattr(command, "run_command", lambda config, emit, console: seen.append(config))
    path = tmp_path / "bench.toml"
    path.write_text(FILE)
    arguments = ["bench", "unique", "--config", str(path), "--repeat", "3", "--chart", "x.html", "--plan-size", "9x9"]
    assert run_command(arguments) == 0
    kept = BenchConfig(("unique",), "random:5m", "transformers,vllm", threads=2, timeout=5)
    assert seen == [replace(kept, repeat=3, chart=Path("x.html"), plan_size="9x9")]
    assert run_command(["bench", "--from", "x.jsonl", "--config", str(path)]) == 2
    assert "only --chart has a meaning" in capsys.readouterr().err


def test_a_chart_of_what_no_engine_ran_has_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.html"
    assert run_command(["bench", "plan", "--plan-size", "40x8", "--chart", str(out)]) == 0
    assert capsys.readouterr().out.count("\n") == 5
    assert out.read_text(encoding="utf-8").count("<tr>") == 6


def test_a_run_that_ends_early_draws_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise EngineFailed("batchgen fell over")

    monkeypatch.setattr("batchgen.job.bench.run.run_bench", fails)
    out = tmp_path / "plan.html"
    arguments = ["bench", "plan", "unique", "--plan-size", "40x8", "--peers", "none", "--chart", str(out)]
    assert run_command(arguments) == 1
    captured = capsys.readouterr()
    assert "batchgen fell over" in captured.err
    assert captured.out.count("\n") == 5
    assert out.read_text(encoding="utf-8").count("<tr>") == 6


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--peers", "vlm"], "unknown peer 'vlm' (did you mean vllm?)"),
        (["--peers", "deterministic=/x"], "deterministic is this batchgen with other options and takes no Python"),
        (["--peers", "none", "--tuned", "none.jsonl"], "--tuned: cannot read none.jsonl"),
        (["--peers", "none", "--timeout", "inf"], "--timeout must be finite, got inf"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: list[str], problem: str
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("batchgen.job.bench.planning.run_plan_bench", never)
    assert run_command(["bench", "plan", "unique", *more]) == 2
    assert problem in " ".join(capsys.readouterr().err.split())
