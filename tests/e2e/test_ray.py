"""`--ray` and `BatchgenStage` on clusters of this machine: processes and nodes that die lose no row and double none."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from tests.e2e.processors import PAUSED, PAUSING
from tests.e2e.runner import run, start
from tests.e2e.test_replicas import FORCED, MODULE, ROWS, command, deadly, table

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes with a processor each."""
    made = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        made.add_node(num_cpus=1)
        made.wait_for_nodes()
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def named(tmp_path: Path) -> list[str]:
    (tmp_path / "deadly_module.py").write_text(MODULE)
    return ["--logit-processor", "deadly=deadly_module:deadly"]


def ray_processes(name: str) -> list[psutil.Process]:
    """Processes of Ray on this machine whose command line begins with a name."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or [""]
        if Path(words[0]).name.startswith(name) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"nothing happened in {seconds} s"
        time.sleep(0.05)


def test_rows_of_a_cluster_are_those_of_one_process(
    cluster: Any, model: Path, tmp_path: Path, named: list[str]
) -> None:
    words = command(model, deadly(tmp_path / "mark", always=False), tmp_path, *named)
    lines = run([*words, "--ray", cluster.address], tmp_path).stderr
    assert "died (" in lines
    assert "another one is started" in lines
    found = table(tmp_path)
    run([*words, "--overwrite"], tmp_path)
    assert found.equals(table(tmp_path))
    assert not ray.is_initialized()


def test_a_row_that_kills_each_process_becomes_an_error_row(
    cluster: Any, model: Path, tmp_path: Path, named: list[str]
) -> None:
    words = command(model, deadly(tmp_path / "mark", always=True), tmp_path, *named)
    run([*words, "--ray", cluster.address], tmp_path)
    rows = table(tmp_path).to_pylist()
    assert [(row["id"], row["error"]["code"]) for row in rows if row["error"]] == [("deadly", "engine_crash")]
    assert len(rows) == len(ROWS) + 1


def test_rows_of_a_node_that_is_removed_are_run_again(cluster: Any, model: Path, tmp_path: Path) -> None:
    words = command(model, [*ROWS, {"id": "p", "text": "Hi", **FORCED, **PAUSED}], tmp_path, *PAUSING)
    (tmp_path / "pause").touch()
    job = start([*words, "--ray", cluster.address], tmp_path)
    job.wait_for(lambda: (tmp_path / "reached").exists())
    cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=False)
    (tmp_path / "pause").unlink()
    done = job.wait()
    assert done.code == 0, done.stderr
    found = table(tmp_path)
    run([*words, "--overwrite"], tmp_path)
    assert found.equals(table(tmp_path))


def test_no_actor_outlives_a_job_that_is_killed(cluster: Any, model: Path, tmp_path: Path) -> None:
    words = command(model, [*ROWS, {"id": "p", "text": "Hi", **FORCED, **PAUSED}], tmp_path, *PAUSING)
    (tmp_path / "pause").touch()
    job = start([*words, "--ray", cluster.address], tmp_path)
    job.wait_for(lambda: (tmp_path / "reached").exists())
    assert ray_processes("ray::_Actor")
    job.signal(signal.SIGKILL)
    wait_for(lambda: not ray_processes("ray::_Actor"))
    (tmp_path / "pause").unlink()
    run([*words, "--ray", cluster.address], tmp_path)
    found = table(tmp_path)
    run([*words, "--overwrite"], tmp_path)
    assert found.equals(table(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_stops_a_job_as_without_ray(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    rows = [{**row, "id": f"{k} {row['id']}", "max_new_tokens": 200} for k in range(10) for row in ROWS]
    words = [*command(model, rows, tmp_path), "--ray", "auto", "--replicas", "2"]
    job = start(words, tmp_path)
    job.wait_for(lambda: any((tmp_path / "out.parquet.work" / "parts").glob("part-*")))
    job.signal(number)
    done = job.wait()
    assert done.code == (75 if number == signal.SIGUSR1 else 128 + number)
    assert done.stderr.splitlines()[-1].startswith(f"error: stopped by {number.name} with ")
    assert "***" not in done.stderr  # Ray's C++ code


def test_a_cluster_that_a_job_starts_ends_with_it(model: Path, tmp_path: Path) -> None:
    words = command(model, [*ROWS, {"id": "p", "text": "Hi", **FORCED, **PAUSED}], tmp_path, *PAUSING)
    before = len(ray_processes("raylet"))
    done = start([*words, "--ray", "auto", "--replicas", "2", "--progress", "none"], tmp_path).wait()
    assert done.code == 0, done.stderr
    assert len(ray_processes("raylet")) == before
    found = table(tmp_path)
    one = run([*words, "--overwrite", "--progress", "none"], tmp_path)
    assert found.equals(table(tmp_path))
    beginnings = [[line.split()[0] for line in each.stderr.splitlines()] for each in (done, one)]
    assert beginnings[0] == beginnings[1]  # nothing of Ray's
    (tmp_path / "pause").touch()
    job = start([*words, "--ray", "auto", "--overwrite"], tmp_path)
    job.wait_for(lambda: (tmp_path / "reached").exists())
    assert len(ray_processes("raylet")) > before
    job.signal(signal.SIGKILL)
    wait_for(lambda: len(ray_processes("raylet")) == before and not ray_processes("ray::_Actor"))


def test_what_is_not_there_is_said_in_one_line(cluster: Any, model: Path, tmp_path: Path) -> None:
    words = command(model, ROWS, tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
        assert "there is no Ray cluster" in run([*words, "--ray", place], tmp_path, expect=2).stderr
    assert "name HOST:PORT of its head node" in run([*words, "--ray", "somewhere"], tmp_path, expect=2).stderr
    lines = run([*words, "--ray", cluster.address, "--replicas", "3"], tmp_path, expect=2).stderr
    assert "`--replicas` 3: the cluster has 2 CPUs" in lines


def test_a_cluster_without_processors_is_refused(model: Path, tmp_path: Path) -> None:
    made = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        lines = run([*command(model, ROWS, tmp_path), "--ray", made.address], tmp_path, expect=2).stderr
        assert "no node of the cluster has a CPU" in lines
    finally:
        ray.shutdown()
        made.shutdown()


def test_a_model_that_a_node_lacks(cluster: Any, model: Path, tmp_path: Path) -> None:
    """The folder is removed before the actors look for it, as on a machine that never had it."""
    own = tmp_path / "own"
    own.symlink_to(model)
    words = command(own, ROWS, tmp_path)
    job = start([*words, "--ray", cluster.address], tmp_path)
    job.wait_for(lambda: (tmp_path / "out.parquet.work").exists())
    own.unlink()
    done = job.wait()
    assert done.code == 6, done.stderr
    assert "on the Ray node " in done.stderr
    assert "Traceback" not in done.stderr


def stage_rows(rows: list[dict[str, Any]]) -> pa.Table:
    """A table whose further columns Ray's default format, or JSON, would change."""
    made = pa.Table.from_pylist([{name: row.get(name) for name in rows[30]} for row in rows])
    numbers = pa.array([None if i % 3 else 2**60 + i for i in range(len(rows))], pa.int64())
    times = pa.array([i * 1_000_000_007 for i in range(len(rows))], pa.timestamp("ns", "Europe/Berlin"))
    nested = pa.array([[{"a": 2**60 + i}] for i in range(len(rows))])
    return made.append_column("number", numbers).append_column("time", times).append_column("nested", nested)


