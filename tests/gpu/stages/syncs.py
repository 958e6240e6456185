"""Steady decode steps in which the host must not wait for the device.

torch warns of each call that waits; warnings are counted by file and line, for each kind of row and for a step with all
kinds. Each download of tokens must be waited for after a later one is issued. All steps must replay CUDA graphs.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from batchgen.engine.loop import Loop
from tests.gpu.compare import Verdict
from tests.gpu.device import Gpu
from tests.gpu.jobs import VOCAB, checkpoint, engine_on
from tests.gpu.registry import Labelled, case
from tests.gpu.steady import TimedDevice, run_steps, steady_rows

_WARNING = "synchronizing CUDA operation"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drawn": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    "logprobs": {"return_logprob": True, "top_logprobs_num": 20},
    "states": {"return_hidden_states": {"layers": [-1], "tokens": "output"}},
    "stop strings": {"stop": ["x" * 40]},
}
WARM_UP_STEPS = 8
"""Number of first steps, which may wait: kernels are compiled, graphs captured and tables filled."""


@case(
    "syncs",
    "syncs",
    [{"rows": 64, "prompt": 40, "steps": 40, "hidden": 512, "layers": 4}],
    [{"rows": 4, "prompt": 6, "steps": 4, "hidden": 64, "layers": 2}],
)
def waits_in_steady_steps(
    gpu: Gpu, *, rows: int, prompt: int, steps: int, hidden: int, layers: int
) -> Iterator[Labelled]:
    dtype = torch.float32 if gpu.toy else torch.bfloat16
    with checkpoint("qwen3", hidden=hidden, layers=layers, dtype=dtype, context=512) as (folder, _):
        engine = engine_on(gpu, folder)
        device = TimedDevice(engine.device, {"asynchronous": True})
        engine.device = device  # type: ignore[assignment]
        mixed = [list(KINDS.values())[i % len(KINDS)] for i in range(rows)]
        for kind, fields in (*((name, [kind] * rows) for name, kind in KINDS.items()), ("all in one step", mixed)):
            plain = steady_rows(rows, prompt, WARM_UP_STEPS + steps + 8, VOCAB, {})
            job = [{**row, **more} for row, more in zip(plain, fields, strict=True)]
            watch = _SyncCounter(device, cuda=not gpu.toy)
            with watch.stack:
                run_steps(
                    engine,
                    job,
                    {WARM_UP_STEPS: watch.begin, WARM_UP_STEPS + steps: watch.end},
                    WARM_UP_STEPS + steps + 2,
                )
            yield f"{kind}: waits in {steps} steps", judge_waits(watch.found, steps)
            yield f"{kind}: steps read before the next is issued", judge_lateness(watch.lateness)
            if not gpu.toy:  # a CPU has no graphs
                assert engine.last_run is not None
                yield f"{kind}: steps played as graphs", judge_graphs(engine.last_run.loop, steps)


class _SyncCounter:
    """Counts waits and lateness between two decode steps."""

    def __init__(self, device: TimedDevice, *, cuda: bool) -> None:
        self._device = device
        self._cuda = cuda
        self.stack = ExitStack()
        self.found: Counter[str] = Counter()
        self.lateness: list[int] = []

    def begin(self) -> None:
        self.stack.enter_context(counted_syncs(self.found, cuda=self._cuda))
        self._device.lateness.clear()

    def end(self) -> None:
        self.stack.close()
        self.lateness += self._device.lateness


def judge_waits(found: Counter[str], steps: int) -> Verdict:
    """Pass if there were no waits; the note has the most frequent places and their counts per step."""
    places = ", ".join(f"{place}: {count / steps:.2g} a step" for place, count in found.most_common(5))
    return Verdict(not found, float(sum(found.values())), 0.0, 0.0, places)


def judge_lateness(lateness: list[int]) -> Verdict:
    """Pass if each wait for tokens came after a later download was issued."""
    early = sum(not late for late in lateness)
    note = f"of {len(lateness)}" if early or not lateness else ""
    return Verdict(not note, float(early), 0.0, 0.0, note)


def judge_graphs(loop: Loop, steps: int) -> Verdict:
    """Pass if all steps were graph replays: without graphs a job has equal results, so nothing else would fail."""
    replayed, note = loop.counts()["graph_replays"], " ".join(loop.notes)
    return Verdict(replayed >= steps and not note, float(max(0, steps - replayed)), 0.0, 0.0, note)


@contextmanager
def counted_syncs(found: Counter[str], *, cuda: bool) -> Iterator[None]:
    """Inside, count torch's warnings about waits by file and line; `cuda`: switch these warnings on."""
    with warnings.catch_warnings():
        # Not by `record=True`, whose list of warnings keeps their objects alive.
        warnings.simplefilter("always")
        warnings.showwarning = _counting(found, warnings.showwarning)
        before = torch.cuda.get_sync_debug_mode() if cuda else 0
        if cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode(before)


def _counting(found: Counter[str], others: Callable[..., None]) -> Callable[..., None]:
    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any) -> None:
        if _WARNING in str(message):
            found[f"{'/'.join(Path(filename).parts[-3:])}:{lineno}"] += 1
        else:
            others(message, category, filename, lineno, *more)

    return show
