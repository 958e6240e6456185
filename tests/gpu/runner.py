"""Runs the registered cases of the stages one at a time and collects the report."""

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
from tests.gpu.registry import BenchCase, JobCase, ParityCase, bench_cases, job_cases, parity_cases
from tests.gpu.report import Check, Measure, Profile, Report
from tests.gpu.shards import Shard, check_in_processes
from tests.gpu.stages import load
from tests.gpu.stages.rates import measure_rates
from tests.gpu.stages.tune import tune
from tests.gpu.under_test import flash_library

__all__ = ["NoDevice", "Options", "run"]


class NoDevice(RuntimeError):
    """No CUDA device, in a run without `--toy`."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line."""

    stages: Sequence[str]
    toy: bool
    only: str
    time_limit: float
    commit: str
    flash_library: str
    jobs: int
    shard: str
    """"1/4": the part of the checks that this process runs; empty: all of them."""


def run(options: Options, save: Callable[[Report], object] = lambda report: None) -> Report:
    """Run all requested stages.

    Args:
        options: options of the command line.
        save: called with the report after each stage, so that a later stage that hangs loses no figures.

    Raises:
        NoDevice: there is no CUDA device.
    """
    if not options.toy and not torch.cuda.is_available():
        raise NoDevice("no CUDA device; --toy runs everything at toy sizes on the CPU")
    return _Run(options, save).report


