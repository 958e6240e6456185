"""The GPU workloads at real shapes with random weights: throughput, floors, other engines, slowdowns, start-up.

batchgen has one process per model. Then each other engine runs in a process while one of batchgen waits, which runs
the same rows right after it. If time is short a workload is run in part; `factor` of each figure is that part.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from random import Random
from typing import Any

import torch

from batchgen.bench.process import OURS, BenchEngine, EngineFailed, EngineSource, LoadSpec
from batchgen.bench.shapes import Shape
from batchgen.bench.workloads import GPU_WORKLOADS, BenchRow, Level, Workload
from batchgen.engine.machine import gpu_limits
from tests.gpu.device import Gpu
from tests.gpu.engines import PROBE, Rate, best_within, part_of, peer, rate, start
from tests.gpu.floors import device_floor
from tests.gpu.goals import device_rates, with_goal
from tests.gpu.models import model_folder, model_shape
from tests.gpu.outcomes import Absent
from tests.gpu.registry import case
from tests.gpu.report import Measure

PEERS = ("transformers-continuous", "vllm")
AGAINST_PEERS = ("w-nano", "w-prefix")
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
PAIRS = 3
GRACE = 30.0
"""Seconds past the stage's time after which batchgen's process counts as hung."""

TOYS = {
    "w-nano": Workload("w-nano", "toy", (Level(4, (4, 9)),), (2, 5)),
    "w-prefix": Workload("w-prefix", "toy", (Level(1, (40, 40)), Level(5, (3, 3))), (3, 3)),
    "w-unshared": Workload("w-unshared", "toy", (Level(3, (43, 43)),), (3, 3)),
    "w-tree": Workload("w-tree", "toy", (Level(1, (9, 9)), Level(2, (8, 8)), Level(2, (4, 4))), (3, 3), samples=2),
}
SLOWED = Workload("slowdown", "512 prompts of 128 tokens, 256 out", (Level(512, (128, 128)),), (256, 256))
TOY_SLOWED = Workload("slowdown", "toy", (Level(4, (5, 5)),), (3, 3))


@dataclass(frozen=True, slots=True)
class PlannedWorkload:
    """One workload of a model."""

    workload: str
    share: float
    """Share of the model's time."""
    against: str = ""
    """Comparison with "flat" (no shared attention over prefixes) or "w-unshared" (prompts without shared prefixes)."""


PLAN: dict[str, tuple[PlannedWorkload, ...]] = {
    "0.6b": (
        PlannedWorkload("w-nano", 0.3),
        PlannedWorkload("w-prefix", 0.4, "flat"),
        PlannedWorkload("slowdown", 0.3),
    ),
    "1b": (PlannedWorkload("w-tree", 0.7), PlannedWorkload("w-nano", 0.3)),
    "8b": (PlannedWorkload("w-nano", 0.4), PlannedWorkload("w-prefix", 0.6, "w-unshared")),
}
WEIGHTS = {"throughput[model=0.6b]": 0.3, "throughput[model=8b]": 0.3, "throughput[model=1b]": 0.1}
WEIGHTS |= {"start": 0.05, **{f"engine={name}": 0.125 for name in PEERS}, "form=fp8": 0.1, "form=int4": 0.1}
"""Part of a case's name -> share of the stage's time."""


@case(
    "workloads", "workloads", [{"model": m} for m in ("0.6b", "8b", "1b")], [{"model": m} for m in ("0.6b", "8b", "1b")]
)
def throughput(gpu: Gpu, *, model: str) -> Iterator[Measure | str]:
    end = time.monotonic() + slot(gpu, f"throughput[model={model}]")
    with model_folder(gpu, model) as folder:
        runs = Runs(gpu, model, folder)
        try:
            with start(gpu, EngineSource(OURS), runs.spec, gpu.left() + GRACE) as ours:
                left = sum(item.share for item in PLAN[model])
                for item in PLAN[model]:
                    seconds = max(0.0, end - time.monotonic()) * item.share / left
                    left -= item.share
                    slowed = item.workload == "slowdown"
                    yield from runs.slowdowns(ours, seconds) if slowed else runs.item(ours, item, seconds)
        except EngineFailed as error:
            yield str(error)


