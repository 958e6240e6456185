"""`run_bench`: gate, tuning, interleaved repeats, figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from batchgen.config import EngineConfig
from batchgen.errors import UsageError
from batchgen.job.bench.absent import OF_BATCHGEN, Absent
from batchgen.job.bench.chart import check_chart, write_chart
from batchgen.job.bench.definitions import BenchWorkload, find_workloads
from batchgen.job.bench.figures import Context, Figure, Measured, workload_figures
from batchgen.job.bench.floors import FloorWork, count_work
from batchgen.job.bench.gate import check_exact, check_peer, check_share, gate_rows
from batchgen.job.bench.machine import Products, commit_name, cpu_name, measure_bandwidth, measure_products, versions
from batchgen.job.bench.peers import OURS, REFERENCE, EngineSource, parse_peers
from batchgen.job.bench.process import BenchEngine, EngineProcess, LoadSpec
from batchgen.job.bench.shapes import DEMO, bench_cache, resolve_bench_model
from batchgen.job.bench.table import print_comparison
from batchgen.job.bench.tuning import best_setting
from batchgen.job.bench.workloads import BenchRow
from batchgen.models.base import ModelSpec
from batchgen.models.folder import check_model_folder
from batchgen.models.load import inspect_model

__all__ = ["BenchConfig", "run_bench"]


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What the command line gave."""

    workloads: tuple[str, ...] = ()
    """Names or .toml files; none: as `find_workloads` has it."""
    model: str = "random:135m"
    peers: str = "auto"
    repeat: int = 5
    dtype: str = "auto"
    """As the engine takes it."""
    device: str = "auto"
    threads: int | None = None
    chart: Path | None = None
    """An .html or .png file to draw the figures to."""
    timeout: float = 900.0
    """Seconds that an engine has for one answer: to load (and convert) the model, or to generate one pass."""


Start = Callable[[EngineSource, LoadSpec], AbstractContextManager[BenchEngine]]
"""Starts an engine: in a process of its own, but for tests."""


def run_bench(
    config: BenchConfig, emit: Callable[[str], None], console: Console | None = None, start: Start | None = None
) -> list[Figure]:
    """Measure; every figure goes to `emit` as a JSON line, remarks and the closing table to `console` (stderr).

    A peer that fails, answers too late or is not correct is left out, with its reason on `console`.

    Raises:
        UsageError: a workload, peer or option is wrong.
        ModelError: the model cannot be loaded.
        GateRed: batchgen is not correct; nothing of its workload was emitted.
        EngineFailed: batchgen failed, or no peer of those asked for could be measured.
    """
    console = console or Console(stderr=True, highlight=False)
    workloads = find_workloads(config.workloads, demo=config.model == DEMO)
    peers = parse_peers(config.peers)
    if config.chart is not None:
        check_chart(config.chart)
    if config.repeat < 1:
        raise UsageError("--repeat must be at least 1")
    if config.threads:
        torch.set_num_threads(config.threads)
    options: dict[str, Any] = {"dtype": config.dtype, "device": config.device}
    checked = EngineConfig(**options)
    folder = resolve_bench_model(config.model, _where(checked))
    model = inspect_model(folder, dtype=checked.dtype, device=checked.device)
    _check_lengths(workloads, model)
    start = start or partial(EngineProcess, patience=config.timeout)
    bench = _Bench(config, folder, model, [EngineSource(OURS), *peers], start, console, Absent(console))
    figures: list[Figure] = []
    agreed = bench.gate(workloads)
    for figure in bench.measure(workloads, agreed):
        emit(figure.to_json())
        figures.append(figure)
    print_comparison(figures, console)
    if config.chart is not None:
        write_chart(config.chart, figures)
    for line in bench.absent.lines():
        console.print(line, style="yellow", soft_wrap=True, markup=False)
    bench.check_peers(workloads)
    return figures


def _where(config: EngineConfig) -> torch.device:
    """Where random weights are drawn."""
    cuda = config.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if cuda else "cpu")


def _check_lengths(workloads: Sequence[BenchWorkload], model: ModelSpec) -> None:
    for workload in workloads:
        if workload.longest > model.context_length:
            raise UsageError(
                f"workload {workload.name} has rows of up to {workload.longest} tokens, the model's context is "
                f"{model.context_length}; name another --model or workload"
            )


@dataclass(frozen=True, slots=True)
class _Gate:
    """What the gate found, by workload."""

    rows: dict[str, list[BenchRow]]
    """The rows it checks."""
    expected: dict[str, list[list[int]]] = field(default_factory=dict)
    """The reference's ids of each."""
    equal: dict[tuple[str, str], float] = field(default_factory=dict)
    """(peer, workload) -> share of rows with these ids in float32."""


