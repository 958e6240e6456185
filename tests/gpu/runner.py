"""Runs the stages over the registered cases, one at a time, each with its own fate."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from zlib import crc32

import torch

from tests.gpu import machine
from tests.gpu.budget import STAGES, schedule, stage_named
from tests.gpu.compare import Verdict
from tests.gpu.lab import Lab
from tests.gpu.outcomes import Absent, Missing
from tests.gpu.registry import BenchCase, ParityCase, ProofCase, bench_cases, parity_cases, proof_cases
from tests.gpu.report import Check, Measure, Profile, Report
from tests.gpu.shards import Shard, check_in_processes
from tests.gpu.stages import load
from tests.gpu.stages.rates import measure_rates
from tests.gpu.stages.tune import tune
from tests.gpu.under_test import flash_library

__all__ = ["NoDevice", "Options", "run"]


class NoDevice(RuntimeError):
    """There is no CUDA device, and a toy run was not asked for."""


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for."""

    stages: Sequence[str]
    toy: bool
    only: str
    time_limit: float
    commit: str
    flash_library: str
    jobs: int
    shard: str
    """"1/4": the part of the checks that this process was started for; empty: all of them."""


def run(options: Options, save: Callable[[Report], object] = lambda report: None) -> Report:
    """All stages asked for.

    Args:
        options: what was asked for.
        save: called with what is known after each stage, so that a later one that hangs costs no figures.

    Raises:
        NoDevice: there is nothing to run on.
    """
    if not options.toy and not torch.cuda.is_available():
        raise NoDevice("no CUDA device; --toy runs everything at toy sizes on the CPU")
    return _Run(options, save).report