@case("workloads", "start", [{"model": "0.6b"}], [{"model": "0.6b"}])
def start_up(gpu: Gpu, *, model: str) -> Iterator[Measure | str]:
    """Time from the start of a process to the first token of one row, with kernels compiled by earlier processes."""
    with model_folder(gpu, model) as folder:
        begin = time.monotonic()
        try:
            with start(gpu, EngineSource(OURS), engine_spec(gpu, folder), gpu.left() + GRACE) as ours:
                ours.generate([BenchRow([5, 6, 7], 1)], {})
                seconds = time.monotonic() - begin
        except EngineFailed as error:
            yield str(error)
            return
    yield with_goal(Measure("start", model, "seconds", seconds, "s"))


@case(
    "workloads",
    "peers",
    [{"model": "0.6b", "engine": name} for name in PEERS],
    [{"model": "0.6b", "engine": name} for name in PEERS],
)
def against_peers(gpu: Gpu, *, model: str, engine: str) -> Iterator[Measure | str]:
    """Throughput of another engine, and batchgen's speedup on the same rows."""
    end = time.monotonic() + slot(gpu, f"engine={engine}")
    with model_folder(gpu, model) as folder:
        runs = Runs(gpu, model, folder)
        try:
            with (
                start(gpu, peer(engine), runs.spec, gpu.left() + GRACE) as other,
                start(gpu, EngineSource(OURS), runs.spec, gpu.left() + GRACE) as ours,
            ):
                for number, name in enumerate(AGAINST_PEERS):
                    seconds = (end - time.monotonic()) / (len(AGAINST_PEERS) - number)
                    yield from runs.against_peer(ours, other, engine, name, seconds)
        except (Absent, EngineFailed, AssertionError) as error:
            yield f"{engine}: {error}"


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of one model."""

    gpu: Gpu
    model: str
    folder: str

    @property
    def spec(self) -> LoadSpec:
        return engine_spec(self.gpu, self.folder)

    @property
    def shape(self) -> Shape:
        return model_shape(self.gpu, self.model)

    def workload(self, name: str) -> Workload:
        """The workload `name`; in a toy run its small version."""
        return TOYS[name] if self.gpu.toy else GPU_WORKLOADS[name]

    def item(self, ours: BenchEngine, item: PlannedWorkload, seconds: float) -> Iterator[Measure | str]:
        """Throughput of batchgen, and its comparison without sharing, in equal parts of the time."""
        whole = 1 + bool(item.against)
        end = time.monotonic() + seconds
        workload = self.workload(item.workload)
        found = best_within(ours, workload, {}, self.shape.vocab, seconds / whole)
        yield self.throughput_of(workload, ours, found)
        if item.against:
            yield from self._without_sharing(ours, item, found, end - time.monotonic())

    def slowdowns(self, ours: BenchEngine, seconds: float) -> Iterator[Measure | str]:
        """Slowdown by each kind of special row, from pairs of runs: plain greedy rows, then special rows."""
        workload = TOY_SLOWED if self.gpu.toy else SLOWED
        plain = workload.rows(self.shape.vocab)
        end = time.monotonic() + seconds
        for number, (name, fields) in enumerate(KINDS.items()):
            if name == "constrained" and find_spec("xgrammar") is None:
                yield "slowdown of constrained rows: xgrammar is not importable"
                continue
            rows = [replace(row, fields=fields(i)) for i, row in enumerate(plain)]
            until = time.monotonic() + (end - time.monotonic()) / (len(KINDS) - number)
            try:
                slower, base = pairs(ours, plain, rows, until)
            except EngineFailed as error:
                yield f"slowdown of {name} rows: {error}"
                continue
            detail = {"pairs": len(slower), "min": min(slower), "max": max(slower), "plain_tokens_per_second": base}
            made = Measure(workload.name, self.model, name, statistics.median(slower), "% slower", detail=detail)
            yield with_goal(made)

    def _without_sharing(
        self, ours: BenchEngine, item: PlannedWorkload, found: Rate, seconds: float
    ) -> Iterator[Measure]:
        """Speedup over running without shared attention, or over prompts without shared prefixes."""
        workload = self.workload(item.workload)
        if item.against == "flat":
            other = best_within(ours, workload, {"flat": 1}, self.shape.vocab, seconds * 0.8)
            found = rate(ours, workload, other.factor, {}, self.shape.vocab)
            name = "times_flat"
        else:
            other = best_within(ours, self.workload(item.against), {}, self.shape.vocab, seconds)
            name = "times_unshared"
        times = found.tokens_per_second / other.tokens_per_second
        detail = {"other_tokens_per_second": other.tokens_per_second, "other_factor": other.factor}
        made = Measure(workload.name, self.model, name, times, "x", factor=found.factor, detail=detail)
        yield with_goal(made)

    def against_peer(
        self, ours: BenchEngine, other: BenchEngine, name: str, workload_name: str, seconds: float
    ) -> Iterator[Measure]:
        """Throughput of another engine at its largest batch size, and batchgen's speedup on the same rows."""
        workload, setting = self.workload(workload_name), other.settings[-1]
        theirs = best_within(other, workload, setting, self.shape.vocab, 0.7 * seconds)
        rate(ours, workload, min(theirs.factor, PROBE), {}, self.shape.vocab)  # compiles
        mine = rate(ours, workload, theirs.factor, {}, self.shape.vocab)
        yield replace(self.throughput_of(workload, other, theirs), goal=None, moonshot=None, predicted=None)
        times = mine.tokens_per_second / theirs.tokens_per_second
        detail = {"peer": f"{other.name} {other.version}", "setting": setting}
        made = Measure(workload.name, self.model, f"times_{name}", times, "x", factor=theirs.factor, detail=detail)
        yield with_goal(made)

    def throughput_of(self, workload: Workload, engine: BenchEngine, found: Rate) -> Measure:
        """The measure of a throughput, with the floor of the part that was run."""
        counted = found.counted
        detail = {"seconds": found.seconds, "dtype": engine.dtype, **counted}
        if "host_ms" in counted:
            detail["graph_share"] = counted["graph_replays"] / max(1, counted["steps"])
            detail["outside_steps"] = found.seconds - (counted["compute_ms"] + counted["host_ms"]) / 1e3
        made = Measure(
            workload.name,
            self.model,
            "output_tokens_per_second",
            found.tokens_per_second,
            "tokens/s",
            engine=engine.name,
            version=engine.version,
            factor=found.factor,
            detail=detail,
        )
        rates = device_rates(self.gpu.name)
        if rates is not None:
            rows = part_of(workload, found.factor)[0].rows(self.shape.vocab)
            at_once = min(gpu_limits(self.shape.parameters)[0], sum(row.samples for row in rows))
            floor = device_floor(rows, self.shape, rates, at_once)
            share = found.tokens_per_second / floor.serial
            made = replace(made, floor=floor.overlap, serial_floor=floor.serial, share=share)
        return with_goal(made)


