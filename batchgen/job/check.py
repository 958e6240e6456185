"""`batchgen check`: validate every row and plan the job, without loading weights."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.text import Text

from batchgen.config.units import STDIN
from batchgen.data.read.input_set import InputSet, open_inputs
from batchgen.data.store.work_folder import output_paths
from batchgen.engine.machine import step_limits
from batchgen.engine.memory.dummy_run import dummy_run, expected_bytes
from batchgen.engine.memory.kv_budget import (
    AUTO_SHARE,
    DeviceMemory,
    cache_groups,
    device_memory,
    job_memory,
    state_group,
    with_job_windows,
)
from batchgen.engine.memory.kv_offload import streamed_cache
from batchgen.engine.workload import JobWorkload, plan_workload
from batchgen.job.clock import set_clock
from batchgen.job.display.console import SafeConsole
from batchgen.job.display.figures import print_figures
from batchgen.job.display.media_figures import media_size
from batchgen.job.display.progress import Progress, ProgressState
from batchgen.job.display.reasons import Reasons
from batchgen.job.estimate import OutputEstimate, estimate_memory, estimate_output, rank_needs
from batchgen.job.preflight import CheckedJob, wait_for_hashes
from batchgen.job.rows.fingerprint import JobIdentity, identify_job
from batchgen.job.rows.ingest import Ingested, ingest
from batchgen.job.setup import Setup, prepare
from batchgen.job.summary import by_count, write_report
from batchgen.kernels.device import device_for
from batchgen.kernels.stream import StreamPlan, copy_rate
from batchgen.plan.cache_groups import HeldGroup, bytes_by_kind, held_groups
from batchgen.plan.config import SchedulerConfig, SchedulerStats
from batchgen.plan.estimate import PlanCounts, plan_counts
from batchgen.plan.length_predictor import LengthPredictor
from batchgen.plan.order import begin_order
from batchgen.plan.scheduler import Scheduler
from batchgen.plan.simulate import simulate
from batchgen.request.completion import Completion
from batchgen.request.printable import format_kv_peak, format_size, json_printable, printable
from batchgen.request.rows.unknown_keys import MAX_NOTES, carried_notes, note_line

_SHOWN_ERRORS = 20
_ROWS_PER_UPDATE = 256
_FIRST_ROWS = 5
"""Rows that are named of each cause of errors."""
_PROMPT = "  | "
"""What each line of the prompt begins with."""
_PLACE = re.compile(r"\A.*?, (?:line|row) [0-9]+: ", re.DOTALL)
"""The file and the line that the message of a row's error begins with."""
_ALL_PAGES = 1 << 40
_MOST_TOKENS = 1_000_000
"""Sampled tokens of a dry run, which takes seconds for so many."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Figures of a check. Names are those of `run --report`."""

    rows: int
    rows_ok: int
    rows_error: int
    rows_skipped: int
    """Number of bad rows left out because of `--on-bad-row skip`; `errors` and `row_errors` include them."""
    errors: dict[str, int]
    """Error code -> number of rows."""
    row_errors: list[dict[str, Any]]
    """Row, id, code and message of the first bad rows."""
    error_causes: list[dict[str, Any]]
    """The same of the first row of each cause, with its number of `rows` and the first ones; the commonest first."""
    commonest_error: str | None
    """The most frequent reason of row errors, with its first row."""
    template_fields: list[str]
    """Fields that --prompt-template reads; empty without one."""
    carried_options: list[dict[str, Any]]
    """`key`, `rows` and `hint` of each carried key that looks like an option."""
    media: dict[str, Any] | None
    """Images and sounds of the rows: how many, and what decoding and encoding them takes; None without any."""
    prompt_tokens: int
    distinct_prompt_tokens: int
    computed_prompt_tokens: int
    cached_tokens: int
    sharing_ratio: float
    deduplicated_rows: int
    grammar_backends: dict[str, int]
    """Grammar compiler -> number of distinct constraints that it compiled."""
    max_completion_tokens: int
    """Upper limit: the sum over all samples of `max_new_tokens`."""
    kv_peak_bytes: int
    kv_peak_bytes_by_group: dict[str, int]
    """`full`, `window` -> the peak of these layers."""
    page_waste: float
    estimated_peak_bytes: int | None
    """Peak of the run's resident memory; None on a GPU."""
    tower_bytes: int
    """Bytes of the weights that read images and sounds, which are loaded if a row has any."""
    ranks: list[dict[str, int]]
    """`weights`, `kv_token`, `kv_peak` and `step` bytes of each process of --tensor-parallel; empty for one."""
    offload: dict[str, Any] | None
    """Where weights and the cache are, and what a pass copies (`_offload`); None without --offload."""
    estimated_steps: int
    """Number of steps if every row runs to its limit and pages are unlimited; so, too, the next three figures."""
    estimated_occupancy: float
    """Fraction of the slots in use, over all steps."""
    estimated_tail_steps: int
    """Number of steps after the last sample has started."""
    estimated_tail_efficiency: float
    """Fraction of the slots in use in those steps."""
    estimated_seconds: float | None
    """Lower limit of the compute time; None if the device is not on this machine."""
    estimated_output_bytes: int
    """Bytes of results and hidden states together."""
    estimated_hidden_states_bytes: int
    fingerprint: str
    first_prompt: str | None
    advice: list[str]
    """What is probably not as meant, with a remedy each."""
    seconds: dict[str, float]
    model: dict[str, Any]
    configuration: dict[str, Any]


