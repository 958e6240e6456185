"""The device's memory: the automatic pool, long and short rows in one pool, and steps that do not fit.

A step that runs out of memory is split and retried, with equal results: the limit is set just above the memory of
weights and pool, so that the first step of the prompts does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from torch import Tensor

from batchgen.engine.engine import Engine
from batchgen.models.base import ModelInput
from tests.gpu.compare import Verdict
from tests.gpu.device import Gpu
from tests.gpu.jobs import VOCAB, checkpoint, engine_on, finished
from tests.gpu.mixed import Row, compare, with_gaps
from tests.gpu.models import model_folder, model_shape
from tests.gpu.registry import Labelled, case
from tests.gpu.steady import run_steps, steady_rows

_HEADROOM = 24 << 20
"""Bytes that are left for a step in the case that runs out of memory."""
_COMPARED = 20
"""Number of short rows that are compared with a separate job."""


@case(
    "memory",
    "pool",
    [{"model": "0.6b", "rows": 4096, "prompt": 400, "new": 300, "steps": 24}],
    [{"model": "0.6b", "rows": 5, "prompt": 20, "new": 8, "steps": 3}],
)
def automatic_pool(gpu: Gpu, *, model: str, rows: int, prompt: int, new: int, steps: int) -> Iterator[Labelled]:
    """More rows than fit into any device's memory: plain rows, with logprobs, and with hidden states."""
    with model_folder(gpu, model) as folder:
        engine = engine_on(gpu, folder, dtype="bfloat16", **_steps(gpu))
    kinds: list[Row] = [{}, {"return_logprob": True, "top_logprobs_num": 20}, {"return_hidden_states": True}]
    plain = steady_rows(rows, prompt, new, model_shape(gpu, model).vocab, {})
    job = [{**row, **kinds[i % 3]} for i, row in enumerate(plain)]
    before = _failures()
    if not gpu.toy:
        torch.cuda.reset_peak_memory_stats(gpu.device)
    run_steps(engine, job, {}, steps)
    assert engine.last_run is not None
    pool = engine.last_run.pool.nbytes
    failed = _failures() - before
    yield "allocations that failed", Verdict(not failed, float(failed), 0.0, 0.0)
    if not gpu.toy:
        total = torch.cuda.get_device_properties(gpu.device).total_memory
        peak = torch.cuda.max_memory_reserved(gpu.device)
        note = f"pool {pool / total:.0%}, peak {peak / total:.0%} of the device"
        yield "bytes at the peak", Verdict(peak <= total, float(peak), 0.0, float(total), note)
        yield "the pool takes most of what is left", Verdict(pool > 0.5 * total, float(pool), 0.0, 0.5 * total, note)


@case(
    "memory",
    "long and short",
    [{"long": 131_072, "short": 10_000, "hidden": 512, "layers": 2}],
    [{"long": 300, "short": 30, "hidden": 64, "layers": 2}],
)
def long_and_short_rows(gpu: Gpu, *, long: int, short: int, hidden: int, layers: int) -> Iterator[Labelled]:
    """One prompt of `long` tokens and `short` prompts of a few, in one pool; some of them are also run separately."""
    rng = Random(0)
    lengths = [long, *(rng.randint(2, 16) for _ in range(short))]
    rows = [
        {
            "input_ids": [rng.randrange(4, VOCAB) for _ in range(length)],
            "max_new_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
        }
        for length in lengths
    ]
    with checkpoint("llama", hidden=hidden, layers=layers, dtype=torch.float32, context=long + 16) as (folder, _):
        engine = engine_on(gpu, folder, dtype="float32", **_steps(gpu))
        want = finished(engine, with_gaps(rows[: _COMPARED + 1]))
        got = finished(engine, rows)
    assert engine.last_run is not None
    pages, peak = engine.last_run.loop.state.kv_pages, engine.last_run.scheduler.stats.peak_pages
    yield "completions", Verdict(len(got) == len(rows), float(len(rows) - len(got)), 0.0, 0.0)
    errors = [done.error.message for done in got if done.error is not None]
    yield "errors in all", Verdict(not errors, float(len(errors)), 0.0, 0.0, "; ".join(errors[:2]))
    yield "pages at the peak", Verdict(peak <= pages, float(peak), 0.0, float(pages))
    yield from compare(rows, got[: _COMPARED + 1], want)


@case(
    "memory",
    "oom split",
    [{"rows": 200, "prompt": 120, "hidden": 1024, "layers": 2}],
    [{"rows": 6, "prompt": 12, "hidden": 64, "layers": 2}],
)
def steps_that_do_not_fit(gpu: Gpu, *, rows: int, prompt: int, hidden: int, layers: int) -> Iterator[Labelled]:
    job = steady_rows(rows, prompt, 4, VOCAB, {})
    with checkpoint("llama", hidden=hidden, layers=layers, dtype=torch.float32) as (folder, _):
        engine = engine_on(gpu, folder, dtype="float32", **_steps(gpu))
        want = finished(engine, with_gaps(job))
        engine.last_run = None
        with _limited_memory(gpu, engine) as failures:
            got = finished(engine, job)
            failed = failures()
    yield "allocations that failed", Verdict(failed > 0, float(failed), 0.0, 0.0, "" if failed else "nothing was tried")
    yield from compare(job, got, want)


def _steps(gpu: Gpu) -> dict[str, int]:
    return {"max_tokens_per_step": 64} if gpu.toy else {}


def _failures() -> int:
    """Number of allocations that failed on the device so far."""
    return int(torch.cuda.memory_stats().get("num_ooms", 0)) if torch.cuda.is_available() else 0


@contextmanager
def _limited_memory(gpu: Gpu, engine: Engine) -> Iterator[Callable[[], int]]:
    """Inside, jobs of `engine` have little memory in addition to weights and pool.

    Yields a function that returns the number of failed allocations.
    """
    start = engine.start
    before = _failures()
    model = engine.model
    failed: list[int] = []
    if gpu.toy:
        engine.model = _LimitedModel(model, 20, failed)  # type: ignore[assignment]

    def started(*args: Any, **options: Any) -> Any:
        running = start(*args, **options)
        if not gpu.toy:
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(gpu.device).total_memory
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + _HEADROOM) / total)
        return running

    engine.start = started  # type: ignore[method-assign]
    try:
        yield lambda: len(failed) + _failures() - before
    finally:
        del engine.start  # type: ignore[method-assign]
        engine.model = model
        if not gpu.toy:
            torch.cuda.set_per_process_memory_fraction(1.0)


class _LimitedModel:
    """A model that raises an out-of-memory error for steps of more than `tokens` tokens, and appends to `failed`."""

    def __init__(self, model: Any, tokens: int, failed: list[int]) -> None:
        self._model = model
        self._tokens = tokens
        self._failed = failed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def hidden(self, inputs: ModelInput) -> Tensor:
        if len(inputs.input_ids) > self._tokens:
            self._failed.append(len(inputs.input_ids))
            raise torch.OutOfMemoryError("CUDA out of memory")
        hidden: Tensor = self._model.hidden(inputs)
        return hidden
