"""One job by one process, replicas, shards, Ray and Slurm: `python -m tests.e2e.scale` runs each undisturbed, then with
something killed, and prints a JSON line for each way: wall seconds, and whether the rows equal those of one process.

Ray and Slurm are really started on this machine; a way whose programs are not installed is left out, and said so.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pyarrow.parquet as pq

from batchgen.bench.jobs.commands import write_rows
from batchgen.bench.jobs.eta import random_rows
from batchgen.bench.machine import machine
from batchgen.bench.shapes import resolve_bench_model
from tests.e2e.slurm_cluster import Cluster, is_installed

ROOT: Final = Path(__file__).parents[2]
OPTIONS: Final = ("--deterministic", "--dtype", "float32", "--device", "cpu", "--progress", "json")
SHARDS: Final = 4
_SCRIPT: Final = """#!/bin/bash
#SBATCH --array=0-{last} --requeue --open-mode=append --cpus-per-task=1 --output=log-%a.txt
exec {command} -o shards --shard auto --cpu-threads 1
"""


@dataclass
class Job:
    """The job in a folder, and its command without an output."""

    folder: Path
    rows: int
    words: tuple[str, ...]
    began: float = field(default_factory=time.monotonic)
    """When it began; a cluster is started before."""

    def start(self, *options: str, log: str = "log.txt") -> subprocess.Popen[bytes]:
        """Start the command with `options`, whose progress goes to a file."""
        with (self.folder / log).open("ab") as stream:
            return subprocess.Popen([*self.words, *options], cwd=self.folder, stderr=stream, env=environment())

    def reach(self, share: float, *logs: str) -> None:
        """Wait until a share of the rows is done in one of the logs, of the rows that it is about."""
        while True:
            for log in logs or ("log.txt",):
                with suppress(OSError, ValueError, KeyError, IndexError, TypeError):
                    line = json.loads((self.folder / log).read_text().strip().splitlines()[-1])
                    if line["phase"] == "generating" and line["rows_done"] >= share * line["rows"]:
                        return
            time.sleep(0.05)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def end(process: subprocess.Popen[bytes], expect: int = 0) -> None:
    code = process.wait()
    if code != expect:
        raise RuntimeError(f"{process.args} ended with {code}")


def one_process(job: Job, killed: bool) -> str:
    """The command, killed half way and given again."""
    if killed:
        first = job.start("-o", "out.parquet", "--commit-every", "16")
        job.reach(0.5)
        first.kill()
        end(first, -signal.SIGKILL)
    end(job.start("-o", "out.parquet", "--commit-every", "16"))
    return "the process, half way; the same command again"


def replicas(job: Job, killed: bool) -> str:
    """Two replicas, of which one is killed."""
    process = job.start("-o", "out.parquet", "--replicas", "2")
    if killed:
        job.reach(0.4)
        found = [each for each in psutil.Process(process.pid).children() if "replica" in " ".join(each.cmdline())]
        found[0].kill()
    end(process)
    return "a replica"


def shards(job: Job, killed: bool) -> str:
    """Four shards, two at a time, of which one is killed half way and given again; then `merge`."""

    def start(index: int) -> subprocess.Popen[bytes]:
        words = ("-o", "shards", "--shard", f"{index}/{SHARDS}", "--cpu-threads", "1", "--commit-every", "16")
        return job.start(*words, log=f"log-{index}.txt")

    waiting, running = [*range(SHARDS)], dict[int, subprocess.Popen[bytes]]()
    while waiting or running:
        while waiting and len(running) < 2:
            index = waiting.pop(0)
            running[index] = start(index)
        if killed:
            job.reach(0.5, "log-0.txt", "log-1.txt")
            running[1].kill()
            end(running.pop(1), -signal.SIGKILL)
            waiting.insert(0, 1)
            killed = False
        for index, process in [*running.items()]:
            if process.poll() is not None:
                end(running.pop(index))
        time.sleep(0.05)
    subprocess.run(
        [*job.words[:3], "merge", "shards", "-o", "out.parquet"], cwd=job.folder, env=environment(), check=True
    )
    return "a shard, half way; its command again"


def on_ray(job: Job, killed: bool) -> str:
    """A local Ray cluster of two nodes, of which one worker is killed."""
    from ray.cluster_utils import Cluster as RayCluster

    cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        job.began = time.monotonic()
        process = job.start("-o", "out.parquet", "--ray", cluster.address)
        if killed:
            job.reach(0.4)
            named = (each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"])
            next(each for each in named if each.info["cmdline"][0].startswith("ray::_Actor")).kill()
        end(process)
    finally:
        cluster.shutdown()
    return "a worker"


def on_slurm(job: Job, killed: bool) -> str:
    """An array of four tasks on two nodes, of which one fails and comes back; `merge` depends on the array."""
    script = _SCRIPT.format(last=SHARDS - 1, command=" ".join((*job.words, "--commit-every", "16")))
    (job.folder / "job.sh").write_text(script)
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder,
        Cluster(Path(folder)) as cluster,
    ):
        job.began = time.monotonic()
        export = f"--export=ALL,PYTHONPATH={ROOT},HF_HUB_OFFLINE=1"
        array = cluster.run("sbatch", "--parsable", export, "job.sh", folder=job.folder).strip()
        merge = " ".join([*job.words[:3], "merge", "shards", "-o", "out.parquet"])
        after = f"--dependency=afterok:{array}"
        last = cluster.run("sbatch", "--parsable", export, after, "--wrap", merge, folder=job.folder).strip()
        if killed:
            job.reach(0.5, *(f"log-{index}.txt" for index in range(SHARDS)))
            cluster.fail_node("n2")
            cluster.until(lambda: "down" in cluster.run("sinfo", "-h", "-n", "n2", "-o", "%t"))
            cluster.start_node("n2")
        cluster.until(lambda: not {"PENDING", "RUNNING", "COMPLETING"} & {*cluster.jobs(last).values()}, 900)
    return "a node with two tasks, which comes back"


WAYS: Final[dict[str, Callable[[Job, bool], str]]] = {
    "one process": one_process,
    "2 replicas": replicas,
    "4 shards, two at a time": shards,
    "Ray, 2 workers": on_ray,
    "Slurm, array of 4 on 2 nodes": on_slurm,
}


def missing(way: str) -> str | None:
    """What a way lacks on this machine."""
    if way.startswith("Ray"):
        try:
            import ray.cluster_utils  # noqa: F401
        except ImportError:
            return "ray"
    return "slurm-wlm, munge and root" if way.startswith("Slurm") and not is_installed() else None


@contextmanager
def new_job(model: str, rows: Sequence[Any]) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="batchgen-scale-") as name:
        folder = Path(name)
        write_rows(folder / "in.jsonl", rows)
        words = (sys.executable, "-m", "batchgen", "run", "in.jsonl", "--model", model, *OPTIONS)
        yield Job(folder, len(rows), words)


def main(words: Sequence[str]) -> int:
    """Run all ways that can be run."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.scale", description=__doc__)
    parser.add_argument("ways", nargs="*", default=[*WAYS], metavar="WAY", help=f"{', '.join(WAYS)}; all by default")
    parser.add_argument("--model", default="random:135m")
    parser.add_argument("--rows", type=int, default=160)
    given = parser.parse_args(words)
    model = resolve_bench_model(given.model)
    rows = list(random_rows(given.rows, (32, 256), (32, 128))(np.random.default_rng(0)))
    expected = None
    for way in ["one process", *(way for way in given.ways if way != "one process")]:
        if lacking := missing(way):
            print(f"{way}: left out, needs {lacking}", file=sys.stderr)
            continue
        seconds, equal, what = [], [], ""
        for killed in (False, True):
            with new_job(model, rows) as job:
                with redirect_stdout(sys.stderr):  # Ray prints what it sees
                    what = WAYS[way](job, killed)
                seconds.append(round(time.monotonic() - job.began, 1))
                table = pq.read_table(job.folder / "out.parquet").drop_columns(["cached_tokens"])
                expected = table if expected is None else expected
                equal.append(table.equals(expected))
        line = {"workload": "scale", "way": way, "model": given.model, "rows": len(rows), "seconds": seconds[0]}
        line |= {"equal": equal[0], "killed": what, "seconds_killed": seconds[1], "equal_killed": equal[1]}
        print(json.dumps({**line, **machine()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