def check_job(job: CheckedJob, progress: Progress, as_json: bool = False) -> int:
    """Validate every row, plan the job and print the figures. Returns the exit code.

    If the JSON report goes to stdout, the text goes to stderr. The progress is closed before anything is printed.

    Raises:
        BatchgenError: as `run_job` before it generates. If the figures exist by then, they are printed first.
    """
    config = job.config
    report, output = _build_report(job, progress)
    progress.close()
    text = json_printable(json.dumps(asdict(report), indent=2, ensure_ascii=False))
    if not as_json:
        console = SafeConsole(file=sys.stderr if config.report == STDIN else sys.stdout)
        print_figures(_lines(report), console)
        if report.first_prompt is not None:
            _print_prompt(report.first_prompt, console)
    if as_json or config.report == STDIN:
        write_report(text, STDIN)
    if config.report is not None and config.report != STDIN:
        write_report(text, config.report, overwrite=config.existing == "overwrite")
    output.check(config.max_output_bytes)
    return 3 if config.max_errors.exceeded(report.rows_error, report.rows) else 0


@dataclass(slots=True)
class RowErrors:
    """Error counts of all bad rows, and the messages of the first ones."""

    counts: Counter[str] = field(default_factory=Counter)
    shown: list[dict[str, Any]] = field(default_factory=list)
    causes: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    """Code and message without the row's place -> the first row, and how many there are."""
    reasons: Reasons = field(default_factory=Reasons)

    def add(self, completion: Completion, row_id: str, extra: str | None) -> None:
        """Count a bad row."""
        assert completion.error is not None
        error = completion.error
        self.counts[error.code] += 1
        self.reasons.add(completion, row_id)
        shown = {"row": completion.row_index, "id": row_id, "code": str(error.code), "message": error.message}
        if len(self.shown) < _SHOWN_ERRORS:
            self.shown.append(shown)
        cause = (str(error.code), _PLACE.sub("", error.message, count=1))
        if cause in self.causes or len(self.causes) < _SHOWN_ERRORS:
            found = self.causes.setdefault(cause, {**shown, "rows": 0, "first_rows": []})
            found["rows"] += 1
            if len(found["first_rows"]) < _FIRST_ROWS:
                found["first_rows"].append(completion.row_index)


def _print_prompt(text: str, console: Console) -> None:
    """Print the prompt behind a mark on each line, so that none passes for a figure; wrapped on a terminal."""
    console.print("first prompt, as the model sees it:")
    for line in map(Text, map(printable, text.split("\n"))):
        pieces = line.wrap(console, max(console.width - len(_PROMPT), 1)) if console.is_terminal else [line]
        for piece in pieces or [line]:
            console.print(Text(_PROMPT) + piece, soft_wrap=True)


