"""Whole jobs: the engine on the device compared with the engine on the CPU, and its logits with transformers'.

In float32 a job with every kind of row must give the same tokens, up to near ties. In bfloat16 the error of the logits
(logprobs of the whole vocabulary at every position of some prompts) may be twice that of transformers' eager model.
Lookahead and CUDA graphs must give the same results as running without them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from batchgen.engine.engine import Engine
from batchgen.request.completion import Completion
from tests.gpu.checkpoints import VOCAB, save_adapter, save_checkpoint
from tests.gpu.compare import judge
from tests.gpu.lab import Lab
from tests.gpu.mixed import Row, compare, mixed_job, with_gaps
from tests.gpu.registry import Labelled, job_case
from tests.gpu.steady import TimedDevice

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
REAL = {"hidden": 512, "layers": 4, "rows": 156, "prompt": 200, "new": 24}
TOY = {"hidden": 64, "layers": 2, "rows": 28, "prompt": 16, "new": 4}

WAYS: dict[str, tuple[dict[str, bool], dict[str, bool]]] = {
    "lookahead against none": ({"asynchronous": True}, {"asynchronous": False}),
    "graphs against eager": ({"captures": True}, {"captures": False}),
    "graphs and lookahead against neither": ({}, {"asynchronous": False, "captures": False}),
}
"""Name -> overrides of the device's attributes in two runs that must give the same results."""
TOY_WAYS = ("lookahead against none",)
"""A CPU has no graphs."""


@job_case("engine", "parity", [{"family": x, **REAL} for x in FAMILIES], [{"family": x, **TOY} for x in FAMILIES[3:]])
def mixed_rows(lab: Lab, *, family: str, hidden: int, layers: int, **job: int) -> Iterator[Labelled | str]:
    if find_spec("xgrammar") is None:
        yield "constrained rows: xgrammar is not importable"
    with _model(family, hidden, layers, torch.float32) as (folder, adapters):
        rows = mixed_job(job["rows"], job["prompt"], job["new"], list(adapters), seed=1)
        want = _finished(_engine(folder, lab, reference=True, lora=adapters), with_gaps(rows))
        got = _finished(_engine(folder, lab, lora=adapters), rows)
        yield from compare(rows, got, want)


@job_case("engine", "ways", [{"family": "qwen3", **REAL}], [{"family": "qwen3", **TOY}])
def ways_of_running(lab: Lab, *, family: str, hidden: int, layers: int, **job: int) -> Iterator[Labelled]:
    with _model(family, hidden, layers, torch.float32) as (folder, adapters):
        rows = mixed_job(job["rows"], job["prompt"], job["new"], list(adapters), seed=2)
        engine = _engine(folder, lab, lora=adapters)
        device = engine.device
        for name, (one, other) in WAYS.items():
            if lab.toy and name not in TOY_WAYS:
                continue
            engine.device = TimedDevice(device, other)  # type: ignore[assignment]
            want = _finished(engine, with_gaps(rows))
            engine.device = TimedDevice(device, one)  # type: ignore[assignment]
            got = _finished(engine, rows)
            yield from ((f"{name}: {what}", verdict) for what, verdict in compare(rows, got, want))


@job_case("engine", "logits", [{"family": x, **REAL} for x in FAMILIES], [{"family": x, **TOY} for x in FAMILIES[2:3]])
def low_precision_logits(lab: Lab, *, family: str, hidden: int, layers: int, **job: int) -> Iterator[Labelled]:
    with _model(family, hidden, layers, torch.bfloat16) as (folder, _):
        prompts = [row["input_ids"] for row in mixed_job(12, job["prompt"], 1, (), seed=3)]
        truth, plain = (_eager(folder, prompts, lab, dtype) for dtype in (torch.float32, torch.bfloat16))
        logprobs = {"return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": list(range(VOCAB))}
        rows = [{"input_ids": ids, "max_new_tokens": 1, "temperature": 0, **logprobs} for ids in prompts]
        got = torch.cat([_whole(done) for done in _finished(_engine(folder, lab, dtype="bfloat16"), rows)])
        yield "logprobs of all tokens", judge(got, plain, truth, torch.bfloat16)


@contextmanager
def _model(family: str, hidden: int, layers: int, dtype: torch.dtype) -> Iterator[tuple[Path, dict[str, str]]]:
    """(checkpoint folder, adapter name -> folder), in a temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = save_checkpoint(Path(name) / "model", family, hidden=hidden, layers=layers, dtype=dtype, context=1024)
        yield folder, {x: str(save_adapter(folder, Path(name) / x, seed)) for seed, x in enumerate(("one", "two"))}


def _engine(folder: Path, lab: Lab, *, reference: bool = False, **options: Any) -> Engine:
    """The engine under test, on the GPU with Triton, or the reference engine, on the CPU with plain PyTorch.

    In a toy run both are on the CPU, with different step sizes.
    """
    where: dict[str, Any] = {"device": "cpu", "attention": "torch"}
    if not reference:
        steps = {"max_tokens_per_step": 24, "max_num_seqs": 9}
        where = {**where, **steps} if lab.toy else {"device": "cuda", "attention": "triton"}
    engine = Engine(str(folder), **{"dtype": "float32", **where, **options})
    # Compiling grammars takes seconds, and all these models have the same tokenizer.
    grammars = lab.kept.setdefault("grammars", engine.grammars)
    return Engine.from_parts(engine.config, engine.model, engine.tokenizer, grammars)


def _finished(engine: Engine, rows: list[Row]) -> list[Completion]:
    """The job's completions, in order."""
    return sorted(engine.generate(rows), key=lambda c: (c.row_index, c.prompt_index, c.sample_index))


def _eager(folder: Path, prompts: list[list[int]], lab: Lab, dtype: torch.dtype) -> torch.Tensor:
    """[positions of all prompts without each first one, V] log-softmax of transformers' eager logits."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval().to(lab.device)
    with torch.inference_mode():
        logits = [model(torch.tensor([ids], device=lab.device)).logits[0, :-1] for ids in prompts]
    return torch.cat(logits).float().log_softmax(-1).cpu()


def _whole(done: Completion) -> torch.Tensor:
    """[P - 1, V] float32: logprobs of every token at each prompt position after the first."""
    assert done.error is None, done.error
    values = np.ma.filled(np.ma.asarray(done.input_ids_logprobs, np.float32), 0.0).reshape(-1, VOCAB)
    return torch.from_numpy(values[1:])
