"""Runs parity cases in several processes: kernels compile in parallel, and a kernel fault ends only one process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.registry import Case
from tests.gpu.report import Check

_GRACE = 30.0
"""Seconds past the time limit after which a process counts as hung."""
_TAIL = 400
"""Characters of the end of a failed process's log to report."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of the cases: every `count`-th kind of case from the `index`-th on."""

    index: int = 0
    count: int = 1

    @staticmethod
    def of(words: str) -> Shard:
        """The shard written as "1/4", counted from 0."""
        index, count = (int(word) for word in words.split("/"))
        return Shard(index, count)

    def select(self, cases: Sequence[Case]) -> list[Case]:
        """The shard's cases. Cases that compile the same kernels are in one shard."""
        kinds = list(dict.fromkeys(_kind(case) for case in cases))
        return [case for case in cases if kinds.index(_kind(case)) % self.count == self.index]


def _kind(case: Case) -> tuple[str, str, int | None]:
    return case.op, str(case.dtype), case.shape.get("dim")


def check_in_processes(stage: str, jobs: int, time_limit: float, words: Sequence[str]) -> list[Check]:
    """Run a stage of checks in `jobs` processes of this command, with the further arguments `words`."""
    with tempfile.TemporaryDirectory() as folder:
        running = [_start(Path(folder), stage, Shard(i, jobs), time_limit, words) for i in range(jobs)]
        end = time.monotonic() + time_limit + _GRACE
        return [check for one in running for check in one.checks(max(0.0, end - time.monotonic()))]


@dataclass(frozen=True, slots=True)
class _Running:
    """A process that runs one shard."""

    stage: str
    shard: Shard
    process: subprocess.Popen[bytes]
    found: Path
    log: Path

    def checks(self, seconds: float) -> list[Check]:
        """Wait at most `seconds` for the process to end; return its checks."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return [self._failed("hung")]
        if not self.found.exists():
            return [self._failed(f"ended with {code}")]
        return [Check(**check) for check in json.loads(self.found.read_text("utf-8"))["checks"]]

    def _failed(self, why: str) -> Check:
        tail = self.log.read_text("utf-8", errors="replace")[-_TAIL:]
        name = f"process {self.shard.index} of {self.shard.count}"
        return Check(self.stage, "process", name, "", "", {}, "fail", note=f"{why}: {tail}")


def _start(folder: Path, stage: str, shard: Shard, time_limit: float, words: Sequence[str]) -> _Running:
    found, log = folder / f"{shard.index}.json", folder / f"{shard.index}.log"
    command = [sys.executable, "-m", "tests.gpu", "--stages", stage, "--shard", f"{shard.index}/{shard.count}"]
    command += ["--time-limit", str(time_limit), "--out", str(found), "--commit", "shard"]
    command += ["--jobs", str(shard.count), *words]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=out, stderr=subprocess.STDOUT)
    return _Running(stage, shard, process, found, log)
