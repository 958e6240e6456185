"""`run_bench`: gate, tuning, interleaved repeats, figures."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from batchgen.config import EngineConfig
from batchgen.errors import UsageError
from batchgen.job.bench.absent import Absent
from batchgen.job.bench.adapters import adapter_folders, adapter_parameters, merge_adapter
from batchgen.job.bench.config import BenchConfig
from batchgen.job.bench.definitions import BenchWorkload, find_workloads
from batchgen.job.bench.figures import Context, Figure, Measured, workload_figures
from batchgen.job.bench.floors import count_work
from batchgen.job.bench.gate import check_lengths
from batchgen.job.bench.gating import Gate
from batchgen.job.bench.machine import commit_name, cpu_name, versions
from batchgen.job.bench.peers import OF_BATCHGEN, OURS, REFERENCE, EngineSource, knows_fields, parse_peers
from batchgen.job.bench.process import BenchEngine, EngineProcess, LoadSpec
from batchgen.job.bench.rates import Products, measure_bandwidth, measure_products
from batchgen.job.bench.shapes import DEMO, bench_cache, resolve_bench_model
from batchgen.job.bench.stored import read_figures
from batchgen.job.bench.table import print_comparison
from batchgen.job.bench.tuning import best_setting
from batchgen.job.bench.workloads import AdapterSet, BenchRow, plain
from batchgen.models.base import ModelSpec
from batchgen.models.folder import check_model_folder
from batchgen.models.load import inspect_model

__all__ = ["BenchConfig", "run_bench"]

_BEFORE = 3
"""Times that products are measured before the first workload; then before every repeat."""
_MOST_MERGED = 2_000_000_000
"""Parameters of a model that is copied in float32 to check adapters."""


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
    if config.threads:
        torch.set_num_threads(config.threads)
    options: dict[str, Any] = {"dtype": config.dtype, "device": config.device}
    checked = EngineConfig(**options)
    folder = resolve_bench_model(config.model, _where(checked))
    model = inspect_model(folder, dtype=checked.dtype, device=checked.device)
    _check_lengths(workloads, model)
    start = start or partial(EngineProcess, patience=config.timeout)
    sources = [EngineSource(OURS), *peers]
    tuned = [] if config.tuned is None else read_figures(config.tuned, "--tuned").figures
    bench = _Bench(config, folder, model, sources, start, console, Absent(console), commit_name(), tuned)
    figures: list[Figure] = []
    agreed = bench.gate(workloads)
    for figure in bench.measure(workloads, agreed):
        emit(figure.to_json())
        figures.append(figure)
    measured = {(figure.engine, figure.workload) for figure in figures}
    for left in bench.absent.left_out(config.model, [workload.name for workload in workloads], measured):
        emit(left.to_json())
    print_comparison(figures, console)
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
class _Bench:
    config: BenchConfig
    folder: str
    model: ModelSpec
    sources: list[EngineSource]
    start: Start
    console: Console
    absent: Absent
    commit: str | None
    """Of batchgen as it was when the call began."""
    tuned: Sequence[Figure]
    """Of an earlier run."""

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def check_peers(self, workloads: Sequence[BenchWorkload]) -> None:
        """Hold that a peer, if any were asked for, is left on some workload that it can run."""
        self.absent.check((s.name, w.name) for s in self.sources for w in workloads if self._can(s.name, w))

    def gate(self, workloads: Sequence[BenchWorkload]) -> Gate:
        """Every engine in float32 against the reference. Processes of the gate end here."""
        peers = any(source.name not in OF_BATCHGEN for source in self.sources)
        gate = Gate.of(workloads, self.model.vocab_size, peers=peers)
        reference, spec = EngineSource(REFERENCE), self._spec("float32", workloads)
        with self.start(reference, spec) as engine:
            gate.ask_reference(engine)
            if reference in self.sources:  # in its padded batches, where it may go wrong
                self._hold(engine, gate)
        for workload in workloads:
            if workload.adapters is not None:
                self._ask_merged(gate, workload, workload.adapters)
        for source in self.sources:
            if source != reference:
                with (
                    self.absent.on_failure(source.name),
                    self.start(source, self._spec("float32", workloads)) as engine,
                ):
                    self._hold(engine, gate)
        self.check_peers(workloads)
        return gate

    def _ask_merged(self, gate: Gate, workload: BenchWorkload, adapters: AdapterSet) -> None:
        """What the reference says with the first adapter merged into its weights, which takes a copy of them."""
        if self.model.parameters > _MOST_MERGED:
            self.console.print(f"gate: {workload.name}: the model is too large to merge an adapter", style="dim")
            return
        with tempfile.TemporaryDirectory(prefix="batchgen-bench-") as scratch:
            merge_adapter(self.folder, adapter_folders(self.folder, adapters)[0][1], Path(scratch))
            spec = replace(self._spec("float32", []), model=scratch)
            with self.start(EngineSource(REFERENCE), spec) as engine:
                gate.ask_merged(workload, engine)

    def _hold(self, engine: BenchEngine, gate: Gate) -> None:
        for workload in gate.workloads:
            if not self._can(engine.name, workload):
                asked = ", ".join([*workload.fields, *(["lora_path"] if workload.adapters else [])])
                self.absent.leave_out(engine.name, workload.name, f"its script does not ask it for {asked}")
            if not self._skips(engine.name, workload):
                with self.absent.on_failure(engine.name, workload.name):
                    gate.hold(workload, engine, self.folder)
        held = [w.name for w in gate.workloads if not self._skips(engine.name, w)]
        if held:
            least = min(gate.equal.get((engine.name, name), 1.0) for name in held)
            told = "equals the reference" if least == 1 else f"has the reference's ids in {least:.0%} of rows"
            self.console.print(f"gate: {engine.name} {told} in float32", style="dim")

    def _skips(self, engine: str, workload: BenchWorkload) -> bool:
        """Whether an engine is not run on a workload."""
        return self.absent.has(engine, workload.name) or not self._can(engine, workload)

    @staticmethod
    def _can(engine: str, workload: BenchWorkload) -> bool:
        return knows_fields(engine, [*workload.fields, *(["lora_path"] if workload.adapters else [])])

    def measure(self, workloads: Sequence[BenchWorkload], gate: Gate) -> Iterator[Figure]:
        """Interleaved repeats of each workload on all engines, each in a process that lives throughout."""
        # The machine is the same throughout: the best that it ever showed is every workload's floor.
        products = [self._products() for _ in range(_BEFORE)]
        # Adapters in memory are to cost the rows of other workloads nothing, not even what they may not use.
        for adapted in (False, True):
            group = [workload for workload in workloads if (workload.adapters is not None) == adapted]
            if group:
                with ExitStack() as stack:
                    engines = self._start_all(stack, group)
                    for workload in group:
                        yield from self._measure(workload, engines, gate, products)

    def _products(self) -> Products:
        return measure_products(self.model.dtype, self.model.device)

    def _measure(
        self, workload: BenchWorkload, engines: Sequence[BenchEngine], gate: Gate, products: list[Products]
    ) -> Iterator[Figure]:
        rows = workload.rows(self.model.vocab_size)
        tied = "lm_head.weight" not in check_model_folder(self.folder).tensors
        adapter = 0 if workload.adapters is None else adapter_parameters(self.folder, workload.adapters.rank)
        work = count_work(rows, self.model, tied=tied, adapter=adapter)
        measured = self._prepare(workload, engines, rows, gate)
        bandwidth = 0.0
        for number in range(self.config.repeat):
            products.append(self._products())
            bandwidth = max(bandwidth, measure_bandwidth(self.model.device, work.resident_bytes))
            for engine, one in list(measured):
                with self.absent.on_failure(engine.name, workload.name):
                    if workload.special:
                        one.bare.append(engine.generate(plain(rows), one.setting))
                    done = engine.generate(rows, one.setting)
                    check_lengths(workload.name, engine.name, rows, done.outputs)
                    one.passes.append(done)
            measured = [pair for pair in measured if not self.absent.has(pair[0].name, workload.name)]
            kept = [one for _, one in measured]
            self.console.print(_progress(workload, number, self.config.repeat, kept), style="dim")
        context = self._context(max(products, key=lambda one: one.flops), bandwidth)
        yield from workload_figures(workload.name, self.config.model, kept, work, context)

    def _start_all(self, stack: ExitStack, workloads: Sequence[BenchWorkload]) -> list[BenchEngine]:
        engines: list[BenchEngine] = []
        for source in self.sources:
            if not all(self._skips(source.name, workload) for workload in workloads):
                with self.absent.on_failure(source.name):
                    engines.append(stack.enter_context(self.start(source, self._spec(self.dtype, workloads))))
        asked = torch.get_num_threads()
        for engine in engines:
            if engine.threads != asked:
                told = f"{engine.name} computes with {engine.threads} threads, not {asked}: its figures say so"
                self.console.print(told, style="yellow", markup=False)
        return engines

    def _prepare(
        self, workload: BenchWorkload, engines: Sequence[BenchEngine], rows: Sequence[BenchRow], gate: Gate
    ) -> list[tuple[BenchEngine, Measured]]:
        """Find each engine's best setting, check it there in the measured dtype, and run all rows once unmeasured.

        The first pass takes memory from the system, which would cost most an engine that had nothing to try.
        """
        found = []
        for engine in engines:
            if self._skips(engine.name, workload):
                continue
            with self.absent.on_failure(engine.name, workload.name):
                setting = best_setting(engine, rows, self._known(engine, workload))
                share = gate.share(workload, engine, setting)
                engine.generate(rows, setting)
                about = engine.version, engine.dtype, engine.device, engine.threads
                equal = gate.equal.get((engine.name, workload.name), 1.0)
                found.append((engine, Measured(engine.name, *about, setting, share, rows_equal=equal)))
        return found

    def _known(self, engine: BenchEngine, workload: BenchWorkload) -> Mapping[str, int] | None:
        """The setting that an earlier run found to be the engine's best on a workload."""
        if self.config.tuned is None or len(engine.settings) == 1:
            return None
        here = workload.name, self.config.model, engine.name, engine.dtype, engine.device, engine.threads
        for figure in self.tuned:
            there = figure.workload, figure.model, figure.engine, figure.dtype, figure.device, figure.threads
            if there == here:
                said = f"{engine.name} runs {workload.name} as {self.config.tuned} has it: {dict(figure.setting)}"
                self.console.print(said, style="dim", soft_wrap=True, markup=False)
                return figure.setting
        told = f"{self.config.tuned} has no setting of {engine.name} for {workload.name}: the best is found by trying"
        self.console.print(told, style="yellow", soft_wrap=True, markup=False)
        return None

    def _context(self, products: Products, bandwidth: float) -> Context:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return Context(cpu_name(), self.commit, self.config.repeat, products, bandwidth, versions(), now)

    def _spec(self, dtype: str, workloads: Sequence[BenchWorkload]) -> LoadSpec:
        """What engines load for these workloads."""
        where = self.model.device.type
        sets = [workload.adapters for workload in workloads if workload.adapters is not None]
        lora = dict(pair for adapters in sets for pair in adapter_folders(self.folder, adapters))
        options = {"lora": lora} if lora else {}
        cache = str(bench_cache() / "converted")
        return LoadSpec(
            self.folder, dtype, where, torch.get_num_threads(), options, cache, self.config.peer_dtype == "asked"
        )


def _progress(workload: BenchWorkload, number: int, repeat: int, measured: Sequence[Measured]) -> str:
    rates = ", ".join(f"{one.name} {one.rates('seconds')[-1]:,.1f}" for one in measured)
    return f"{workload.name} {number + 1}/{repeat}: {rates} tokens/s"