def _read(setup: Setup, inputs: InputSet, folder: Path, errors: RowErrors, progress: Progress) -> Ingested:
    """Read and check all rows."""

    def on_row(rows: int) -> None:
        if not rows % _ROWS_PER_UPDATE:
            progress.update(ProgressState("reading", rows_done=rows, rows_error=errors.counts.total()))

    progress.update(ProgressState("reading"))
    rows = ingest(setup, inputs, folder, folder, on_row, on_bad=errors.add)
    rows.close()
    for note in rows.notes:
        progress.note(note)
    setup.note_rows(rows.table, progress.note)
    progress.update(ProgressState("planning", rows.rows, rows.rows, errors.counts.total()))
    return rows


class PlannedJob(NamedTuple):
    """A job whose rows were read, and its plan. Nothing was computed or written."""

    setup: Setup
    identity: JobIdentity
    rows: Ingested
    workload: JobWorkload
    started: float
    """When reading began, by `time.monotonic`."""
    read: float
    """When it ended."""


def plan_job(job: CheckedJob, folder: Path, errors: RowErrors, progress: Progress) -> PlannedJob:
    """Read and check all rows into `folder`, and build the prefix tree.

    Raises:
        BatchgenError: as `run_job` before it generates.
    """
    config = job.config
    setup = prepare(job, progress.note, allow_missing_gpu=True)
    inputs = open_inputs(job.inputs, include_source=config.include_source)
    wait_for_hashes(job.hashes, progress.note)
    identity = identify_job(setup, inputs)
    set_clock(setup, identity, output_paths(config.output, identity.run.shard, config.work_path))
    started = time.monotonic()
    rows = _read(setup, inputs, folder, errors, progress)
    read, spec, dedup = time.monotonic(), setup.spec, config.engine.dedup
    workload = plan_workload(rows.table, dedup=dedup, adapters=list(spec.adapters), bidirectional=spec.bidirectional)
    return PlannedJob(setup, identity, rows, workload, started, read)


def _build_report(job: CheckedJob, progress: Progress) -> tuple[CheckReport, OutputEstimate]:
    config, began, errors = job.config, time.monotonic(), RowErrors()
    with tempfile.TemporaryDirectory(prefix="batchgen-check-") as scratch:
        planned = plan_job(job, Path(scratch), errors, progress)
        setup, identity, rows, workload = planned.setup, planned.identity, planned.rows, planned.workload
        table, started, read = rows.table, planned.started, planned.read
        counts, steps, peaks = _plan(setup, workload)
        output, towers = estimate_output(rows, setup), setup.tower_bytes(table)
        memory = estimate_memory(setup, workload, sum(peaks.values()), towers)
        several = setup.spec.ranks.count > 1
        needs = rank_needs(job.model, setup, workload, sum(peaks.values())) if several else []
        offload = _offload(setup, workload)
    phases = {"starting": started - began, "reading": read - started, "planning": time.monotonic() - read}
    report = CheckReport(
        rows=rows.rows,
        rows_ok=rows.rows - rows.errors.total() - rows.skipped,
        rows_error=rows.errors.total(),
        rows_skipped=rows.skipped,
        errors=dict(errors.counts),
        row_errors=errors.shown,
        error_causes=sorted(errors.causes.values(), key=lambda cause: (-cause["rows"], cause["row"])),
        commonest_error=errors.reasons.commonest(),
        template_fields=sorted(setup.columns.template.fields) if setup.columns.template is not None else [],
        carried_options=carried_notes(rows.carried_options, config.carry),
        media=setup.media_plan(table),
        prompt_tokens=workload.tree.prompt_tokens,
        distinct_prompt_tokens=workload.tree.distinct_tokens,
        computed_prompt_tokens=counts.distinct_prompt_tokens,
        cached_tokens=workload.tree.prompt_tokens - workload.tree.distinct_tokens,
        sharing_ratio=round(counts.sharing_ratio, 4),
        deduplicated_rows=len(workload.followers),
        grammar_backends=rows.grammar_backends,
        max_completion_tokens=int((workload.samples.astype(np.int64) * table.max_new_tokens).sum()),
        kv_peak_bytes=sum(peaks.values()),
        kv_peak_bytes_by_group=peaks,
        page_waste=round(counts.page_waste, 4),
        estimated_peak_bytes=memory,
        tower_bytes=towers,
        ranks=[asdict(each) for each in needs],
        offload=offload,
        estimated_steps=steps.steps,
        estimated_occupancy=round(steps.occupancy, 4),
        estimated_tail_steps=steps.tail_steps,
        estimated_tail_efficiency=round(steps.tail_efficiency, 4),
        estimated_seconds=_estimated_seconds(setup, counts, steps.steps * (offload or {}).get("pass_seconds", 0.0)),
        estimated_output_bytes=output.total,
        estimated_hidden_states_bytes=output.states,
        fingerprint=identity.run.fingerprint,
        first_prompt=None if rows.first_prompt is None else setup.decode_prompt(rows.first_prompt),
        advice=rows.advice(setup),
        seconds={phase: round(spent, 3) for phase, spent in phases.items()},
        model=_model(setup),
        configuration=config.describe(),
    )
    return report, output