@dataclass(frozen=True, slots=True)
class _Bench:
    config: BenchConfig
    folder: str
    model: ModelSpec
    sources: list[EngineSource]
    start: Start
    console: Console
    absent: Absent

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def check_peers(self, workloads: Sequence[BenchWorkload]) -> None:
        """Hold that a peer, if any were asked for, is left on some workload."""
        self.absent.check([source.name for source in self.sources], [workload.name for workload in workloads])

    def gate(self, workloads: Sequence[BenchWorkload]) -> _Gate:
        """Every engine in float32 against the reference. Processes of the gate end here."""
        spec = self._spec("float32")
        peers = any(source.name not in OF_BATCHGEN for source in self.sources)
        gate = _Gate({w.name: gate_rows(w.rows(self.model.vocab_size), peers=peers) for w in workloads})
        reference = EngineSource(REFERENCE)
        with self.start(reference, spec) as engine:
            for name, rows in gate.rows.items():
                gate.expected[name] = engine.generate(rows, {"batch": 1}).outputs
            if reference in self.sources:  # in its padded batches, where it may go wrong
                self._hold(engine, gate)
        for source in self.sources:
            if source != reference:
                with self.absent.on_failure(source.name), self.start(source, spec) as engine:
                    self._hold(engine, gate)
        self.check_peers(workloads)
        return gate

    def _hold(self, engine: BenchEngine, gate: _Gate) -> None:
        for name, rows in gate.rows.items():
            if engine.name in OF_BATCHGEN:
                check_exact(name, engine, engine.settings[0], rows, gate.expected[name])
            elif not self.absent.has(engine.name):
                with self.absent.on_failure(engine.name, name):
                    equal = check_peer(name, engine, engine.settings[0], rows, gate.expected[name])
                    gate.equal[engine.name, name] = equal
        shares = [gate.equal.get((engine.name, w), 1.0) for w in gate.rows if not self.absent.has(engine.name, w)]
        if shares:
            least = min(shares)
            told = "equals the reference" if least == 1 else f"has the reference's ids in {least:.0%} of rows"
            self.console.print(f"gate: {engine.name} {told} in float32", style="dim")

    def measure(self, workloads: Sequence[BenchWorkload], gate: _Gate) -> Iterator[Figure]:
        """Interleaved repeats of each workload on all engines, each in a process that lives throughout."""
        tied = "lm_head.weight" not in check_model_folder(self.folder).tensors
        with ExitStack() as stack:
            engines = self._start_all(stack, workloads)
            for workload in workloads:
                rows = workload.rows(self.model.vocab_size)
                measured = self._prepare(workload, engines, rows, gate)
                products = []
                for number in range(self.config.repeat):
                    products.append(measure_products(self.model.dtype, self.model.device))
                    for engine, one in list(measured):
                        with self.absent.on_failure(engine.name, workload.name):
                            one.passes.append(engine.generate(rows, one.setting))
                    measured = [pair for pair in measured if not self.absent.has(pair[0].name, workload.name)]
                    done = [one for _, one in measured]
                    self.console.print(_progress(workload, number, self.config.repeat, done), style="dim")
                work = count_work(rows, self.model, tied=tied)
                context = self._context(max(products, key=lambda one: one.flops), work)
                yield from workload_figures(workload.name, self.config.model, done, work, context)

    def _start_all(self, stack: ExitStack, workloads: Sequence[BenchWorkload]) -> list[BenchEngine]:
        engines: list[BenchEngine] = []
        for source in self.sources:
            if not all(self.absent.has(source.name, workload.name) for workload in workloads):
                with self.absent.on_failure(source.name):
                    engines.append(stack.enter_context(self.start(source, self._spec(self.dtype))))
        return engines

    def _prepare(
        self, workload: BenchWorkload, engines: Sequence[BenchEngine], rows: Sequence[BenchRow], gate: _Gate
    ) -> list[tuple[BenchEngine, Measured]]:
        """Find each engine's best setting, which also warms it up, and check it there in the measured dtype."""
        found = []
        for engine in engines:
            if self.absent.has(engine.name, workload.name):
                continue
            with self.absent.on_failure(engine.name, workload.name):
                setting = best_setting(engine, rows)
                checked, expected = gate.rows[workload.name], gate.expected[workload.name]
                share = check_share(workload.name, engine, setting, checked, expected)
                about = engine.version, engine.dtype, engine.device, engine.threads
                equal = gate.equal.get((engine.name, workload.name), 1.0)
                found.append((engine, Measured(engine.name, *about, setting, share, rows_equal=equal)))
        return found

    def _context(self, products: Products, work: FloorWork) -> Context:
        bandwidth = measure_bandwidth(self.model.device, work.resident_bytes)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return Context(cpu_name(), commit_name(), self.config.repeat, products, bandwidth, versions(), now)

    def _spec(self, dtype: str) -> LoadSpec:
        where = self.model.device.type
        return LoadSpec(self.folder, dtype, where, torch.get_num_threads(), cache=str(bench_cache() / "converted"))


def _progress(workload: BenchWorkload, number: int, repeat: int, measured: Sequence[Measured]) -> str:
    rates = ", ".join(f"{one.name} {one.rates('seconds')[-1]:,.1f}" for one in measured)
    return f"{workload.name} {number + 1}/{repeat}: {rates} tokens/s"