class _Run:
    """One run: the report fills as cases end."""

    def __init__(self, options: Options, save: Callable[[Report], object]) -> None:
        self._options = options
        begin = time.monotonic()
        self._deadlines = {name: begin + end for name, end in schedule(options.stages, options.time_limit).items()}
        self._lost = ""
        self._broken = False
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.jobs))
        device = torch.device("cpu") if options.toy else torch.device("cuda", torch.cuda.current_device())
        self._lab = Lab(device, options.toy, options.flash_library)
        self.report = Report(
            toy=options.toy,
            hardware=machine.hardware(device),
            versions=machine.versions(),
            commit=options.commit or machine.commit(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            stages=list(options.stages),
        )
        load()
        own = {"parity": self._parity, "flash": self._flash, "bench": self._bench, "tune": self._tune}
        with self._models():
            for name in (stage.name for stage in STAGES if stage.name in options.stages):
                self._stage(name, own.get(name))
                save(self.report)

    def _models(self) -> AbstractContextManager[None]:
        """Inside, large models are built aside, if there are stages that need them."""
        needed = {"workloads", "profile", "memory"}.intersection(self._options.stages)
        if self._options.toy or self._options.shard or not needed:
            return nullcontext()
        from tests.gpu.models import built_aside  # here: it needs more of the machine than kernels do

        return built_aside(("0.6b",) if needed == {"memory"} else ("0.6b", "8b", "1b"))

    def _stage(self, name: str, run: Callable[[], None] | None) -> None:
        self._lab.deadline = self._deadlines[name]
        begin = time.monotonic()
        try:
            if run is None:
                self._proofs(name)
            else:
                run()
        except Exception as error:  # as of a device that failed before: what was found by then is told
            self._broken = True
            self.report.withheld.append(f"{name}: {self._told(error)}")
        self.report.seconds[name] = round(time.monotonic() - begin, 2)
        self.report.exit_code = 1 if self.report.failed() or self._broken or self._lost else 0

    def _parity(self) -> None:
        self._check("parity", [c for c in parity_cases(self._options.toy) if c.op != "flash"])

    def _flash(self) -> None:
        cases = [c for c in parity_cases(self._options.toy) if c.op == "flash"]
        try:
            self.report.flash = str(flash_library(self._options.flash_library, self._options.toy))
        except Absent as error:
            self.report.flash = why = str(error)
            absent = [replace(_blank("flash", c), status="absent", note=why) for c in cases if self._wanted(c)]
            self.report.checks += absent
        else:
            self._check("flash", cases)

    def _check(self, stage: str, cases: list[ParityCase]) -> None:
        options = self._options
        cases = [case for case in cases if self._wanted(case)]
        if options.jobs > 1 and not options.toy and not options.shard and len(cases) > 1:
            words = ["--only", options.only, "--flash-library", options.flash_library]
            self.report.checks += check_in_processes(stage, options.jobs, self._lab.left(), words)
            return
        for case in Shard.of(options.shard).take(cases) if options.shard else cases:
            self.report.checks += self._checks(stage, case)

    def _wanted(self, case: ParityCase | BenchCase | ProofCase) -> bool:
        return self._options.only in case.name or self._options.only in case.op

    def _checks(self, stage: str, case: ParityCase) -> list[Check]:
        blank = _blank(stage, case)
        late = self._late()
        if late:
            return [replace(blank, status="unreached", note=late)]
        if self._options.shard:
            print(case.name, flush=True)  # where a process hangs, its log ends with the case it was in
        begin = time.monotonic()
        self._lab.seed(crc32(case.name.encode()))
        try:
            verdicts = case.verdicts(self._lab)
            self._lab.synchronize()
        except Missing as error:
            return [replace(blank, status="missing", note=str(error))]
        except Absent as error:
            return [replace(blank, status="absent", note=str(error))]
        except Exception as error:
            return [replace(blank, status="fail", note=self._told(error))]
        seconds = round((time.monotonic() - begin) / max(1, len(verdicts)), 4)
        return [_held(blank, what, x, seconds) for what, x in verdicts]

    def _proofs(self, name: str) -> None:
        """A stage about whole jobs."""
        stage, left = stage_named(name), self._lab.left()
        if left < stage.least and not self._options.toy:
            why = f"skipped: {max(0.0, left):.0f} s left of its time, it needs {stage.least:.0f} s"
            self.report.withheld.append(f"{name}: {why}")
            if stage.proves:
                self.report.checks.append(Check(name, name, name, "", "", {}, "unreached", note=why))
            return
        if not self._options.toy:
            torch.set_num_threads(os.cpu_count() or 1)
        import_module(f"tests.gpu.stages.{name}")  # here: it needs more of the machine than kernels do
        wrong = sorted({c.stage for c in self.report.failed() if c.status != "unreached"})
        for case in proof_cases(name, self._options.toy):
            if not self._wanted(case):
                continue
            late = self._late() or ("" if stage.proves or not wrong else f"does not hold: {', '.join(wrong)}")
            if late:
                self._fate(stage.proves, case, "unreached", late)
            else:
                self._proof(stage.proves, case)
            self._lab.free()

    def _proof(self, proves: bool, case: ProofCase) -> None:
        checked = "engine" in self._options.stages and not self.report.failed()
        self._lab.seed(crc32(case.name.encode()))
        begin = time.monotonic()
        try:
            for found in case.run(self._lab, **case.shape):
                if isinstance(found, Measure):
                    self.report.measures.append(replace(found, toy=self._options.toy, checked=checked))
                elif isinstance(found, Profile):
                    self.report.profiles.append(replace(found, toy=self._options.toy))
                elif isinstance(found, str):
                    self.report.withheld.append(f"{case.name}: {found}")
                else:
                    seconds = round(time.monotonic() - begin, 4)
                    self.report.checks.append(_held(_blank(case.stage, case), *found, seconds))
                    begin = time.monotonic()
        except Absent as error:
            self._fate(proves, case, "absent", str(error))
        except Exception as error:
            self._broken = True
            self._fate(proves, case, "fail", self._told(error))

    def _fate(self, proves: bool, case: ProofCase, status: str, why: str) -> None:
        """What became of a case that did not run to its end."""
        if proves:
            self.report.checks.append(replace(_blank(case.stage, case), status=status, note=why))
        else:
            self.report.withheld.append(f"{case.name}: {why}")

    def _late(self) -> str:
        if self._lost:
            return f"the device failed before: {self._lost}"
        return "" if self._lab.left() > 0 else f"time limit of {self._options.time_limit:.0f} s"

    def _told(self, error: Exception) -> str:
        """The error in a line, and whether the device lives on: after a fault in a kernel nothing runs any more."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        told = f"{type(error).__name__} at {where.filename.rsplit('/', 1)[-1]}:{where.lineno}: {str(error)[:300]}"
        try:
            self._lab.synchronize()
        except RuntimeError:
            self._lost = told
        return told

    def _bench(self) -> None:
        self.report.rates = measure_rates(self._lab)
        bad = {check.op for check in self.report.failed()}
        checked = "parity" in self._options.stages
        for case in bench_cases(self._options.toy):
            if not self._wanted(case):
                continue
            late = self._late() or (f"parity of {case.op} does not hold" if case.op in bad else "")
            try:
                if late:
                    raise Missing(late)
                self._lab.seed(crc32(case.name.encode()))
                figures = case.figures(self._lab)
                self.report.figures += [replace(x, checked=checked) for x in figures]
            except (Missing, Absent) as error:
                self.report.withheld.append(f"{case.name}: {error}")
            except torch.OutOfMemoryError:
                self.report.withheld.append(f"{case.name}: the device has too little memory")
            except Exception as error:
                self._broken = True
                self.report.withheld.append(f"{case.name}: {self._told(error)}")
            self._lab.free()

    def _tune(self) -> None:
        report = self.report
        driver = report.hardware.get("smi", {}).get("driver_version", "")
        software = ", ".join(f"{name} {number}" for name, number in report.versions.items())
        name = f"{report.hardware['name']}, driver {driver}" if driver else report.hardware["name"]
        source = f"measured on {name}, {software}, commit {report.commit}, {report.date[:10]}"
        report.tuning = tune(self._lab, f"{'TOY ' if report.toy else ''}{source}", self._late)


def _blank(stage: str, case: ParityCase | ProofCase) -> Check:
    dtype = str(case.dtype).removeprefix("torch.") if isinstance(case, ParityCase) else ""
    return Check(stage, case.op, case.name, "", dtype, dict(case.shape), "pass")


def _held(blank: Check, what: str, verdict: Verdict, seconds: float) -> Check:
    return replace(
        blank,
        what=what,
        status="pass" if verdict.passed else "fail",
        error=verdict.error,
        plain=verdict.plain,
        bound=verdict.bound,
        note=verdict.note,
        seconds=seconds,
    )