def _model(setup: Setup) -> dict[str, Any]:
    return {
        **setup.identity,
        "parameters": setup.spec.parameters,
        "context_length": setup.spec.context_length,
        "checkpoint_format": setup.checkpoint_format,
        "quantization": setup.spec.numbers.quantization,
        "weight_bytes": setup.weight_bytes,
        "kv_bytes_per_token": setup.spec.kv_bytes_per_token,
    }


def _plan(setup: Setup, workload: JobWorkload) -> tuple[PlanCounts, SchedulerStats, dict[str, int]]:
    """Token counts of the job, its simulation with unlimited pages and every row running to its limit, and the most
    bytes of keys and values by kind of layers.
    """
    engine = setup.config.engine
    page_size, (sequences, tokens) = engine.page_size, step_limits(engine, setup.spec, workload, _memory(setup))
    limits = SchedulerConfig(_ALL_PAGES, page_size, sequences, tokens)
    kinds = workload.kinds(repeats_end=engine.stop_on_repeat is not None)
    draws = workload.max_tokens
    order = begin_order(workload.tree, workload.samples, LengthPredictor(draws, kinds).expected, limits)
    groups = cache_groups(with_job_windows(setup.spec, workload, page_size), page_size)
    counts = plan_counts(order.tree, workload.samples, draws, page_size, sequences)
    pages = [counts.kv_peak_pages]
    if setup.spec.states:
        groups = (*groups, state_group(setup.spec))
    if held_groups(groups):  # windows are small: a prompt's chunk in work may hold more than all of them
        sized = [replace(group, num_pages=_ALL_PAGES) if isinstance(group, HeldGroup) else group for group in groups]
        limits = replace(limits, cache_groups=tuple(sized))
        scheduler = Scheduler(workload.tree, workload.samples, draws, limits, kinds, workload.spans)
        scheduler.dry_run(_MOST_TOKENS, _lag(setup, len(groups)))
        pages = scheduler.group_peaks
        if scheduler.unended:
            most = [0 if isinstance(group, HeldGroup) else counts.kv_peak_pages for group in groups]
            pages = list(map(max, pages, most))
    return counts, simulate(order, workload.samples, draws, limits), bytes_by_kind(groups, pages)


def _memory(setup: Setup) -> DeviceMemory | None:
    """The memory of a device next to the weights, which are not loaded; None: there is none."""
    if setup.spec.stream is not None and setup.spec.device.type == "cpu":
        return job_memory(setup.config.engine, setup.spec)
    if setup.spec.device.type != "cuda" or not torch.cuda.is_available():
        return None
    memory = job_memory(setup.config.engine, setup.spec)
    return replace(memory, free=max(0, memory.free - setup.device_weight_bytes))


