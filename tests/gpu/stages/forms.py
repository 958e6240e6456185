"""W-nano over weights in FP8 and in four bits, compared with bfloat16; and rows with pictures."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copy
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from batchgen.bench.process import OURS, EngineFailed, EngineSource
from batchgen.bench.workloads import DemoWorkload, find_workload
from batchgen.demo import model_path
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.gpu.device import Gpu
from tests.gpu.engines import best_within, rate, start
from tests.gpu.models import model_folder
from tests.gpu.registry import case
from tests.gpu.report import Measure
from tests.gpu.stages.workloads import GRACE, Runs, engine_spec, slot
from tests.models.quantised import by_groups, write_stored

_LARGEST = {"fp8": 448.0, "int4": 7.0}
_GROUP, _TOY_GROUP = 128, 16
"""Inputs of a group of four-bit weights."""


def _fp8(weight: Tensor, group: int) -> dict[str, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / _LARGEST["fp8"]
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale.bfloat16()}


def _int4(weight: Tensor, group: int) -> dict[str, Tensor]:
    parts = weight.unflatten(1, (-1, group))
    scale = parts.abs().amax(-1) / _LARGEST["int4"]
    codes = ((parts / scale[..., None]).round() + 8).long().view(len(weight), -1, 8)
    words = (codes << (4 * torch.arange(8, device=weight.device))).sum(-1)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": words.to(torch.int32), "weight_scale": scale.bfloat16(), "weight_shape": shape}


_PACKERS: dict[str, Callable[[Tensor, int], dict[str, Tensor]]] = {"fp8": _fp8, "int4": _int4}


def _description(form: str, group: int) -> dict[str, Any]:
    if form == "fp8":
        return by_groups("float-quantized", num_bits=8, type="float", strategy="channel")
    return by_groups("pack-quantized", num_bits=4, type="int", strategy="group", group_size=group)


def save_form(form: str, plain: Path, folder: Path, gpu: Gpu) -> None:
    """Write the checkpoint `plain` to `folder` with its projections in the form, as compressed-tensors stores them."""
    group = _TOY_GROUP if gpu.toy else _GROUP
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            parts = _PACKERS[form](tensor.to(gpu.device).float(), group)
            stored |= {name.removesuffix("weight") + end: part.cpu().contiguous() for end, part in parts.items()}
        else:
            stored[name] = tensor
    write_stored(stored, _description(form, group), plain, folder)
    for file in plain.glob("tokenizer*"):
        copy(file, folder)


_SHAPES = [{"model": "8b", "form": form} for form in _PACKERS]


@case("workloads", "forms", _SHAPES, _SHAPES)
def stored(gpu: Gpu, *, model: str, form: str) -> Iterator[Measure | str]:
    end = time.monotonic() + slot(gpu, f"form={form}")
    with model_folder(gpu, model) as plain, tempfile.TemporaryDirectory() as folder:
        save_form(form, Path(plain), Path(folder), gpu)
        runs = Runs(gpu, model, folder)
        workload = runs.workload("w-nano")
        try:
            with (
                start(gpu, EngineSource(OURS), runs.spec, gpu.left() + GRACE) as own,
                start(gpu, EngineSource(OURS), engine_spec(gpu, plain), gpu.left() + GRACE) as full,
            ):
                found = best_within(own, workload, {}, runs.shape.vocab, 0.5 * (end - time.monotonic()))
                best_within(full, workload, {}, runs.shape.vocab, 0.0)  # compiles
                other = rate(full, workload, found.factor, {}, runs.shape.vocab)
        except EngineFailed as error:
            yield str(error)
            return
    name = f"{model} {form}"
    made = runs.throughput_of(workload, own, found)
    # The floor and the goal are those of weights in bfloat16.
    yield replace(made, model=name, floor=None, serial_floor=None, share=None, goal=None, moonshot=None, predicted=None)
    times = found.tokens_per_second / other.tokens_per_second
    detail = {"bfloat16_tokens_per_second": other.tokens_per_second}
    yield Measure(workload.name, name, "times_bfloat16", times, "x", factor=found.factor, detail=detail)


@case("workloads", "pictures", [{"model": "demo"}], [{"model": "demo"}])
def pictures(gpu: Gpu, *, model: str) -> Iterator[Measure | str]:
    """Each row is a picture after an instruction; rows run once to compile, then once more."""
    workload = find_workload("pictures")
    assert isinstance(workload, DemoWorkload)
    workload = replace(workload, count=4) if gpu.toy else workload
    rows = workload.rows(Tokenizer.load(model_path()).vocab_size)
    try:
        with start(gpu, EngineSource(OURS), engine_spec(gpu, str(model_path())), gpu.left() + GRACE) as ours:
            ours.generate(rows[: len(rows) // 2], {})
            done = ours.generate(rows, {})
    except EngineFailed as error:
        yield str(error)
        return
    detail = {"seconds": done.seconds, "rows": len(rows), **done.counted}
    yield Measure(
        workload.name, model, "output_tokens_per_second", done.tokens / done.seconds, "tokens/s", detail=detail
    )
