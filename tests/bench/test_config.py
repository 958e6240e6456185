"""`batchgen bench --config`: options of a file, and the command's flags over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.bench.config import ENGINELESS_WORKLOADS, BenchConfig, bench_config, load_bench
from batchgen.bench.process import PEERS, VARIANTS
from batchgen.bench.shapes import DEMO, RANDOM, SHAPES
from batchgen.bench.workloads import find_workloads
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
