"""Parity cases in several processes: kernels compile side by side, and a fault in one leaves the others a device."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.registry import ParityCase
from tests.gpu.report import Check

__all__ = ["Shard", "check_in_processes"]

_GRACE = 30.0
"""Seconds that a process may run past the time limit, for the case it is in, before it counts as hung."""
_TAIL = 400


@dataclass(frozen=True, slots=True)
class Shard:
    """Every `count`-th kind of case from the `index`-th on."""

    index: int = 0
    count: int = 1

    @staticmethod
    def of(words: str) -> Shard:
        """From "1/4", which counts from 0."""
        index, count = (int(word) for word in words.split("/"))
        return Shard(index, count)

    def take(self, cases: Sequence[ParityCase]) -> list[ParityCase]:
        """This shard's cases. Those that compile the same kernels stay together."""
        kinds = list(dict.fromkeys(_kind(case) for case in cases))
        return [case for case in cases if kinds.index(_kind(case)) % self.count == self.index]


def _kind(case: ParityCase) -> tuple[str, str, int | None]:
    return case.op, str(case.dtype), case.shape.get("dim")


def check_in_processes(stage: str, jobs: int, time_limit: float, words: Sequence[str]) -> list[Check]:
    """Run a stage of checks in `jobs` processes of this command, with more `words`, and gather what they found."""
    with tempfile.TemporaryDirectory() as folder:
        running = [_start(Path(folder), stage, Shard(i, jobs), time_limit, words) for i in range(jobs)]
        end = time.monotonic() + time_limit + _GRACE
        return [check for one in running for check in one.checks(max(0.0, end - time.monotonic()))]


@dataclass(frozen=True, slots=True)
class _Running:
    stage: str
    shard: Shard
    process: subprocess.Popen[bytes]
    found: Path
    log: Path

    def checks(self, patience: float) -> list[Check]:
        """What it found, once it has ended."""
        try:
            code = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return [self._lost("hung")]
        if not self.found.exists():
            return [self._lost(f"ended with {code}")]
        return [Check(**check) for check in json.loads(self.found.read_text("utf-8"))["checks"]]

    def _lost(self, why: str) -> Check:
        told = self.log.read_text("utf-8", errors="replace")[-_TAIL:]
        name = f"process {self.shard.index} of {self.shard.count}"
        return Check(self.stage, "process", name, "", "", {}, "fail", note=f"{why}: {told}")


def _start(folder: Path, stage: str, shard: Shard, time_limit: float, words: Sequence[str]) -> _Running:
    found, log = folder / f"{shard.index}.json", folder / f"{shard.index}.log"
    command = [sys.executable, "-m", "tests.gpu", "--stages", stage, "--shard", f"{shard.index}/{shard.count}"]
    command += ["--time-limit", str(time_limit), "--out", str(found), "--commit", "shard"]
    command += ["--jobs", str(shard.count), *words]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=out, stderr=subprocess.STDOUT)
    return _Running(stage, shard, process, found, log)
