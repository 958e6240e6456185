"""`--deterministic`: equal bits alone, in batches, shuffled and in other chunks.

A single bit that differs fails. These cases test only the given numbers; the kernels explain why bits cannot differ
(`batchgen/kernels/gpu/matmul.py`, `deterministic_list.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.engine import Engine
from batchgen.kernels.gpu.deterministic_attention import DeterministicTritonAttention
from batchgen.kernels.gpu.matmul import linear
from batchgen.kernels.types import AttentionArgs, AttentionBatch, ChunkPages
from batchgen.request.completion import Completion
from tests.gpu.compare import Verdict, judge_equal, poisoned
from tests.gpu.device import Gpu
from tests.gpu.jobs import checkpoint
from tests.gpu.mixed import mixed_job
from tests.gpu.models import model_folder
from tests.gpu.registry import Labelled, case
from tests.gpu.stages.attention_steps import heads_shape, mixed_step
from tests.kernels.oracle import visible_slots
from tests.kernels.steps import Step

BATCH_SIZES = (1, 2, 17, 64, 65, 256)
"""Numbers of rows that are computed together."""
LAYERS = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (4096, 6144), (4096, 28672), (14336, 4096))
"""(inputs, outputs) of the linear layers of Qwen3-0.6B, then of Llama-3.1-8B."""


@case(
    "determinism",
    "linear",
    [{"inputs": i, "outputs": o, "rows": 1100} for i, o in (*LAYERS, (1024, 151_936))],
    [{"inputs": 40, "outputs": 70, "rows": 70}],
)
def products(gpu: Gpu, *, inputs: int, outputs: int, rows: int) -> Iterator[Labelled]:
    x, weight = (gpu.randn(n, inputs, dtype=torch.bfloat16) for n in (rows, outputs))
    with poisoned():
        together = linear(x, weight)
    for count in BATCH_SIZES[: 3 if gpu.toy else None]:
        chosen = gpu.rand(rows).argsort()[:count]
        with poisoned():
            got = linear(x[chosen], weight)
        yield f"{count} of {rows} rows", _equal_bits(got, together[chosen])


@case(
    "determinism",
    "attention",
    [
        {"heads": 16, "kv_heads": 8, "dim": 128, "window": 0, "sinks": 0},
        {"heads": 32, "kv_heads": 8, "dim": 128, "window": 100, "sinks": 1},
        {"heads": 14, "kv_heads": 2, "dim": 64, "window": 0, "sinks": 0},
        {"heads": 8, "kv_heads": 4, "dim": 256, "window": 0, "sinks": 1},
    ],
    [{"heads": 4, "kv_heads": 2, "dim": 16, "window": 20, "sinks": 1}],
)
def attention(gpu: Gpu, *, heads: int, kv_heads: int, dim: int, window: int, sinks: int) -> Iterator[Labelled]:
    """Tokens of chunks, of single rows and of rows in groups of two levels, each compared with a chunk of one token."""
    shape = heads_shape(heads, kv_heads, dim, 16, torch.bfloat16)
    step = (
        mixed_step(gpu, shape, [(5, 0), (1, 20)], 3, 30, [(1, 5), (2, 5)])
        if gpu.toy
        else mixed_step(gpu, shape, [(300, 0), (90, 700), (1, 500)], 96, 900, [(1, 40), (4, 17)])
    )
    args = AttentionArgs(dim**-0.5, window or None, sinks=gpu.randn(heads) if sinks else None)
    with poisoned():
        together = DeterministicTritonAttention(step.pool, step.batch).attend(0, step.query, step.key, step.value, args)
    seen = visible_slots(step.batch, step.pool.page_size)
    for token in range(0, len(together), 2 if gpu.toy else 9):
        batch = _alone(step, token, *seen[token])
        with poisoned(allow_sync=True):
            got = DeterministicTritonAttention(step.pool, batch).attend_stored(0, step.query[token : token + 1], args)
        yield f"token {token} alone", _equal_bits(got[0], together[token])


def _alone(step: Step, token: int, position: int, slots: Tensor) -> AttentionBatch:
    """A batch with one token of a step, which attends to `slots`, as a separate chunk."""
    size = step.pool.page_size
    chunk = ChunkPages(0, 1, position + 1, (slots[::size] // size).numpy())
    return AttentionBatch(step.batch.slot_mapping[token : token + 1], [chunk], decode_start=1)


@case(
    "determinism",
    "jobs",
    [{"hidden": 512, "layers": 4, "rows": 256, "prompt": 200, "new": 24, "alone": 6}],
    [{"hidden": 64, "layers": 2, "rows": 6, "prompt": 12, "new": 3, "alone": 1}],
)
def mixed_rows(
    gpu: Gpu, *, hidden: int, layers: int, rows: int, prompt: int, new: int, alone: int
) -> Iterator[Labelled]:
    """Rows of every kind, with adapters: together, shuffled, in small chunks, and one at a time."""
    dtype = "float32" if gpu.toy else "bfloat16"
    made = {"hidden": hidden, "layers": layers, "dtype": getattr(torch, dtype)}
    with checkpoint("qwen3", **made, adapters=("one", "two")) as (folder, adapters):
        job = mixed_job(rows, prompt, new, list(adapters), seed=5)
        job = [{**row, "id": str(i), "return_logprob": True} for i, row in enumerate(job)]
        yield from _jobs(gpu, folder, job, alone, {"max_tokens_per_step": 96, "max_num_seqs": 33}, adapters, dtype)


@case(
    "determinism",
    "jobs",
    [{"model": "0.6b", "rows": 256, "prompt": 300, "new": 16, "alone": 4}],
    [{"model": "0.6b", "rows": 3, "prompt": 12, "new": 2, "alone": 1}],
)
def real_shapes(gpu: Gpu, *, model: str, rows: int, prompt: int, new: int, alone: int) -> Iterator[Labelled]:
    """Greedy rows with logprobs, on a model of real size: together, shuffled, in other chunks, and one at a time."""
    job = [
        {
            "id": str(i),
            "input_ids": gpu.randint(3, 390, 1 + prompt * (i + 1) // rows).tolist(),
            "max_new_tokens": new,
            "temperature": 0,
            "ignore_eos": True,
            "return_logprob": True,
        }
        for i in range(rows)
    ]
    with model_folder(gpu, model) as folder:
        steps = {"max_tokens_per_step": 20, "max_num_seqs": 9} if gpu.toy else {"max_tokens_per_step": 200}
        yield from _jobs(gpu, folder, job, alone, steps, {}, "float32" if gpu.toy else "bfloat16")


def _jobs(
    gpu: Gpu,
    folder: str,
    job: list[dict[str, Any]],
    alone: int,
    steps: dict[str, int],
    adapters: dict[str, str],
    dtype: str,
) -> Iterator[Labelled]:
    options: dict[str, Any] = {"attention": "triton", "dtype": dtype, "deterministic": True, "lora": adapters}
    options["device"] = "cpu" if gpu.toy else "cuda"
    engine = Engine(folder, **options)
    together = _results(engine, job)
    order = gpu.rand(len(job)).argsort().tolist()
    yield "shuffled", _same(_results(engine, [job[i] for i in order]), together)
    chosen = [job[i] for i in order[:alone]]
    for row in chosen:
        yield f"row {row['id']} alone", _same(_results(engine, [row]), together)
    chunked = Engine.from_parts(type(engine.config)(model=folder, **options, **steps), engine.model, engine.tokenizer)
    yield "in other steps", _same(_results(chunked, chosen if gpu.toy else job[::4]), together)


def _results(engine: Engine, rows: list[dict[str, Any]]) -> dict[tuple[str | None, int], tuple[Any, ...]]:
    """(row id, sample index) -> token ids, and logprobs and hidden states as bytes."""
    return {(done.id, done.sample_index): _bits(done) for done in engine.generate(rows)}


def _bits(done: Completion) -> tuple[Any, ...]:
    assert done.error is None, done.error
    floats = (done.output_logprobs, done.output_top_logprobs, done.input_logprobs, done.output_ids_logprobs)
    logprobs = [None if x is None else np.ma.filled(np.ma.asarray(x, np.float32), 0.0).tobytes() for x in floats]
    states = [(block.layer, block.values.tobytes()) for block in done.states or ()]
    return json.dumps(np.asarray(done.output_ids).tolist()), logprobs, states


def _same(got: dict[Any, Any], together: dict[Any, Any]) -> Verdict:
    wrong = sorted(str(key) for key, value in got.items() if together[key] != value)
    note = f"{len(wrong)} of {len(got)} samples differ, as {wrong[0]}" if wrong else ""
    return Verdict(not wrong and bool(got), float(len(wrong)), 0.0, 0.0, note)


def _equal_bits(got: Tensor, want: Tensor) -> Verdict:
    """Compare bits; NaN fails, since equal bits of NaN are not a correct result."""
    if bool(got.isnan().any()):
        return Verdict(False, float("inf"), 0.0, 0.0, "not-a-number")
    kind = torch.int16 if got.element_size() == 2 else torch.int32
    return judge_equal(got.contiguous().view(kind), want.contiguous().view(kind))
