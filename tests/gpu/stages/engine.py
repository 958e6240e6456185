"""Whole jobs: the engine on the device compared with the engine on the CPU, and its logits with transformers'.

In float32 a job with every kind of row must give the same tokens, up to near ties. In bfloat16 the error of the logits
(logprobs of the whole vocabulary at every position of some prompts) may be twice that of transformers' eager model.
Lookahead and CUDA graphs must give the same results as running without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from batchgen.engine.engine import Engine
from batchgen.request.completion import Completion
from tests.gpu.compare import judge
from tests.gpu.device import Gpu
from tests.gpu.jobs import VOCAB, checkpoint, engine_on, finished
from tests.gpu.mixed import compare, mixed_job, with_gaps
from tests.gpu.registry import Labelled, case
from tests.gpu.steady import TimedDevice

ADAPTERS = ("one", "two")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
REAL = {"hidden": 512, "layers": 4, "rows": 156, "prompt": 200, "new": 24}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": "auto"},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}
"""Family with recurrent layers -> fields of its configuration with two layers."""
SHORT = {"hidden": 512, "layers": 2, "rows": 60, "prompt": 100, "new": 16}
TOY = {"hidden": 64, "layers": 2, "rows": 28, "prompt": 16, "new": 4}

RUN_MODES: dict[str, tuple[dict[str, bool], dict[str, bool]]] = {
    "lookahead against none": ({"asynchronous": True}, {"asynchronous": False}),
    "graphs against eager": ({"captures": True}, {"captures": False}),
    "graphs and lookahead against neither": ({}, {"asynchronous": False, "captures": False}),
}
"""Name -> overrides of the device's attributes in two runs that must give the same results."""
TOY_MODES = ("lookahead against none",)
"""A CPU has no graphs."""


@case("engine", "parity", [{"family": x, **REAL} for x in FAMILIES], [{"family": x, **TOY} for x in FAMILIES[3:]])
def mixed_rows(gpu: Gpu, *, family: str, hidden: int, layers: int, **job: int) -> Iterator[Labelled | str]:
    if find_spec("xgrammar") is None:
        yield "constrained rows: xgrammar is not importable"
    with checkpoint(family, hidden=hidden, layers=layers, dtype=torch.float32, adapters=ADAPTERS) as (folder, adapters):
        rows = mixed_job(job["rows"], job["prompt"], job["new"], list(adapters), seed=1)
        want = finished(_reference(gpu, folder, lora=adapters), with_gaps(rows))
        got = finished(_engine(gpu, folder, lora=adapters), rows)
        yield from compare(rows, got, want)


@case("engine", "recurrent", [{"family": x, **SHORT} for x in RECURRENT], [{"family": "jamba", **TOY}])
def recurrent_rows(gpu: Gpu, *, family: str, hidden: int, layers: int, **job: int) -> Iterator[Labelled]:
    fields = RECURRENT[family]
    with checkpoint(family, hidden=hidden, layers=layers, dtype=torch.float32, **fields) as (folder, _):
        rows = mixed_job(job["rows"], job["prompt"], job["new"], (), seed=4)
        got = finished(_engine(gpu, folder), rows)
        yield from compare(rows, got, finished(_reference(gpu, folder), with_gaps(rows)))


@case("engine", "run modes", [{"family": "qwen3", **REAL}], [{"family": "qwen3", **TOY}])
def run_modes_agree(gpu: Gpu, *, family: str, hidden: int, layers: int, **job: int) -> Iterator[Labelled]:
    with checkpoint(family, hidden=hidden, layers=layers, dtype=torch.float32, adapters=ADAPTERS) as (folder, adapters):
        rows = mixed_job(job["rows"], job["prompt"], job["new"], list(adapters), seed=2)
        engine = _engine(gpu, folder, lora=adapters)
        device = engine.device
        for name, (one, other) in RUN_MODES.items():
            if gpu.toy and name not in TOY_MODES:
                continue
            engine.device = TimedDevice(device, other)  # type: ignore[assignment]
            want = finished(engine, with_gaps(rows))
            engine.device = TimedDevice(device, one)  # type: ignore[assignment]
            got = finished(engine, rows)
            yield from ((f"{name}: {what}", verdict) for what, verdict in compare(rows, got, want))


@case("engine", "logits", [{"family": x, **REAL} for x in FAMILIES], [{"family": x, **TOY} for x in FAMILIES[2:3]])
def low_precision_logits(gpu: Gpu, *, family: str, hidden: int, layers: int, **job: int) -> Iterator[Labelled]:
    with checkpoint(family, hidden=hidden, layers=layers, dtype=torch.bfloat16) as (folder, _):
        prompts = [row["input_ids"] for row in mixed_job(12, job["prompt"], 1, (), seed=3)]
        truth, plain = (_eager(folder, prompts, gpu, dtype) for dtype in (torch.float32, torch.bfloat16))
        logprobs = {"return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": list(range(VOCAB))}
        rows = [{"input_ids": ids, "max_new_tokens": 1, "temperature": 0, **logprobs} for ids in prompts]
        got = torch.cat([_whole(done) for done in finished(_engine(gpu, folder, dtype="bfloat16"), rows)])
        yield "logprobs of all tokens", judge(got, plain, truth, torch.bfloat16)


def _reference(gpu: Gpu, folder: str, **options: Any) -> Engine:
    """The engine on the CPU with plain PyTorch."""
    return _with_grammars(gpu, Engine(folder, device="cpu", attention="torch", dtype="float32", **options))


def _engine(gpu: Gpu, folder: str, dtype: str = "float32", **options: Any) -> Engine:
    """The engine under test. In a toy run it differs from the reference by the sizes of its steps."""
    steps = {"max_tokens_per_step": 24, "max_num_seqs": 9} if gpu.toy else {}
    return _with_grammars(gpu, engine_on(gpu, folder, dtype=dtype, **steps, **options))


def _with_grammars(gpu: Gpu, engine: Engine) -> Engine:
    """Compiling grammars takes seconds, and all these models have the same tokenizer."""
    grammars = gpu.kept.setdefault("grammars", engine.grammars)
    return Engine.from_parts(engine.config, engine.model, engine.tokenizer, grammars)


def _eager(folder: str, prompts: list[list[int]], gpu: Gpu, dtype: torch.dtype) -> torch.Tensor:
    """[positions of all prompts without each first one, V] log-softmax of transformers' eager logits."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval().to(gpu.device)
    with torch.inference_mode():
        logits = [model(torch.tensor([ids], device=gpu.device)).logits[0, :-1] for ids in prompts]
    return torch.cat(logits).float().log_softmax(-1).cpu()


def _whole(done: Completion) -> torch.Tensor:
    """[P - 1, V] float32: logprobs of every token at each prompt position after the first."""
    assert done.error is None, done.error
    values = np.ma.filled(np.ma.asarray(done.input_ids_logprobs, np.float32), 0.0).reshape(-1, VOCAB)
    return torch.from_numpy(values[1:])