@pytest.fixture
def store() -> Iterator[fs.S3FileSystem]:
    """An object store on this machine with the bucket `bucket`."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    try:
        place = "{}:{}".format(*server.get_host_and_port())
        keys = {"access_key": "a", "secret_key": "b", "region": "us-east-1"}
        made = fs.S3FileSystem(endpoint_override=place, scheme="http", allow_bucket_creation=True, **keys)
        made.create_dir("bucket")
        yield made
    finally:
        server.stop()


def by_id(made: pa.Table) -> pa.Table:
    return made.combine_chunks().sort_by([("id", "ascending"), ("generated_sample_index", "ascending")])


@pytest.mark.filterwarnings("ignore")  # Ray Data warns of what it does itself
@pytest.mark.parametrize("always", [False, True])
def test_a_stage_on_a_cluster_gives_the_rows_of_one_process(
    cluster: Any,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: list[str],
    store: Any,
    always: bool,
) -> None:
    """A worker is killed by a row, once or each time; the results go to an object store."""
    from batchgen.ray import BatchgenStage

    given = stage_rows(deadly(tmp_path / "mark", always=always))
    source = tmp_path / "in.parquet"
    pq.write_table(given, source)
    if not always:
        (tmp_path / "mark").touch()
        run(["run", source, "-o", "out.parquet", "--model", model, *named, "--deterministic", "--dtype", "float32"],
            tmp_path)  # fmt: skip
        (tmp_path / "mark").unlink()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    made = ray.data.from_arrow(given).map_batches(
        BatchgenStage,
        fn_constructor_kwargs={
            "model": str(model), "work_dir": tmp_path / "work", "logit_processor": {"deadly": "deadly_module:deadly"},
            "deterministic": True, "dtype": "float32", "max_num_seqs": 4,
        },
        batch_format="pyarrow", batch_size=10, compute=ray.data.ActorPoolStrategy(size=2),
    )  # fmt: skip
    made.write_parquet(f"bucket/{always}", filesystem=store)
    assert (tmp_path / "mark").exists()
    found = by_id(pq.read_table(f"bucket/{always}", filesystem=store))
    expected = given.sort_by("id").combine_chunks()
    for name in given.column_names:
        assert found[name].equals(expected[name]), name
    errors = {row["id"]: row["generated_error"]["code"] for row in found.to_pylist() if row["generated_error"]}
    assert errors == ({"deadly": "engine_crash"} if always else {})
    if not always:
        one = table(tmp_path).sort_by("id")
        for name in ("text", "finish_reason", "completion_tokens"):
            assert found[f"generated_{name}"].to_pylist() == one[name].to_pylist()