class _Run:
    """One run, which fills its report as cases end."""

    def __init__(self, options: Options, save: Callable[[Report], object]) -> None:
        self._options = options
        begin = time.monotonic()
        self._deadlines = {name: begin + end for name, end in schedule(options.stages, options.time_limit).items()}
        self._device_error = ""
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
        kernel_stages = {"parity": self._parity, "flash": self._flash, "bench": self._bench, "tune": self._tune}
        with self._models():
            for name in (stage.name for stage in STAGES if stage.name in options.stages):
                self._stage(name, kernel_stages.get(name))
                save(self.report)

    def _models(self) -> AbstractContextManager[None]:
        """Inside, another process builds the large models that the stages need."""
        needed = {"workloads", "profile", "memory"}.intersection(self._options.stages)
        if self._options.toy or self._options.shard or not needed:
            return nullcontext()
        from tests.gpu.models import built_in_background  # imported late: it needs more packages than kernels

        return built_in_background(("0.6b",) if needed == {"memory"} else ("0.6b", "8b", "1b"))

    def _stage(self, name: str, run: Callable[[], None] | None) -> None:
        self._lab.deadline = self._deadlines[name]
        begin = time.monotonic()
        try:
            if run is None:
                self._job_stage(name)
            else:
                run()
        except Exception as error:  # such as a device that failed before: report what was found so far
            self._broken = True
            self.report.withheld.append(f"{name}: {self._describe(error)}")
        self.report.seconds[name] = round(time.monotonic() - begin, 2)
        self.report.exit_code = 1 if self.report.failed() or self._broken or self._device_error else 0

    def _parity(self) -> None:
        self._check("parity", [c for c in parity_cases(self._options.toy) if c.op != "flash"])

    def _flash(self) -> None:
        cases = [c for c in parity_cases(self._options.toy) if c.op == "flash"]
        try:
            self.report.flash = str(flash_library(self._options.flash_library, self._options.toy))
        except Absent as error:
            self.report.flash = why = str(error)
            absent = [replace(_blank("flash", c), status="absent", note=why) for c in cases if self._selected(c)]
            self.report.checks += absent
        else:
            self._check("flash", cases)

    def _check(self, stage: str, cases: list[ParityCase]) -> None:
        options = self._options
        cases = [case for case in cases if self._selected(case)]
        if options.jobs > 1 and not options.toy and not options.shard and len(cases) > 1:
            words = ["--only", options.only, "--flash-library", options.flash_library]
            self.report.checks += check_in_processes(stage, options.jobs, self._lab.left(), words)
            return
        for case in Shard.of(options.shard).select(cases) if options.shard else cases:
            self.report.checks += self._checks(stage, case)

    def _selected(self, case: ParityCase | BenchCase | JobCase) -> bool:
        return self._options.only in case.name or self._options.only in case.op

    def _checks(self, stage: str, case: ParityCase) -> list[Check]:
        blank = _blank(stage, case)
        reason = self._stop_reason()
        if reason:
            return [replace(blank, status="unreached", note=reason)]
        if self._options.shard:
            print(case.name, flush=True)  # the log of a process that hangs ends with the case that it was running
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
            return [replace(blank, status="fail", note=self._describe(error))]
        seconds = round((time.monotonic() - begin) / max(1, len(verdicts)), 4)
        return [_judged(blank, what, x, seconds) for what, x in verdicts]

    def _job_stage(self, name: str) -> None:
        """Run the cases of a stage that runs whole jobs."""
        stage, left = stage_named(name), self._lab.left()
        if left < stage.least and not self._options.toy:
            why = f"skipped: {max(0.0, left):.0f} s left of its time, it needs {stage.least:.0f} s"
            self.report.withheld.append(f"{name}: {why}")
            if stage.required:
                self.report.checks.append(Check(name, name, name, "", "", {}, "unreached", note=why))
            return
        if not self._options.toy:
            torch.set_num_threads(os.cpu_count() or 1)
        import_module(f"tests.gpu.stages.{name}")  # imported late: it needs more packages than kernels
        failed = sorted({c.stage for c in self.report.failed() if c.status != "unreached"})
        for case in job_cases(name, self._options.toy):
            if not self._selected(case):
                continue
            reason = self._stop_reason() or ("" if stage.required or not failed else f"failed: {', '.join(failed)}")
            if reason:
                self._record_unfinished(stage.required, case, "unreached", reason)
            else:
                self._run_job_case(stage.required, case)
            self._lab.free()

    def _run_job_case(self, required: bool, case: JobCase) -> None:
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
                    self.report.checks.append(_judged(_blank(case.stage, case), *found, seconds))
                    begin = time.monotonic()
        except Absent as error:
            self._record_unfinished(required, case, "absent", str(error))
        except Exception as error:
            self._broken = True
            self._record_unfinished(required, case, "fail", self._describe(error))

    def _record_unfinished(self, required: bool, case: JobCase, status: str, why: str) -> None:
        """Record a case that did not run to its end: a check of a required stage, else a note."""
        if required:
            self.report.checks.append(replace(_blank(case.stage, case), status=status, note=why))
        else:
            self.report.withheld.append(f"{case.name}: {why}")

    def _stop_reason(self) -> str:
        if self._device_error:
            return f"the device failed before: {self._device_error}"
        return "" if self._lab.left() > 0 else f"time limit of {self._options.time_limit:.0f} s"

    def _describe(self, error: Exception) -> str:
        """The error in one line. Also checks whether the device still works: after a kernel fault nothing runs."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{type(error).__name__} at {where.filename.rsplit('/', 1)[-1]}:{where.lineno}: {str(error)[:300]}"
        try:
            self._lab.synchronize()
        except RuntimeError:
            self._device_error = line
        return line

    def _bench(self) -> None:
        self.report.rates = measure_rates(self._lab)
        failed = {check.op for check in self.report.failed()}
        checked = "parity" in self._options.stages
        for case in bench_cases(self._options.toy):
            if not self._selected(case):
                continue
            reason = self._stop_reason() or (f"parity of {case.op} failed" if case.op in failed else "")
            try:
                if reason:
                    raise Missing(reason)
                self._lab.seed(crc32(case.name.encode()))
                figures = case.figures(self._lab)
                self.report.figures += [replace(x, checked=checked) for x in figures]
            except (Missing, Absent) as error:
                self.report.withheld.append(f"{case.name}: {error}")
            except torch.OutOfMemoryError:
                self.report.withheld.append(f"{case.name}: the device has too little memory")
            except Exception as error:
                self._broken = True
                self.report.withheld.append(f"{case.name}: {self._describe(error)}")
            self._lab.free()

    def _tune(self) -> None:
        report = self.report
        driver = report.hardware.get("smi", {}).get("driver_version", "")
        software = ", ".join(f"{name} {number}" for name, number in report.versions.items())
        name = f"{report.hardware['name']}, driver {driver}" if driver else report.hardware["name"]
        source = f"measured on {name}, {software}, commit {report.commit}, {report.date[:10]}"
        report.tuning = tune(self._lab, f"{'TOY ' if report.toy else ''}{source}", self._stop_reason)


def _blank(stage: str, case: ParityCase | JobCase) -> Check:
    dtype = str(case.dtype).removeprefix("torch.") if isinstance(case, ParityCase) else ""
    return Check(stage, case.op, case.name, "", dtype, dict(case.shape), "pass")


def _judged(blank: Check, what: str, verdict: Verdict, seconds: float) -> Check:
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
