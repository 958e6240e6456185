"""`batchgen plan`: the time and the cost of a job on devices of a described kind, and what limits it.

Each device runs one share of the job, as with `--replicas` and `--shard`. The share that costs most is simulated with
the lengths that are expected, and its work costs what the machine file says.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, expm1
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.table import Table
from rich.text import Text

from batchgen.config.run_config import RunConfig
from batchgen.config.units import STDIN
from batchgen.engine.machine import step_limits
from batchgen.engine.memory.dummy_run import dummy_run, expected_bytes
from batchgen.engine.memory.kv_budget import DeviceMemory, device_memory, pool_pages, with_job_windows, with_windows_in
from batchgen.engine.workload import JobWorkload
from batchgen.errors import UsageError
from batchgen.job.check import RowErrors, plan_job
from batchgen.job.display.console import SafeConsole
from batchgen.job.display.eta import interval, prior_costs
from batchgen.job.display.figures import print_figures
from batchgen.job.display.progress import Progress, format_clock
from batchgen.job.preflight import CheckedJob
from batchgen.job.scale.machine import Machine
from batchgen.job.scale.replicas import Requests, shares
from batchgen.job.setup import Setup
from batchgen.job.summary import write_report
from batchgen.plan.config import SchedulerConfig
from batchgen.plan.length_predictor import EXACT, Lengths
from batchgen.plan.scheduler import Scheduler
from batchgen.plan.step_costs import Seconds
from batchgen.plan.work import Work, WorkLeft
from batchgen.request.printable import format_size, json_printable

_MOST_DEVICES: Final = 1000
_DRAWN: Final = 3
"""Of the quantities of `StepCosts`, what a token whose logits are computed takes in addition."""
_SAMPLES_SEEN: Final = 200.0
"""Samples that `--output-tokens` counts as."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A job on some devices. Ends of intervals hold in nine of ten cases."""

    devices: int
    seconds: float
    """From the command to the end of the last device."""
    seconds_min: float
    seconds_max: float
    cost: float | None
    """Of all devices for that time; None: the machine file has no price."""
    cost_min: float | None
    cost_max: float | None
    limited_by: str
    """The part that takes most."""
    parts: dict[str, float]
    """Seconds of each part of the device with most work."""


def numbers_of(text: str) -> list[int]:
    """The numbers of devices of `--devices`.

    Raises:
        UsageError: the text is not numbers in range.
    """
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = [0]
    if not 1 <= counts[0] <= counts[-1] <= _MOST_DEVICES:
        raise UsageError(f"`--devices` must be numbers from 1 to {_MOST_DEVICES:,}, separated by commas; got {text!r}")
    return counts


def for_machine(config: RunConfig, machine: Machine) -> RunConfig:
    """The options of a job on a machine.

    Raises:
        UsageError: they name another device.
    """
    if config.engine.device not in ("auto", machine.device):
        raise UsageError(f"`--device {config.engine.device}`: the machine file says {machine.device}; leave it out")
    return replace(config, engine=replace(config.engine, device=machine.device))


def forecast_job(
    job: CheckedJob,
    machine: Machine,
    devices: Sequence[int],
    output_tokens: float | None,
    progress: Progress,
    *,
    as_json: bool,
) -> int:
    """Plan a job and print a forecast for each number of devices. Returns the exit code, as `check` does.

    Args:
        job: the checked job.
        machine: the kind of device.
        devices: numbers of devices.
        output_tokens: mean tokens of samples that may end before their limit; None: of the measured run, or unknown.
        progress: is closed before anything is printed.
        as_json: whether to print one JSON object; `--report` writes it, too.

    Raises:
        BatchgenError: as `run_job` before it generates.
        UsageError: the model does not fit into a device.
    """
    errors = RowErrors()
    with tempfile.TemporaryDirectory(prefix="batchgen-plan-") as scratch:
        planned = plan_job(job, Path(scratch), errors, progress)
        rows, workload = planned.rows, planned.workload
        seen = machine.lengths if output_tokens is None else _seen(workload, output_tokens)
        forecaster = _Forecaster(planned.setup, workload, rows.rows, machine, seen)
        prompts = max(1, int(np.count_nonzero(workload.samples)))
        forecasts = [forecaster.on(count) for count in devices if count <= prompts]
    progress.close()
    failed = rows.errors.total()
    figures = {
        "rows": rows.rows,
        "rows_error": failed,
        "prompt_tokens": workload.tree.prompt_tokens,
        "distinct_prompt_tokens": workload.tree.distinct_tokens,
        "max_completion_tokens": int((workload.samples.astype(np.int64) * workload.max_tokens).sum()),
        "samples": int(workload.samples.sum()),
        "samples_of_unknown_length": forecaster.unknown,
        "mean_output_tokens": None if seen is None else round(forecaster.mean_tokens, 1),
        "machine": machine.name,
        "currency": machine.currency,
        "devices": [asdict(forecast) for forecast in forecasts],
    }
    text, target = json_printable(json.dumps(figures, indent=2, ensure_ascii=False)), job.config.report
    if not as_json:
        _print(figures, forecasts, errors, SafeConsole(stderr=target == STDIN))
    if as_json or target == STDIN:
        write_report(text, STDIN)
    if target not in (None, STDIN):
        write_report(text, target, overwrite=job.config.existing == "overwrite")
    return 3 if job.config.max_errors.exceeded(failed, rows.rows) else 0