def _offload(setup: Setup, workload: JobWorkload) -> dict[str, Any] | None:
    """Where the weights of a job with `--offload` are, and what is copied in each pass, with the least time for it."""
    spec, engine, plan = setup.spec, setup.config.engine, setup.spec.stream
    memory = _memory(setup)
    if plan is None or memory is None:
        return None
    rate, limits = copy_rate(device_for(spec.device)), step_limits(engine, spec, workload, memory)
    has_rows = workload.samples.any()
    step = expected_bytes(spec, dummy_run(workload, spec, engine.page_size, *limits)) if has_rows else 0
    cache = replace(memory, step=step).budget(engine.kv_budget)
    planned = with_job_windows(spec, workload, engine.page_size)
    host = max(0, memory.host - int(plan.pass_bytes * AUTO_SHARE))  # where the weights are not yet
    streamed = streamed_cache(engine, planned, workload, cache, host, limits) if has_rows else None
    kv = StreamPlan((), 0) if streamed is None else streamed[1]
    return {
        "blocks": len(plan.blocks),
        "streamed_blocks": len(plan.streamed),
        "device_weight_bytes": plan.device_bytes,
        "pass_bytes": plan.pass_bytes,
        "pass_seconds": plan.pass_bytes / rate,
        "copy_bytes_per_second": rate,
        "kv_bytes": cache,
        "kv_layers": len(kv.blocks),
        "kv_streamed_layers": len(kv.streamed),
        "kv_device_bytes": kv.device_bytes,
        "kv_pass_bytes": kv.pass_bytes,
        "kv_pass_seconds": kv.pass_bytes / rate,
        "step_bytes": step,
        "rows": limits[0],
    }


def _lag(setup: Setup, groups: int) -> int:
    """Steps that a run plans before it knows how the last one ended: one, where a step runs in the background."""
    if setup.spec.device.type == "cuda":
        return 1
    native = setup.model.native is not None and setup.config.engine.attention != "torch"
    return int(native and torch.get_num_threads() > 1 and groups == 1)


def _estimated_seconds(setup: Setup, counts: PlanCounts, copying: float) -> float | None:
    """Lower limit of the time: the FLOPs of all tokens at the matrix rate measured on this device, or `copying`."""
    if setup.spec.device.type == "cuda" and not torch.cuda.is_available():
        return None
    decoded = max(0, counts.max_output_tokens - counts.samples)
    flops = 2.0 * setup.spec.parameters * (counts.distinct_prompt_tokens + decoded)
    return round(max(flops / _matrix_rate(setup.spec.dtype, setup.spec.device), copying), 1)


