"""Runs the cases of the stages one at a time and collects the report."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from zlib import crc32

import torch

from tests.gpu import machine
from tests.gpu.budget import STAGES, Stage, no_time, schedule
from tests.gpu.device import Gpu
from tests.gpu.outcomes import Absent, Missing
from tests.gpu.registry import Case, Found, cases
from tests.gpu.report import Check, Figure, Measure, Profile, Report
from tests.gpu.shards import Shard, check_in_processes
from tests.gpu.stages.rates import measure_rates
from tests.gpu.stages.tune import tune
from tests.gpu.under_test import flash_library


class NoDevice(RuntimeError):
    """No CUDA device, in a run without `--toy`."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line."""

    stages: Sequence[str]
    toy: bool
    only: str = ""
    time_limit: float = 450.0
    commit: str = ""
    flash_library: str = ""
    jobs: int = 1
    shard: str = ""
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
        self._gpu = Gpu(device, options.toy, options.flash_library)
        self.report = Report(
            toy=options.toy,
            hardware=machine.hardware(device),
            versions=machine.versions(),
            commit=options.commit or machine.commit(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            stages=list(options.stages),
        )
        with self._models():
            for stage in (stage for stage in STAGES if stage.name in options.stages):
                self._stage(stage)
                save(self.report)

    def _models(self) -> AbstractContextManager[None]:
        """Inside, other processes build the large models that the chosen cases need."""
        if self._options.toy or self._options.shard:
            return nullcontext()
        jobs = [stage for stage in STAGES if stage.name in self._options.stages and not stage.kernels]
        needed = {case.shape["model"] for stage in jobs for case in self._chosen(stage) if "model" in case.shape}
        if not needed:
            return nullcontext()
        from tests.gpu.models import built_in_background  # imported late: it needs more packages than kernels

        return built_in_background(sorted(needed))

    def _chosen(self, stage: Stage) -> list[Case]:
        """The stage's cases that `--only` selects."""
        only = self._options.only
        return [case for case in cases(stage.name, self._options.toy) if only in case.name or only in case.op]

    def _stage(self, stage: Stage) -> None:
        self._gpu.deadline = self._deadlines[stage.name]
        begin = time.monotonic()
        try:
            if stage.name == "tune":
                self._tune()
            else:
                self._run_stage(stage)
        except Exception as error:  # such as a device that failed before: report what was found so far
            self._broken = True
            self.report.withheld.append(f"{stage.name}: {self._describe(error)}")
        self.report.seconds[stage.name] = round(time.monotonic() - begin, 2)
        self.report.exit_code = 1 if self.report.failed() or self._broken or self._device_error else 0

    def _run_stage(self, stage: Stage) -> None:
        options = self._options
        skipped = "" if options.toy else no_time(stage, self._gpu.left())
        if skipped:
            self._record_unfinished(stage, None, "unreached", skipped)
            return
        if not options.toy and not stage.kernels:
            torch.set_num_threads(os.cpu_count() or 1)
        chosen = self._chosen(stage)
        if stage.name == "bench":
            self.report.rates = measure_rates(self._gpu)
        absent = self._without_flash() if stage.name == "flash" else ""
        if absent:
            for case in chosen:
                self._record_unfinished(stage, case, "absent", absent)
            return
        if stage.parallel and options.jobs > 1 and not options.toy and not options.shard and len(chosen) > 1:
            words = ["--only", options.only, "--flash-library", options.flash_library]
            self.report.checks += check_in_processes(stage.name, options.jobs, self._gpu.left(), words)
            return
        selected = Shard.of(options.shard).select(chosen) if options.shard else chosen
        for number, case in enumerate(selected):
            self._gpu.waiting = [x.name for x in selected[number:]]
            reason = self._reason_not_to_run(stage, case)
            if reason:
                self._record_unfinished(stage, case, "unreached", reason)
            else:
                self._run_case(stage, case)
            if not stage.parallel:
                self._gpu.free()

    def _without_flash(self) -> str:
        """Why there is no flash library; empty if there is one."""
        try:
            self.report.flash = str(flash_library(self._options.flash_library, self._options.toy))
        except Absent as error:
            self.report.flash = str(error)
            return str(error)
        return ""

    def _reason_not_to_run(self, stage: Stage, case: Case) -> str:
        reason = self._stop_reason()
        failed = [check for check in self.report.failed() if check.status != "unreached"]
        if reason or stage.required or not failed:
            return reason
        if stage.kernels:
            return f"parity of {case.op} failed" if case.op in {check.op for check in failed} else ""
        return f"failed: {', '.join(sorted({check.stage for check in failed}))}"

    def _run_case(self, stage: Stage, case: Case) -> None:
        if self._options.shard:
            print(case.name, flush=True)  # the log of a process that hangs ends with the case that it was running
        self._gpu.seed(crc32(case.name.encode()))
        begin = time.monotonic()
        try:
            for found in case.found(self._gpu):
                self._record(case, found, time.monotonic() - begin)
                begin = time.monotonic()
            self._gpu.synchronize()
        except (Missing, Absent) as error:
            self._record_unfinished(stage, case, "missing" if isinstance(error, Missing) else "absent", str(error))
        except Exception as error:
            small = stage.name == "bench" and isinstance(error, torch.OutOfMemoryError)
            self._broken |= not small and not stage.required
            why = "the device has too little memory" if small else self._describe(error)
            self._record_unfinished(stage, case, "fail", why)

    def _record(self, case: Case, found: Found, seconds: float) -> None:
        report, toy = self.report, self._options.toy
        if isinstance(found, Figure):
            report.figures.append(replace(found, checked="parity" in self._options.stages))
        elif isinstance(found, Measure):
            checked = "engine" in self._options.stages and not report.failed()
            report.measures.append(replace(found, toy=toy, checked=checked))
        elif isinstance(found, Profile):
            report.profiles.append(replace(found, toy=toy))
        elif isinstance(found, str):
            report.withheld.append(f"{case.name}: {found}")
        else:
            what, x = found
            status = "pass" if x.passed else "fail"
            numbers = {"error": x.error, "plain": x.plain, "bound": x.bound, "note": x.note}
            report.checks.append(replace(_blank(case, status), what=what, seconds=round(seconds, 6), **numbers))

    def _record_unfinished(self, stage: Stage, case: Case | None, status: str, why: str) -> None:
        """Record a stage or a case that did not run to its end: a check of a required stage, else a note."""
        name = stage.name if case is None else case.name
        if case is None or not stage.required:
            self.report.withheld.append(f"{name}: {why}")
        if stage.required:
            blank = Check(name, name, name, "", "", {}, status) if case is None else _blank(case, status)
            self.report.checks.append(replace(blank, note=why))

    def _stop_reason(self) -> str:
        if self._device_error:
            return f"the device failed before: {self._device_error}"
        return "" if self._gpu.left() > 0 else f"time limit of {self._options.time_limit:.0f} s"

    def _describe(self, error: Exception) -> str:
        """The error in one line. Also checks whether the device still works: after a kernel fault nothing runs."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{type(error).__name__} at {where.filename.rsplit('/', 1)[-1]}:{where.lineno}: {str(error)[:300]}"
        try:
            self._gpu.synchronize()
        except RuntimeError:
            self._device_error = line
        return line

    def _tune(self) -> None:
        report = self.report
        driver = report.hardware.get("smi", {}).get("driver_version", "")
        software = ", ".join(f"{name} {number}" for name, number in report.versions.items())
        name = f"{report.hardware['name']}, driver {driver}" if driver else report.hardware["name"]
        source = f"measured on {name}, {software}, commit {report.commit}, {report.date[:10]}"
        report.tuning = tune(self._gpu, f"{'TOY ' if report.toy else ''}{source}", self._stop_reason)


def _blank(case: Case, status: str) -> Check:
    return Check(case.stage, case.op, case.name, "", case.short_dtype, dict(case.shape), status)
