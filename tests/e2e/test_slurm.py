"""Jobs on a real Slurm cluster: arrays of shards that are preempted and lose a node, and replicas under srun."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.e2e.processors import PAUSED, PAUSING
from tests.e2e.rows import write_lines
from tests.e2e.runner import run
from tests.e2e.slurm_cluster import Cluster, is_installed

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_installed(), reason="needs slurm-wlm, munge and root")]

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "configs" / "recipes"
ROWS = [
    {"id": f"id {i}", "text": f"Hello {i % 17}", "max_new_tokens": 12 + i % 9, "temperature": 0.7} for i in range(40)
]
OPTIONS = ["--deterministic", "--dtype", "float32", "--commit-every", "2", "--max-num-seqs", "2", *PAUSING]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def job_script(model: Path, folder: Path, array: str, *options: str) -> Path:
    """The recipe's script, for nodes without a GPU, with these tests' options; `batchgen` is in `folder/bin`."""
    text = (RECIPES / "slurm-array.sh").read_text(encoding="utf-8")
    for old, new in (
        ("--array=0-3", f"--array={array}"),
        ("#SBATCH --gpus=1\n", ""),
        ("--cpus-per-task=8", "--cpus-per-task=1"),
        ("--shard auto", " ".join(["--shard auto", *OPTIONS, *options])),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "slurm-array.sh").write_text(text)
    (folder / "rows.jsonl").symlink_to("in.jsonl")
    (folder / "Qwen3-0.6B").symlink_to(model)
    program = folder / "bin" / "batchgen"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m batchgen "$@"\n')
    program.chmod(0o755)
    return folder / "slurm-array.sh"


def submit(cluster: Cluster, folder: Path, *words: str) -> str:
    return cluster.run("sbatch", "--parsable", *words, folder=folder).strip()


def submit_all(cluster: Cluster, folder: Path) -> tuple[str, str]:
    """The array, and the merge that begins when all its tasks have ended well, by the recipe's script."""
    cluster.environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    cluster.environment["PATH"] = f"{folder / 'bin'}:{cluster.environment['PATH']}"
    printed = cluster.run("bash", str(RECIPES / "slurm-submit.sh"), folder=folder)
    array, merge = re.fullmatch(r"array (\d+), merge (\d+)\n", printed).groups()  # type: ignore[union-attr]
    return array, merge


def ended(cluster: Cluster, job: str) -> bool:
    states = {*cluster.jobs(job).values()} or {"COMPLETED"}
    assert not states & {"FAILED", "CANCELLED", "TIMEOUT"}, cluster.run("scontrol", "show", "jobs")[-4000:]
    return states == {"COMPLETED"}


def test_an_array_of_which_a_task_is_preempted_and_a_node_fails(model: Path, tmp_path: Path, cluster: Cluster) -> None:
    rows = [*ROWS, *({"id": f"p {i}", "text": "Hi", **PAUSED} for i in range(4))]
    write_lines(tmp_path / "in.jsonl", rows)
    (tmp_path / "pause").touch()
    job_script(model, tmp_path, "0-3")
    array, merged = submit_all(cluster, tmp_path)
    cluster.until(lambda: (tmp_path / "reached").exists() and [*cluster.jobs(array).values()].count("RUNNING") == 4)
    urgent = submit(cluster, tmp_path, "--partition=high", "--nodelist=n1", "--exclusive", "--wrap", "sleep 3")
    cluster.until(lambda: "PENDING" in cluster.jobs(array).values() and ended(cluster, urgent))
    cluster.fail_node("n2")
    cluster.until(lambda: "down" in cluster.run("sinfo", "-h", "-n", "n2", "-o", "%t"))
    (tmp_path / "pause").unlink()
    cluster.until(lambda: ended(cluster, array))
    cluster.until(lambda: ended(cluster, merged))
    cluster.start_node("n2")
    run(["run", "in.jsonl", "-o", "one.parquet", "--model", model, *OPTIONS], tmp_path)
    columns = [name for name in pq.read_schema(tmp_path / "one.parquet").names if name != "cached_tokens"]
    found, expected = (pq.read_table(tmp_path / name, columns=columns) for name in ("all.parquet", "one.parquet"))
    assert found.equals(expected)
    logs = [path.read_text() for path in tmp_path.glob("batchgen-*.log")]
    assert len(logs) == 4
    assert sum("resumed" in log for log in logs) >= 2, "what was committed before was not computed again"


def test_a_task_that_stops_before_its_limit_is_queued_again(model: Path, tmp_path: Path, cluster: Cluster) -> None:
    write_lines(tmp_path / "in.jsonl", ROWS[:8])
    script = job_script(model, tmp_path, "0-1")
    script.write_text(script.read_text().replace("--max-time 3:50:00", "--max-time ${SLURM_RESTART_COUNT:-0}:00:00"))
    array, merged = submit_all(cluster, tmp_path)
    cluster.until(lambda: ended(cluster, array))
    cluster.until(lambda: ended(cluster, merged))
    assert pq.read_table(tmp_path / "all.parquet")["id"].to_pylist() == [row["id"] for row in ROWS[:8]]
    logs = [path.read_text() for path in tmp_path.glob("batchgen-*.log")]
    assert len(logs) == 2
    for log in logs:
        assert log.index("stopped by --max-time") < log.index("rows      4 (ok 4"), "both runs are in one log"


@pytest.mark.parametrize("form", ["0-3", "1-4", "0-6:2", "0,5,10", "0-3%2"])
def test_every_form_of_an_array(model: Path, tmp_path: Path, cluster: Cluster, form: str) -> None:
    write_lines(tmp_path / "in.jsonl", ROWS[:8])
    job_script(model, tmp_path, form)
    array, merged = submit_all(cluster, tmp_path)
    cluster.until(lambda: ended(cluster, array))
    cluster.until(lambda: ended(cluster, merged))
    assert pq.read_table(tmp_path / "all.parquet")["id"].to_pylist() == [row["id"] for row in ROWS[:8]]


def test_an_array_with_uneven_ids_is_refused(model: Path, tmp_path: Path, cluster: Cluster) -> None:
    write_lines(tmp_path / "in.jsonl", ROWS[:8])
    job_script(model, tmp_path, "0,1,5")
    array, merged = submit_all(cluster, tmp_path)
    cluster.until(lambda: {*cluster.jobs(array).values()} <= {"FAILED"})
    logs = [path.read_text() for path in tmp_path.glob("batchgen-*.log")]
    assert all("evenly spaced" in log for log in logs)
    assert not [*tmp_path.glob("slurm-results/*")]
    cluster.run("scancel", merged)


def test_replicas_as_one_step(model: Path, tmp_path: Path, cluster: Cluster) -> None:
    write_lines(tmp_path / "in.jsonl", ROWS)
    words = [sys.executable, "-m", "batchgen", "run", "in.jsonl", "--model", str(model), *OPTIONS]
    cluster.environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    cluster.run("srun", "-n1", "-c2", *words, "-o", "two.parquet", "--replicas", "2", folder=tmp_path)
    run([*words[3:], "-o", "one.parquet"], tmp_path)
    assert pq.read_table(tmp_path / "two.parquet").equals(pq.read_table(tmp_path / "one.parquet"))
