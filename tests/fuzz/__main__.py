"""`python -m tests.fuzz NAME... [--seconds S | --inputs N] [--seed K] [--jobs J]`: fuzz, and print what was found.

Each fuzzer runs in processes that are watched: one that dies, hangs or takes too much memory is ended, its
input is kept as a failure, and another one goes on. Failures, found inputs and counts are below `--folder`.
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
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import psutil

from tests.fuzz.fuzzer import MODULES, SCRATCH
from tests.fuzz.record import State, read_record
from tests.fuzz.worker import Task

HANG_SECONDS = 10.0
"""Most processor time of one input."""
_WAIT_SECONDS = 60.0
"""Most time of one input by the clock, without the time in which its process waited for a processor."""
MAX_BYTES = 3 << 29
"""Most memory of a process beyond that before its first input."""
_POLL = 0.25
_FOLDER = Path.home() / ".cache" / "batchgen-fuzz"


@dataclass(slots=True)
class Watched:
    """A running worker."""

    task: Task
    process: subprocess.Popen[bytes]
    ps: psutil.Process
    since: float = 0.0
    """Start of the input that was in work when its processor time was noted."""
    cpu: float = 0.0
    queued: float = 0.0
    """Time that it had waited for a processor until then, in seconds."""
    peak: int = 0
    """Most memory beyond the base, in bytes."""

    def problem(self, state: State) -> str | None:
        """Why the worker must be ended; None if nothing is wrong."""
        try:
            with self.ps.oneshot():
                times, memory = self.ps.cpu_times(), self.ps.memory_info().rss
        except psutil.Error:
            return None
        queued = _queued_seconds(self.process.pid)
        used = times.user + times.system + times.children_user + times.children_system
        if state.since != self.since:
            self.since, self.cpu, self.queued = state.since, used, queued
        if state.since and used - self.cpu > HANG_SECONDS:
            return f"hang: more than {HANG_SECONDS:.0f} s of processor time"
        if state.since and time.monotonic() - state.since - (queued - self.queued) > _WAIT_SECONDS:
            return f"hang: more than {_WAIT_SECONDS:.0f} s"
        if state.base_bytes:
            self.peak = max(self.peak, memory - state.base_bytes)
            if self.peak > MAX_BYTES:
                return f"memory: {self.peak >> 20} MiB"
        return None


def _queued_seconds(pid: int) -> float:
    """Time that a process has waited for a processor; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def start(task: Task) -> Watched:
    """Start a worker."""
    log = (Path(task.folder) / f"log-{task.seed}").open("ab")
    with log:
        process = subprocess.Popen([sys.executable, "-m", "tests.fuzz.worker", task.as_json()], stdout=log, stderr=log)
    return Watched(task, process, psutil.Process(process.pid))


def keep_failure(task: Task, state: State, problem: str) -> None:
    """Store the input that a worker had in work."""
    folder = Path(task.folder) / "failures"
    name = folder / f"{problem.partition(':')[0].replace(' ', '-')}-{int(time.time() * 1000)}"
    name.with_suffix(".txt").write_text(f"{problem}\n")
    name.with_suffix(".bin").write_bytes(state.data)


