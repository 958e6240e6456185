"""`run_bench`: correctness gate, search for each engine's fastest setting, interleaved repeats, figures."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from batchgen.bench.config import BenchConfig
from batchgen.bench.figures import Figure, Measured, SkippedPeers, print_notice, rates, read_figures, workload_figures
from batchgen.bench.floors import count_work, measure_bandwidth, measure_matmul
from batchgen.bench.gate import Gate, check_lengths
from batchgen.bench.machine import commit_name, cpu_name, versions
from batchgen.bench.process import (
    OURS,
    OWN_ENGINES,
    REFERENCE,
    BenchEngine,
    EngineExited,
    EngineFailed,
    EngineProcess,
    EngineSource,
    LoadSpec,
    parse_peers,
)
from batchgen.bench.shapes import (
    DEMO,
    adapter_folders,
    adapter_parameters,
    bench_cache,
    merge_adapter,
    resolve_bench_model,
)
from batchgen.bench.show import print_comparison
from batchgen.bench.workloads import BenchRow, BenchWorkload, find_workloads, plain
from batchgen.config.engine_config import EngineConfig
from batchgen.errors import UsageError
from batchgen.models.base import ModelSpec
from batchgen.models.check import check_model
from batchgen.models.checkpoint.folder import check_model_folder
from batchgen.models.load import checked_spec

_INITIAL_MATMUL_RUNS: Final = 3
"""Number of matrix multiplication measurements before the first workload; one more precedes every repeat."""
_PROBE_TOKENS = 16
"""Number of tokens generated per row while settings are tried."""
_RETRY_FACTOR = 2.0
"""Settings within this factor of the fastest time are tried twice, because the first trial may include a warm-up."""
_BATCHES_PER_TRIAL = 8
"""Number of batches of similar lengths of which only the middle one is tried."""
_FINALIST_FACTOR = 1.15
"""Settings within this factor of the fastest time are tried again with their full output."""
_MAX_MERGED_PARAMETERS: Final = 2_000_000_000
"""Largest number of parameters of a model that is copied in float32 to check adapters."""

Start = Callable[[EngineSource, LoadSpec], AbstractContextManager[BenchEngine]]
"""Starts an engine; `EngineProcess` except in tests."""


def run_bench(
    config: BenchConfig, emit: Callable[[str], None], console: Console | None = None, start: Start | None = None
) -> None:
    """Measure engines on workloads.

    A peer that fails, exceeds its timeout or does not pass the gate is skipped, with the reason on `console`.

    Args:
        config: the options.
        emit: called with one JSON line per figure.
        console: for messages and the closing table; stderr if None.
        start: starts an engine; `EngineProcess` if None.

    Raises:
        UsageError: a workload, peer or option is wrong.
        ModelError: the model cannot be loaded.
        GateFailed: batchgen's output is wrong; no figures were emitted.
        EngineFailed: batchgen failed, or none of the requested peers could be measured.
    """
    console = console or Console(stderr=True, highlight=False)
    workloads = find_workloads(config.workloads, demo=config.model == DEMO)
    sources = [EngineSource(OURS), *parse_peers(config.peers)]
    if config.cpu_threads:
        torch.set_num_threads(config.cpu_threads)
    options: dict[str, Any] = {"dtype": config.dtype, "device": config.device}
    checked = EngineConfig(**options)
    cuda = checked.device != "cpu" and torch.cuda.is_available()  # where random weights are generated
    folder = resolve_bench_model(config.model, torch.device("cuda" if cuda else "cpu"))
    model = checked_spec(check_model(folder), dtype=checked.dtype, device=checked.device)
    for workload in workloads:
        if workload.longest > model.context_length:
            raise UsageError(
                f"workload {workload.name} has rows of up to {workload.longest} tokens, the model's context is "
                f"{model.context_length}; name another --model or workload"
            )
    start = start or partial(EngineProcess, timeout=config.timeout)
    tuned = [] if config.tuned is None else read_figures(config.tuned, "--tuned").figures
    gate = Gate.of(workloads, model.vocab_size, peers=any(source.name not in OWN_ENGINES for source in sources))
    bench = _Bench(
        config, folder, model, workloads, sources, start, console, tuned, gate, SkippedPeers(console, config.model)
    )
    bench.check_outputs()
    figures: list[Figure] = []
    for figure in bench.measure():
        emit(figure.to_json())
        figures.append(figure)
    measured = {(figure.engine, figure.workload) for figure in figures}
    for peer in bench.skipped.records([workload.name for workload in workloads], measured):
        emit(peer.to_json())
    print_comparison(figures, console)
    for line in bench.skipped.lines():
        print_notice(line, console)
    bench.check_peers()


@dataclass(frozen=True, slots=True)
class _Bench:
    """One run of the benchmark: its model, engines and skipped peers."""

    config: BenchConfig
    folder: str
    model: ModelSpec
    workloads: Sequence[BenchWorkload]
    sources: list[EngineSource]
    start: Start
    console: Console
    tuned: Sequence[Figure]
    """Figures of an earlier run, whose settings are reused."""
    gate: Gate
    skipped: SkippedPeers
    commit: str | None = field(default_factory=commit_name)
    """Commit of batchgen at the start of the run."""

    def check_peers(self) -> None:
        """Fail if peers were requested and all are skipped on every workload that they support."""
        pairs = [(source.name, workload) for source in self.sources for workload in self.workloads]
        self.skipped.check((name, workload.name) for name, workload in pairs if _supports(name, workload))

    def check_outputs(self) -> None:
        """Check every engine in float32 against the reference, in processes that end afterwards."""
        reference, spec = EngineSource(REFERENCE), self._load_spec("float32", self.workloads)
        with self.start(reference, spec) as engine:
            self.gate.record_reference(engine)
            if reference in self.sources:  # as a peer it runs padded batches, which need a check too
                self._check_float32(engine)
        self._record_merged()
        for source in self.sources:
            if source != reference:
                with self.skipped.on_failure(source.name), self.start(source, spec) as engine:
                    self._check_float32(engine)
        self.check_peers()

    def _record_merged(self) -> None:
        """Record the reference's ids with the first adapter of a workload merged into a copy of the weights."""
        for workload in self.workloads:
            if workload.adapters is not None and self.model.parameters > _MAX_MERGED_PARAMETERS:
                self._say(f"gate: {workload.name}: the model is too large to merge an adapter")
            elif workload.adapters is not None:
                with tempfile.TemporaryDirectory(prefix="batchgen-bench-") as scratch:
                    (_, adapter), *_ = adapter_folders(self.folder, workload.adapters)
                    merge_adapter(self.folder, adapter, Path(scratch))
                    spec = replace(self._load_spec("float32", []), model=scratch)
                    with self.start(EngineSource(REFERENCE), spec) as engine:
                        self.gate.record_merged(workload, engine)

    def _check_float32(self, engine: BenchEngine) -> None:
        for workload in self.workloads:
            if not _supports(engine.name, workload):
                names = ", ".join([*workload.fields, *(["lora_path"] if workload.adapters else [])] or ["pictures"])
                self.skipped.skip(engine.name, workload.name, f"its script does not support {names}")
            if not self._skips(engine.name, workload):
                with self.skipped.on_failure(engine.name, workload.name):
                    self.gate.check_float32(workload, engine, self.folder)
        passed = [w.name for w in self.workloads if not self._skips(engine.name, w)]
        if passed:
            least = min(self.gate.equal.get((engine.name, name), 1.0) for name in passed)
            text = "equals the reference" if least == 1 else f"has the reference's ids in {least:.0%} of rows"
            self._say(f"gate: {engine.name} {text} in float32")

    def _skips(self, engine: str, workload: BenchWorkload) -> bool:
        """Whether an engine does not run on a workload."""
        return self.skipped.has(engine, workload.name) or not _supports(engine, workload)

    def _say(self, text: str) -> None:
        self.console.print(text, style="dim")

    def measure(self) -> Iterator[Figure]:
        """Run interleaved repeats of each workload on all engines, each in one process throughout."""
        # Floors use the highest rate measured in the whole run, because the machine is the same throughout.
        matmuls = [measure_matmul(self.model.dtype, self.model.device) for _ in range(_INITIAL_MATMUL_RUNS)]
        # Workloads without adapters run in processes without adapters, so that loaded adapters cannot slow them down.
        for adapted in (False, True):
            group = [workload for workload in self.workloads if (workload.adapters is not None) == adapted]
            if group:
                with ExitStack() as stack:
                    engines = self._start_all(stack, group)
                    for workload in group:
                        yield from self._measure(workload, engines, matmuls)

    def _measure(
        self, workload: BenchWorkload, engines: Sequence[BenchEngine], matmuls: list[tuple[float, str]]
    ) -> Iterator[Figure]:
        rows, dtype, device = workload.rows(self.model.vocab_size), self.model.dtype, self.model.device
        tied = "lm_head.weight" not in check_model_folder(self.folder).tensors
        adapter = 0 if workload.adapters is None else adapter_parameters(self.folder, workload.adapters.rank)
        work = count_work(rows, self.model, tied=tied, adapter=adapter)
        measured = self._prepare(workload, engines, rows)
        bandwidth, repeat = 0.0, self.config.repeat
        for number in range(repeat):
            matmuls.append(measure_matmul(dtype, device))
            bandwidth = max(bandwidth, measure_bandwidth(device, work.resident_bytes))
            for engine, one in list(measured):
                with self.skipped.on_failure(engine.name, workload.name):
                    if workload.special:
                        one.plain_passes.append(engine.generate(plain(rows), one.about["setting"]))
                    done = engine.generate(rows, one.about["setting"])
                    check_lengths(workload.name, engine.name, rows, done.outputs)
                    one.passes.append(done)
            measured = [pair for pair in measured if not self.skipped.has(pair[0].name, workload.name)]
            latest = ", ".join(f"{one.name} {rates(one.passes, 'seconds')[-1]:,.1f}" for _, one in measured)
            self._say(f"{workload.name} {number + 1}/{repeat}: {latest} tokens/s")
        flops, form = max(matmuls)
        about = {
            "workload": workload.name, "model": self.config.model, "repeat": repeat, "cpu": cpu_name(),
            "commit": self.commit, "gemm_gflops": flops / 1e9, "gemm_form": form, "bandwidth_gbytes": bandwidth / 1e9,
            "versions": versions(), "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }  # fmt: skip
        yield from workload_figures(about, [one for _, one in measured], work, flops, bandwidth)

    def _start_all(self, stack: ExitStack, workloads: Sequence[BenchWorkload]) -> list[BenchEngine]:
        engines, spec = [], self._load_spec(str(self.model.dtype).removeprefix("torch."), workloads)
        for source in self.sources:
            if not all(self._skips(source.name, workload) for workload in workloads):
                with self.skipped.on_failure(source.name):
                    engines.append(stack.enter_context(self.start(source, spec)))
        requested = torch.get_num_threads()
        for engine in engines:
            if engine.threads != requested:
                text = f"{engine.name} computes with {engine.threads} threads, not {requested}, as its figures show"
                self.console.print(text, style="yellow", markup=False)
        return engines

    def _prepare(
        self, workload: BenchWorkload, engines: Sequence[BenchEngine], rows: Sequence[BenchRow]
    ) -> list[tuple[BenchEngine, Measured]]:
        """Find each engine's best setting, check its output in the measured dtype, and run all rows once as a warm-up.

        The warm-up allocates memory, which would otherwise slow down the first repeat of engines with a single setting.
        """
        prepared = []
        for engine in engines:
            if self._skips(engine.name, workload):
                continue
            with self.skipped.on_failure(engine.name, workload.name):
                setting = best_setting(engine, rows, self._tuned_setting(engine, workload))
                share = self.gate.check_measured_dtype(workload, engine, setting)
                engine.generate(rows, setting)
                about = {name: getattr(engine, name) for name in ("version", "dtype", "device", "threads")}
                about |= {"engine": engine.name, "setting": setting, "agreement": share}
                about["rows_equal"] = self.gate.equal.get((engine.name, workload.name), 1.0)
                prepared.append((engine, Measured(about)))
        return prepared

    def _tuned_setting(self, engine: BenchEngine, workload: BenchWorkload) -> Mapping[str, int] | None:
        """The engine's best setting on a workload in an earlier run; None if there is none."""
        if self.config.tuned is None or len(engine.settings) == 1:
            return None
        here = workload.name, self.config.model, engine.name, engine.dtype, engine.device, engine.threads
        for figure in self.tuned:
            there = figure.workload, figure.model, figure.engine, figure.dtype, figure.device, figure.threads
            if there == here:
                text = f"{engine.name} on {workload.name}: setting {dict(figure.setting)} from {self.config.tuned}"
                self.console.print(text, style="dim", soft_wrap=True, markup=False)
                return figure.setting
        text = f"{self.config.tuned} has no setting of {engine.name} for {workload.name}; trying its settings"
        print_notice(text, self.console)
        return None

    def _load_spec(self, dtype: str, workloads: Sequence[BenchWorkload]) -> LoadSpec:
        """What engines load for these workloads."""
        sets = [workload.adapters for workload in workloads if workload.adapters is not None]
        lora = dict(pair for adapters in sets for pair in adapter_folders(self.folder, adapters))
        return LoadSpec(
            self.folder, dtype, self.model.device.type, torch.get_num_threads(), {"lora": lora} if lora else {},
            str(bench_cache() / "converted"), self.config.peer_dtype == "asked",
        )  # fmt: skip


def _supports(engine: str, workload: BenchWorkload) -> bool:
    if workload.pictures and engine == REFERENCE:
        return True
    return engine in OWN_ENGINES or not (workload.special or workload.pictures)


def best_setting(
    engine: BenchEngine, rows: Sequence[BenchRow], known: Mapping[str, int] | None = None
) -> Mapping[str, int]:
    """The setting with the least time per row.

    Every setting is tried with short outputs; those within `_RETRY_FACTOR` of the fastest are tried again; those within
    `_FINALIST_FACTOR` are tried with full outputs. A setting with a key `batch` (rows computed at a time, of similar
    lengths) is tried on a few batches of all lengths, other settings on all rows.

    If output lengths differ, every trial generates full outputs, because a static batch wastes time after its shorter
    rows end, and the second trial of static batches runs on all rows, because the waste differs between batches. A
    setting that fails, for example for lack of memory, is never the best.

    Args:
        engine: the engine.
        rows: rows of the workload.
        known: best setting of an earlier run; returned without a trial if the engine still has it.

    Raises:
        EngineFailed: every setting failed, or the engine's process has ended.
    """
    if known is not None and known in engine.settings:
        return known
    equal_lengths = len({row.max_new for row in rows}) == 1
    candidates = [s for s in engine.settings if not (equal_lengths and "prompt_first" in s)]
    settings = distinct_settings(candidates, len(rows))
    if len(settings) == 1:
        return settings[0]
    failed: list[EngineFailed] = []

    def seconds_per_row(rows: Sequence[BenchRow], setting: Mapping[str, int]) -> float:
        return engine.generate(rows, setting).seconds / len(rows)

    def trial_seconds(rows: Sequence[BenchRow], setting: Mapping[str, int], *, some: bool = True) -> float:
        try:
            return seconds_per_row(_some_batches(rows, setting) if some else rows, setting)
        except EngineExited:
            raise
        except EngineFailed as problem:
            failed.append(problem)
            return math.inf

    short = [replace(row, max_new=min(row.max_new, _PROBE_TOKENS)) for row in rows] if equal_lengths else list(rows)
    seconds = [trial_seconds(short, setting) for setting in settings]
    if not any(map(math.isfinite, seconds)):
        raise failed[-1]
    retried = [s for s, taken in zip(settings, seconds, strict=True) if taken <= min(seconds) * _RETRY_FACTOR]
    if not equal_lengths and any("batch" in setting for setting in retried):
        if len(retried) == 1:
            return retried[0]
        return min(retried, key=lambda setting: trial_seconds(rows, setting, some=False))
    seconds = [
        min(taken, trial_seconds(short, setting)) if setting in retried else taken
        for setting, taken in zip(settings, seconds, strict=True)
    ]
    finalists = [s for s, taken in zip(settings, seconds, strict=True) if taken <= min(seconds) * _FINALIST_FACTOR]
    if len(finalists) == 1 or short == list(rows):
        return settings[seconds.index(min(seconds))]
    return min(finalists, key=lambda setting: seconds_per_row(rows, setting))


def distinct_settings(settings: Sequence[Mapping[str, int]], rows: int) -> list[Mapping[str, int]]:
    """Settings without duplicates, where batch sizes of at least `rows` count as equal; the first of each is kept."""
    distinct: dict[tuple[tuple[str, int], ...], Mapping[str, int]] = {}
    for setting in settings:
        capped = {key: min(value, rows) if key == "batch" else value for key, value in setting.items()}
        distinct.setdefault(tuple(sorted(capped.items())), setting)
    return list(distinct.values())


def _some_batches(rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Sequence[BenchRow]:
    """Rows for a trial: the middle one or two of every `_BATCHES_PER_TRIAL` batches; all rows if there is no `batch`.

    Batches are formed as the engines form them, longest first.
    """
    if "batch" not in setting:
        return rows
    size, prompt_first = setting["batch"], "prompt_first" in setting
    lengths = [(-row.max_new, -len(row.ids)) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: lengths[i][::-1] if prompt_first else lengths[i])
    batches = [order[begin : begin + size] for begin in range(0, len(order), size)]
    runs = -(-len(batches) // _BATCHES_PER_TRIAL)
    chosen = []
    for i in range(runs):
        run = batches[len(batches) * i // runs : len(batches) * (i + 1) // runs]
        chosen += run[(len(run) - 1) // 2 : len(run) // 2 + 1]
    return [rows[i] for batch in chosen for i in batch]