def pairs(
    engine: BenchEngine, plain: Sequence[BenchRow], rows: Sequence[BenchRow], until: float
) -> tuple[list[float], float]:
    """Slowdowns of `rows` relative to `plain` in per cent, from alternating runs until `until`, at least one pair, and
    the highest rate of `plain`, in tokens per second.
    """
    short = [replace(row, max_new=min(row.max_new, 8)) for row in rows]
    engine.generate(short, {})  # compiles what these rows need
    slower: list[float] = []
    best = 0.0
    while len(slower) < PAIRS and (not slower or time.monotonic() < until):
        base, other = (engine.generate(each, {}) for each in (plain, rows))
        slower.append(100.0 * (1.0 - (other.tokens / other.seconds) / (base.tokens / base.seconds)))
        best = max(best, base.tokens / base.seconds)
    return slower, best


def _sampled(number: int) -> Mapping[str, Any]:
    rng = Random(number)
    fields = {"temperature": rng.choice([0.7, 1.0, 1.3]), "seed": number, "top_k": rng.choice([-1, 20, 50])}
    return fields | {"top_p": rng.choice([0.8, 0.95, 1.0]), "min_p": rng.choice([0.0, 0.05])}


KINDS: dict[str, Callable[[int], Mapping[str, Any]]] = {
    "logprobs": lambda number: {"return_logprob": True, "top_logprobs_num": 20},
    "states": lambda number: {"return_hidden_states": {"layers": [-1], "tokens": "output"}},
    "constrained": lambda number: {"json_schema": SCHEMA} if number % 2 else {},
    "sampled": _sampled,
}
"""Name -> fields of a row, by its number."""


def slot(gpu: Gpu, key: str) -> float:
    """Seconds of the stage's remaining time for the current case, whose key in `WEIGHTS` is given."""
    rest = sum(weight for other, weight in WEIGHTS.items() if any(other in name for name in gpu.waiting))
    return min(gpu.left(), 1e6) * WEIGHTS[key] / rest


def engine_spec(gpu: Gpu, folder: str) -> LoadSpec:
    dtype, device = ("float32", "cpu") if gpu.toy else ("bfloat16", "cuda")
    return LoadSpec(folder, dtype, device, torch.get_num_threads(), {})