class _Forecaster:
    """Forecasts of one job."""

    def __init__(self, setup: Setup, workload: JobWorkload, rows: int, machine: Machine, seen: Lengths | None) -> None:
        engine, spec = setup.config.engine, setup.spec
        self._workload, self._machine, self._seen, self._spec = workload, machine, seen, spec
        self._kinds = workload.kinds(repeats_end=engine.stop_on_repeat is not None)
        self.unknown = int(workload.samples[self._kinds != EXACT].sum())
        """Samples that may end before their limit."""
        self._config = _scheduler_config(setup, workload, machine)
        rates = machine.rates(spec)
        self._prior = prior_costs(spec, rates)
        weights = spec.parameters * spec.dtype.itemsize / rates.bandwidth
        self._of_weights = min(1.0, weights / self._prior[0])
        """Share of a step's cost that reads the weights."""
        start = machine.start_seconds + setup.weight_bytes / machine.load_bytes
        self._fixed = {"start": start, "rows": rows * machine.row_seconds}
        drawn = Work(decode_tokens=_prompt_logits(workload))
        self._head = float(machine.costs.parts(drawn, self._prior)[_DRAWN])
        """Seconds of the logits of prompts."""
        self.mean_tokens = 0.0
        """Expected tokens of a sample."""

    def on(self, devices: int) -> Forecast:
        """The forecast for some devices."""
        machine, work = self._machine, self._work(devices)
        steps, tokens, prompt_reads, decoded, positions, reads = machine.costs.parts(work.expected, self._prior)
        parts = {
            "matrix products": tokens + decoded + self._head / devices,
            "attention": prompt_reads + positions,
            "memory bandwidth": steps * self._of_weights + reads,
            "steps": steps * (1.0 - self._of_weights),
            **self._fixed,
        }
        doubt = machine.doubt(self._spec)
        expected, least, most = (self._seconds(each, devices) for each in work)
        low, high = interval(expected, least.mean, most.mean, doubt)
        price = None if machine.price_per_hour is None else devices * machine.price_per_hour / 3600
        costs = [None if price is None else price * each for each in (expected.mean, low, high)]
        limit = max(parts, key=lambda part: parts[part])
        return Forecast(devices, expected.mean, low, high, costs[0], costs[1], costs[2], limit, parts)

    def _seconds(self, work: Work, devices: int) -> Seconds:
        """Seconds of all parts."""
        seconds = self._machine.costs.estimate(work, self._prior)
        return replace(seconds, mean=seconds.mean + self._head / devices + sum(self._fixed.values()))

    def _work(self, devices: int) -> WorkLeft:
        """The work of the device with most of it."""
        workload, samples = self._workload, self._workload.samples
        if devices > 1:
            each = shares(workload, ~workload.done, devices)
            samples = np.zeros_like(samples)
            largest = max(each, key=self._size)
            samples[largest] = workload.samples[largest]
        tree, limits, kinds = workload.tree, workload.max_tokens, self._kinds
        scheduler = Scheduler(tree, samples, limits, self._config, kinds, workload.spans, self._seen)
        work = scheduler.work_left()
        if devices == 1:
            count = int(samples.sum())
            self.mean_tokens = (work.expected.decode_tokens + count) / max(1, count)
        return work

    def _size(self, requests: Requests) -> float:
        """Tokens of a share."""
        workload = self._workload
        own = workload.tree.end[workload.tree.node_of_request[requests]] - workload.tree.shared_len[requests]
        return float((workload.samples[requests] * workload.max_tokens[requests] + own).sum())


