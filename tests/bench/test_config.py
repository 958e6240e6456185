"""`batchgen bench --config`: options of a file, and the command's flags over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.bench.config import ENGINELESS_WORKLOADS, BenchConfig, bench_config
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
    assert bench_config({}, path).peers == "none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = 3", "`model in .*bench.toml` must be MODEL, got 3"),
        ("repeat = true", "`repeat in .*` must be N, got True"),
        ("workloads = [1]", "`workloads in .*` must be NAME, got 1"),
        ("threads = 2", r"unknown key `threads` \(did you mean cpu_threads\?\); known: workloads, model"),
        ('repeat = "three"', "`repeat in .*` must be a whole number, got 'three'"),
        ("model", "is not valid TOML"),
        ("timeout = nan", "`timeout in .*` must be a duration such as .*, got 'nan'"),
        ("timeout = inf", "`timeout in .*` must be .*, got .inf"),
        ("repeat = 0", "`repeat in .*` must be .*, got 0"),
        ("cpu_threads = 0", "`cpu_threads in .*` must be .*, got 0"),
        ('peer_dtype = "float32"', "`peer_dtype in .*` must be one of best, asked; got 'float32'"),
    ],
)
def test_errors_name_the_wrong_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bench.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        bench_config({}, path)
    with pytest.raises(UsageError, match="--config: cannot read"):
        bench_config({}, tmp_path / "none.toml")


@pytest.mark.parametrize("path", sorted(RUNS.glob("*.toml")), ids=lambda path: path.stem)
def test_published_run_files_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RUNS.parents[2])  # paths in the files are relative to the repository root
    config = bench_config({}, path)
    assert f"configs/bench/runs/{path.name}" in path.read_text(encoding="utf-8").splitlines()[0]
    find_workloads([name for name in config.workloads if name not in ENGINELESS_WORKLOADS])
    assert config.model == DEMO or config.model.removeprefix(RANDOM) in SHAPES
    assert set(config.peers.split(",")) <= {"auto", "none", *VARIANTS, *PEERS}
