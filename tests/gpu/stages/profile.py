"""The time of a steady decode step by kernel, from torch's profiler over some steps of 256 rows.

The wall time of a step and the host's part of it are measured in earlier steps, since the profiler slows the host.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from batchgen.bench.workloads import BenchRow
from tests.gpu.device import Gpu
from tests.gpu.floors import device_floor
from tests.gpu.goals import device_rates, with_goal
from tests.gpu.jobs import engine_on
from tests.gpu.models import model_folder, model_shape
from tests.gpu.registry import case
from tests.gpu.report import Measure, Profile
from tests.gpu.steady import TimedDevice, run_steps, steady_rows

TOP = 15
WARM_UP_STEPS = 12
"""Number of decode steps before the timing starts."""
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


@dataclass(frozen=True, slots=True)
class Span:
    """A profiled event of the device, or of the host in a toy run; times in microseconds."""

    name: str
    begin: float
    end: float


@case(
    "profile",
    "decode",
    [{"model": model, "rows": 256, "prompt": 512, "steps": 20} for model in ("0.6b", "8b")],
    [{"model": "0.6b", "rows": 3, "prompt": 5, "steps": 2}],
)
def decode_step(gpu: Gpu, *, model: str, rows: int, prompt: int, steps: int) -> Iterator[Measure | Profile]:
    shape = model_shape(gpu, model)
    with model_folder(gpu, model) as folder:
        engine = engine_on(gpu, folder, dtype="bfloat16", attention="auto")
    device = TimedDevice(engine.device)
    engine.device = device  # type: ignore[assignment]
    job = steady_rows(rows, prompt, WARM_UP_STEPS + 2 * steps + 8, shape.vocab, {})
    clock = _Clock(gpu, device)
    kinds = [ProfilerActivity.CPU] if gpu.toy else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    profiler = profile(activities=kinds)
    hooks = {
        WARM_UP_STEPS: clock.begin,
        WARM_UP_STEPS + steps: lambda: (clock.end(), profiler.start()),
        WARM_UP_STEPS + 2 * steps: profiler.stop,
    }
    run_steps(engine, job, hooks, WARM_UP_STEPS + 2 * steps + 1)
    on_device, launches = _spans(profiler, DeviceType.CPU if gpu.toy else DeviceType.CUDA)
    begin, end = min(x.begin for x in on_device), max(x.end for x in on_device)
    made = Profile(
        workload="decode",
        model=model,
        rows=rows,
        steps=steps,
        step_ms=clock.seconds / steps * 1e3,
        host_ms=(clock.seconds - clock.waited) / steps * 1e3,
        busy_share=None if gpu.toy else busy(on_device) / (end - begin),
        launches_per_step=launches / steps,
        kernels=longest(on_device, steps),
    )
    yield made
    step = Measure("decode", model, "step_ms", made.step_ms, "ms")
    rates = device_rates(gpu.name)
    if rates is not None:
        # Two tokens per row, without shared prefixes, each attending to the whole prompt.
        pairs = [BenchRow([4 + i] * (prompt + WARM_UP_STEPS + steps), 2) for i in range(rows)]
        floor = device_floor(pairs, shape, rates, rows)
        ideal = (floor.memory + floor.compute) / 2 * 1e3
        step = replace(step, serial_floor=ideal, share=ideal / made.step_ms)
    yield with_goal(step)
    if made.busy_share is not None:
        yield with_goal(Measure("decode", model, "device_busy_share", 100 * made.busy_share, "%"))


class _Clock:
    """Wall time between two steps, and the part of it that the host waited, in seconds."""

    def __init__(self, gpu: Gpu, device: TimedDevice) -> None:
        self._gpu = gpu
        self._device = device
        self.seconds = self.waited = 0.0

    def begin(self) -> None:
        self._gpu.synchronize()
        self.seconds, self.waited = -time.perf_counter(), -self._device.waited

    def end(self) -> None:
        self.waited += self._device.waited
        self._gpu.synchronize()
        self.seconds += time.perf_counter()


def _spans(profiler: Any, device: DeviceType) -> tuple[list[Span], int]:
    """(events of the device, number of launches by the host)"""
    spans, launches = [], 0
    for event in profiler.events():
        if event.name.startswith(_LAUNCHES):
            launches += 1
        if event.device_type == device and not event.name.startswith("ProfilerStep"):
            spans.append(Span(event.name, event.time_range.start, event.time_range.end))
    return spans, launches


def busy(spans: Iterable[Span]) -> float:
    """Microseconds covered by at least one span."""
    covered, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin):
        covered += max(0.0, span.end - max(span.begin, reached))
        reached = max(reached, span.end)
    return covered


def longest(spans: Sequence[Span], steps: int) -> list[dict[str, Any]]:
    """The `TOP` names by total time: microseconds and calls a step, and share of the time of all."""
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for span in spans:
        times[span.name] += span.end - span.begin
        calls[span.name] += 1
    whole = sum(times.values()) or 1.0
    return [
        {
            "name": name[:120],
            "us_per_step": round(taken / steps, 3),
            "calls_per_step": calls[name] / steps,
            "share": round(taken / whole, 4),
        }
        for name, taken in sorted(times.items(), key=lambda item: -item[1])[:TOP]
    ]