class Supervisor:
    """Runs tasks until they are done, and counts."""

    def __init__(self, tasks: list[Task]) -> None:
        self.running = {task.seed: start(task) for task in tasks}
        self._began = time.monotonic()
        self._stopped = False
        self.peak = 0
        self.ended_early = 0

    def stop(self, number: int, frame: FrameType | None) -> None:
        """End all workers; what they counted stays."""
        self._stopped = True

    def run(self) -> None:
        """Watch the workers until all are done."""
        while self.running and not self._stopped:
            time.sleep(_POLL)
            for key, one in [*self.running.items()]:
                self._watch(key, one)
        for one in self.running.values():
            one.process.terminate()
            one.process.wait()

    def _watch(self, key: int, one: Watched) -> None:
        code = one.process.poll()
        state = read_record(one.task.record) if one.task.record.exists() else State(0, 0, 0, 0.0, b"")
        problem = one.problem(state) if code is None else None
        self.peak = max(self.peak, one.peak)
        if problem is not None:
            one.process.send_signal(signal.SIGUSR2)  # its stack goes to the log
            time.sleep(0.2)
            one.process.kill()
            one.process.wait()
        elif code is None:
            return
        elif code == 0 or (one.task.guided and not state.since):  # libFuzzer ends with 77 whatever the exit status
            del self.running[key]
            return
        else:
            problem = f"end: the process ended with {code}"
        self.ended_early += 1
        keep_failure(one.task, state, problem)
        del self.running[key]
        seconds, inputs = one.task.seconds - (time.monotonic() - self._began), one.task.inputs - state.inputs
        if seconds > 0 and state.inputs and (inputs > 0 or not one.task.inputs):
            seed = key + 1000
            self.running[seed] = start(replace(one.task, seed=seed, seconds=seconds, inputs=max(0, inputs)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"fuzzers, all by default: {', '.join(MODULES)}")
    parser.add_argument("--seconds", type=float, default=60.0, help="time of each fuzzer")
    parser.add_argument("--inputs", type=int, default=0, help="most inputs of each process")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first process of each fuzzer")
    parser.add_argument("--jobs", type=int, default=1, help="processes of each fuzzer")
    parser.add_argument("--plain", action="store_true", help="do not use atheris")
    parser.add_argument("--shallow", action="store_true", help="leave out the checks that run an engine")
    parser.add_argument("--folder", type=Path, default=_FOLDER, help="receives failures, found inputs and counts")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in MODULES and find_spec(f"tests.fuzz.{name}") is None]
    if unknown:
        parser.error(f"no fuzzer {', '.join(unknown)}; there are {', '.join(MODULES)}")
    return given


def fuzz(name: str, given: argparse.Namespace) -> int:
    """Run one fuzzer; the number of its failures of different kinds."""
    folder = given.folder / name
    (folder / "failures").mkdir(parents=True, exist_ok=True)
    guided = not given.plain and find_spec("atheris") is not None
    began = time.monotonic()
    seeds = range(given.seed, given.seed + given.jobs)
    tasks = [
        Task(name, str(folder), seed, given.seconds, given.inputs, guided, os.getpid(), given.shallow) for seed in seeds
    ]
    for old in folder.glob(f"record-{os.getpid()}-*"):
        old.unlink()
    work = Supervisor(tasks)
    signal.signal(signal.SIGTERM, work.stop)
    signal.signal(signal.SIGINT, work.stop)
    work.run()
    states = [read_record(path) for path in folder.glob(f"record-{os.getpid()}-*")]
    seconds, inputs = time.monotonic() - began, sum(state.inputs for state in states)
    failed = sum(state.failures for state in states) + work.ended_early
    kinds = len(list((folder / "failures").glob("*.bin")))
    line = {
        "fuzzer": name,
        "guided": guided,
        "seed": given.seed,
        "inputs": inputs,
        "seconds": round(seconds, 1),
        "failures": failed,
        "ended_processes": work.ended_early,
        "peak_mib": work.peak >> 20,
    }
    with (given.folder / "counts.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    rate = inputs / max(seconds, 1e-9)
    print(
        f"{name}: {inputs:,} inputs, {rate:,.0f}/s, {failed} failures, {work.peak >> 20} MiB; {kinds} kinds kept",
        flush=True,
    )
    return failed


def main() -> int:
    given = _arguments()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="batchgen-fuzz-", dir=memory if memory.is_dir() else None) as scratch:
        os.environ[SCRATCH] = scratch  # workers that are ended leave files there
        return 1 if sum([fuzz(name, given) for name in given.names or MODULES]) else 0


if __name__ == "__main__":
    sys.exit(main())