def _matrix_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a square matrix product, the best of five."""
    size = 768
    a = torch.randn(size, size, device=device).to(dtype)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        float((a @ a)[0, 0])  # reading a value synchronises with the device
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best


def _lines(report: CheckReport) -> list[tuple[str, Text]]:
    lines: list[tuple[str, Text]] = []

    def add(label: str, text: str, style: str = "") -> None:
        lines.append((label, Text(text, style=style)))

    skipped = f", skipped {report.rows_skipped:,}" if report.rows_skipped else ""
    add("rows", f"{report.rows:,} (ok {report.rows_ok:,}, errors {report.rows_error:,}{skipped})")
    if report.errors:
        add("errors", by_count(report.errors), "red")
    for cause in report.error_causes:
        add("", _cause(cause))
    if more := sum(report.errors.values()) - sum(cause["rows"] for cause in report.error_causes):
        add("", f"... and {more:,} more")
    if report.template_fields:
        add("template", f"reads {', '.join(report.template_fields)}")
    for note in report.carried_options[:MAX_NOTES]:
        add("carried", note_line(note), "yellow")
    if report.media is not None:
        tokens = f"{report.media['encoded_tokens']:,} tokens to encode, {report.media['prompt_tokens']:,}"
        add("media", f"{media_size(report.media)}: {tokens} of the prompts' tokens")
    form, kept = report.model["checkpoint_format"], report.model["quantization"] == "stored"
    stored = "" if form is None else f", in the numbers of {form}" if kept else f", dequantized from {form}"
    towers = f"; {format_size(report.tower_bytes)} for images and sounds" if report.tower_bytes else ""
    hidden, peak, seconds = report.estimated_hidden_states_bytes, report.estimated_peak_bytes, report.estimated_seconds
    states = f", including {format_size(hidden)} of hidden states" if hidden else ""
    time_text = "not estimated: the device is not available on this machine"
    if seconds is not None:
        time_text = f"at least {seconds:,.1f} s of computation if every row runs to its limit"
    add(
        "prompt tokens",
        f"{report.prompt_tokens:,} (to compute {report.computed_prompt_tokens:,}, "
        f"sharing ratio {report.sharing_ratio:.2f})",
    )
    add("output tokens", f"at most {report.max_completion_tokens:,}")
    add("duplicate rows", f"{report.deduplicated_rows:,} greedy rows copy the result of an equal row")
    add("weights", f"{format_size(report.model['weight_bytes'])} of {report.model['dtype']}{stored}{towers}")
    add(
        "KV cache",
        f"{format_kv_peak(report.kv_peak_bytes_by_group)} at the peak "
        f"({format_size(report.model['kv_bytes_per_token'])} a token, page waste {report.page_waste:.1%})",
    )
    if report.ranks:
        add("processes", _rank_line(report.ranks))
    if (offload := report.offload) is not None:
        copied = "all fit, and none is copied"
        if offload["streamed_blocks"]:
            rate = f"{offload['pass_seconds']:.2g} s at {format_size(int(offload['copy_bytes_per_second']))}/s"
            copied = f"{offload['streamed_blocks']} of {offload['blocks']} blocks, "
            copied += f"{format_size(offload['pass_bytes'])}, are copied to it in every step, at least {rate}"
        on_device = format_size(offload["device_weight_bytes"])
        add("offload", f"{on_device} of the device are for weights: {copied}")
        cache, step = format_size(offload["kv_bytes"]), format_size(offload["step_bytes"])
        add("", f"{cache} are left for keys and values, {step} for steps of up to {offload['rows']:,} rows")
        if offload["kv_streamed_layers"]:
            most = f"{format_size(offload['kv_pass_bytes'])} in at least {offload['kv_pass_seconds']:.2g} s"
            copied = f"those of {offload['kv_streamed_layers']} of {offload['kv_layers']} layers are copied in a step"
            add("", f"keys and values take {format_size(offload['kv_device_bytes'])} of it; {copied}, up to {most}")
    if peak is not None:
        whose = ", of the first process" if report.ranks else ""
        add("memory", f"about {format_size(peak)} at the peak, program included{whose}")
    add(
        "steps",
        f"{report.estimated_steps:,} if every row runs to its limit, slots "
        f"{report.estimated_occupancy:.0%} full ({report.estimated_tail_efficiency:.0%} in the last "
        f"{report.estimated_tail_steps:,}, with no sample waiting)",
    )
    add("output", f"about {format_size(report.estimated_output_bytes)}{states}")
    add("time", time_text)
    for line in report.advice:
        add("advice", line, "yellow")
    if report.grammar_backends:
        total = sum(report.grammar_backends.values())
        add("constraints", f"{total:,} compiled ({by_count(report.grammar_backends)})")
    return lines


def _rank_line(ranks: Sequence[Mapping[str, int]]) -> str:
    """What the processes of --tensor-parallel need, and what the GPUs of this machine have."""
    weights = [format_size(size) for size in sorted({rank["weights"] for rank in ranks})]
    each = weights[0] if len(weights) == 1 else f"{weights[0]} to {weights[-1]}"
    most = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    least, whole = most["weights"] + most["step"], most["weights"] + most["step"] + most["kv_peak"]
    line = (
        f"{len(ranks)}, each with {each} of weights, up to {format_size(most['kv_peak'])} of keys and values and "
        f"{format_size(most['step'])} for a step: at least {format_size(least)} of memory, {format_size(whole)} for "
        "all rows at once"
    )
    if torch.cuda.is_available():
        has = device_memory(torch.device("cuda")).total
        line += f"; a GPU here has {format_size(has)}" + (", which is too little" if has < least else "")
    return line


def _cause(cause: Mapping[str, Any]) -> str:
    """One line for all rows with the same error: how many, the first ones, and the message of the first one."""
    where = f"row {cause['row']} (id {cause['id']!r})"
    if cause["rows"] > 1:
        first = ", ".join(map(str, cause["first_rows"]))
        more = ", ..." if cause["rows"] > len(cause["first_rows"]) else ""
        where = f"{cause['rows']:,} rows ({first}{more}), the first with id {cause['id']!r}"
    return f"{where}: {cause['code']}: {cause['message']}"