def _scheduler_config(setup: Setup, workload: JobWorkload, machine: Machine) -> SchedulerConfig:
    """The limits of steps and of the KV pool on a device."""
    engine, spec = setup.config.engine, setup.spec
    if spec.stream is not None:
        raise UsageError("`--offload`: batchgen plan does not know the time of copies; batchgen check measures it")
    if spec.ranks.count > 1:
        raise UsageError(
            "`--tensor-parallel`: batchgen plan does not know the time of sums between devices; leave it out, and "
            "describe them all as one device with --machine FILE"
        )
    total = machine.memory if machine.memory is not None else device_memory(spec.device).total
    if total < setup.weight_bytes:
        raise UsageError(
            f"--machine: the model's weights take {format_size(setup.weight_bytes)}, and a device has "
            f"{format_size(total)}; name a device with more `memory`, or --quantization int8 or int4"
        )
    memory = DeviceMemory(total - setup.weight_bytes, total, exclusive=machine.device == "cuda")
    limits = step_limits(engine, spec, workload, memory)
    if not workload.samples.any():
        return SchedulerConfig(2, engine.page_size, *limits)
    rows, tokens = limits[0], max(limits[1], workload.longest_span)
    step = expected_bytes(spec, dummy_run(workload, spec, engine.page_size, rows, tokens))
    memory = replace(memory, step=step)
    held = with_job_windows(spec, workload, engine.page_size)
    held = with_windows_in(held, workload, engine.page_size, memory.budget(engine.kv_budget))
    pages = pool_pages(workload, held, engine.page_size, engine.kv_budget, memory, (rows, tokens))
    return SchedulerConfig(pages, engine.page_size, rows, tokens)


def _prompt_logits(workload: JobWorkload) -> int:
    """Prompt positions whose logits are computed: those of texts to score, and of prompts with logprobs."""
    table, ends = workload.table, workload.tree.end[workload.tree.node_of_request]
    with_logprobs = [p.logprob_start_len if p.return_logprob else -1 for p in table.params]
    starts = np.maximum(table.score_start, table.by_params(with_logprobs, np.int32))
    return int(np.where((workload.samples > 0) & (starts >= 0), ends - starts, 0).sum())


def _seen(workload: JobWorkload, mean: float) -> Lengths:
    """Samples of a mean length, as shares of the limits: exponential lengths, which the limit cuts off."""
    share = min(0.999, mean / max(1.0, float(workload.max_tokens.mean())))
    low, high = share, 1e3
    for _ in range(60):  # the mean without the limit
        free = (low + high) / 2
        low, high = (free, high) if -free * expm1(-1.0 / free) < share else (low, free)
    cut = exp(-1.0 / free)
    square = 2.0 * free * free - cut * 2.0 * (free + free * free)
    count = _SAMPLES_SEEN
    return Lengths(count, count * (1.0 - cut), count * share, count * square)


def _print(figures: dict[str, Any], forecasts: Sequence[Forecast], errors: RowErrors, console: SafeConsole) -> None:
    failed = f", errors {figures['rows_error']:,}" if figures["rows_error"] else ""
    lines = [("rows", f"{figures['rows']:,}{failed}")]
    if commonest := errors.reasons.commonest():
        lines.append(("", commonest))
    lines += [
        ("prompt tokens", f"{figures['prompt_tokens']:,} (to compute {figures['distinct_prompt_tokens']:,})"),
        ("output tokens", f"at most {figures['max_completion_tokens']:,}"),
    ]
    if unknown := figures["samples_of_unknown_length"]:
        mean = figures["mean_output_tokens"]
        known = "their lengths are not known: see --output-tokens" if mean is None else f"{mean:,g} tokens on average"
        lines.append(("", f"{unknown:,} of {figures['samples']:,} answers may end early: {known}"))
    lines.append(("machine", figures["machine"]))
    print_figures([(label, Text(text)) for label, text in lines], console)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("devices", "time", "90 % interval"):
        table.add_column(name, justify="right")
    priced = [forecast for forecast in forecasts if forecast.cost is not None]
    if priced:
        table.add_column(f"cost ({figures['currency']})", justify="right")
        table.add_column("90 % interval", justify="right")
    table.add_column("limited by")
    for each in forecasts:
        row = [f"{each.devices:,}", format_clock(each.seconds), _range(*map(format_clock, _ends(each)))]
        if each.cost is not None and each.cost_min is not None and each.cost_max is not None:
            row += [f"{each.cost:,.2f}", _range(f"{each.cost_min:,.2f}", f"{each.cost_max:,.2f}")]
        table.add_row(*row, each.limited_by)
    console.print(table)


def _ends(forecast: Forecast) -> tuple[float, float]:
    return forecast.seconds_min, forecast.seconds_max


def _range(low: str, high: str) -> str:
    return f"{low} - {high}"
