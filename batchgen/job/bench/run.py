"""`run_bench`: gate, tuning, interleaved repeats, figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from batchgen.config import EngineConfig
from batchgen.errors import UsageError
from batchgen.job.bench.chart import check_chart, write_chart
from batchgen.job.bench.definitions import BenchWorkload, find_workloads
from batchgen.job.bench.figures import Context, Figure, Measured, workload_figures
from batchgen.job.bench.floors import FloorWork, count_work
from batchgen.job.bench.gate import check_exact, check_share, gate_rows
from batchgen.job.bench.machine import Products, commit_name, cpu_name, measure_bandwidth, measure_products, versions
from batchgen.job.bench.peers import OURS, REFERENCE, EngineSource, parse_peers
from batchgen.job.bench.process import BenchEngine, EngineProcess, LoadSpec
from batchgen.job.bench.shapes import DEMO, resolve_bench_model
from batchgen.job.bench.table import print_comparison
from batchgen.job.bench.workloads import BenchRow
from batchgen.models.base import ModelSpec
from batchgen.models.folder import check_model_folder
from batchgen.models.load import inspect_model

__all__ = ["BenchConfig", "run_bench"]

_PROBE_TOKENS = 16
"""Tokens generated per row while settings are tried."""


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


Start = Callable[[EngineSource, LoadSpec], AbstractContextManager[BenchEngine]]
"""Starts an engine: in a process of its own, but for tests."""


def run_bench(
    config: BenchConfig, emit: Callable[[str], None], console: Console | None = None, start: Start = EngineProcess
) -> list[Figure]:
    """Measure; every figure goes to `emit` as a JSON line, remarks and the closing table to `console` (stderr).

    Raises:
        UsageError: a workload, peer or option is wrong.
        ModelError: the model cannot be loaded.
        GateRed: an engine is not correct; nothing of its workload was emitted.
        EngineFailed: an engine failed.
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
    bench = _Bench(config, folder, model, [EngineSource(OURS), *peers], start, console)
    figures: list[Figure] = []
    agreed = bench.gate(workloads)
    for figure in bench.measure(workloads, agreed):
        emit(figure.to_json())
        figures.append(figure)
    print_comparison(figures, console)
    if config.chart is not None:
        write_chart(config.chart, figures)
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
class _Bench:
    config: BenchConfig
    folder: str
    model: ModelSpec
    sources: list[EngineSource]
    start: Start
    console: Console

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def gate(self, workloads: Sequence[BenchWorkload]) -> dict[str, list[list[int]]]:
        """Every engine in float32 against the reference; its ids by workload. Processes of the gate end here."""
        spec = self._spec("float32")
        samples = {w.name: gate_rows(w.rows(self.model.vocab_size)) for w in workloads}
        reference = EngineSource(REFERENCE)
        with self.start(reference, spec) as engine:
            expected = {name: engine.generate(rows, {"batch": 1}).outputs for name, rows in samples.items()}
            if reference in self.sources:  # in its padded batches, where it may go wrong
                self._hold(engine, samples, expected)
        for source in self.sources:
            if source != reference:
                with self.start(source, spec) as engine:
                    self._hold(engine, samples, expected)
        return expected

    def _hold(
        self, engine: BenchEngine, samples: Mapping[str, list[BenchRow]], expected: Mapping[str, list[list[int]]]
    ) -> None:
        for name, rows in samples.items():
            check_exact(name, engine, engine.settings[0], rows, expected[name])
        self.console.print(f"gate: {engine.name} equals the reference in float32", style="dim")

    def measure(self, workloads: Sequence[BenchWorkload], expected: Mapping[str, list[list[int]]]) -> Iterator[Figure]:
        """Interleaved repeats of each workload on all engines, each in a process that lives throughout."""
        tied = "lm_head.weight" not in check_model_folder(self.folder).tensors
        with ExitStack() as stack:
            engines = [stack.enter_context(self.start(source, self._spec(self.dtype))) for source in self.sources]
            for workload in workloads:
                rows = workload.rows(self.model.vocab_size)
                measured = [self._prepare(workload, engine, rows, expected[workload.name]) for engine in engines]
                products = []
                for number in range(self.config.repeat):
                    products.append(measure_products(self.model.dtype, self.model.device))
                    for engine, one in zip(engines, measured, strict=True):
                        one.passes.append(engine.generate(rows, one.setting))
                    self.console.print(_progress(workload, number, self.config.repeat, measured), style="dim")
                work = count_work(rows, self.model, tied=tied)
                context = self._context(max(products, key=lambda one: one.flops), work)
                yield from workload_figures(workload.name, self.config.model, measured, work, context)

    def _prepare(
        self, workload: BenchWorkload, engine: BenchEngine, rows: Sequence[BenchRow], expected: list[list[int]]
    ) -> Measured:
        """Check the engine in the measured dtype, which also warms it up, and find its best setting."""
        share = check_share(workload.name, engine, engine.settings[0], gate_rows(rows), expected)
        setting = _best_setting(engine, rows)
        return Measured(engine.name, engine.version, engine.dtype, engine.device, engine.threads, setting, share)

    def _context(self, products: Products, work: FloorWork) -> Context:
        bandwidth = measure_bandwidth(self.model.device, work.resident_bytes)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return Context(cpu_name(), commit_name(), self.config.repeat, products, bandwidth, versions(), now)

    def _spec(self, dtype: str) -> LoadSpec:
        return LoadSpec(self.folder, dtype, self.model.device.type, torch.get_num_threads())


def _best_setting(engine: BenchEngine, rows: Sequence[BenchRow]) -> Mapping[str, int]:
    """Try each setting twice on rows enough to fill it, with part of their output; the fastest per row wins."""
    if len(engine.settings) == 1:
        return engine.settings[0]

    def seconds_per_row(setting: Mapping[str, int]) -> float:
        batch = [replace(row, max_new=min(row.max_new, _PROBE_TOKENS)) for row in rows[: setting["batch"]]]
        return min(engine.generate(batch, setting).seconds for _ in range(2)) / len(batch)

    usable = [s for i, s in enumerate(engine.settings) if i == 0 or engine.settings[i - 1]["batch"] < len(rows)]
    return min(usable, key=seconds_per_row)


def _progress(workload: BenchWorkload, number: int, repeat: int, measured: Sequence[Measured]) -> str:
    rates = ", ".join(f"{one.name} {one.rates('seconds')[-1]:,.1f}" for one in measured)
    return f"{workload.name} {number + 1}/{repeat}: {rates} tokens/s"
