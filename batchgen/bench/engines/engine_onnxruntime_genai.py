"""ONNX Runtime GenAI on a CPU: static batches, padded on the right, token ids in and out.

The model is converted once by the library's builder, which needs torch and transformers in the same environment. It
runs in float32, unless the dtype must be kept: the library's lower precisions on CPUs are integers, which would be a
different model.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as genai
from peer_tools import cached_conversion, expand_samples, join_samples, static_batches

_BATCHES = (8, 16, 32, 64, 128, 256)
_PRECISIONS = {"float32": "fp32"}


class Engine:
    """One model in memory."""

    version = genai.__version__

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        self._dtype, self._threads = dtype, threads
        self._pad = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["model"]["pad_token_id"]
        config = genai.Config(str(folder))
        options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = genai.Model(config)

    def describe(self) -> dict[str, Any]:
        """Dtype, device, threads, and settings to try: batch sizes."""
        settings = [{"batch": size} for size in _BATCHES]
        return {"dtype": self._dtype, "device": "cpu", "threads": self._threads, "settings": settings}

    def generate(self, rows: list[dict[str, Any]], setting: dict[str, Any]) -> tuple[list[list[int]], dict[str, int]]:
        """Generate with fixed lengths: greedily, or at temperature 1 for rows of several samples."""
        samples = expand_samples(rows)
        outputs: list[list[int]] = [[] for _ in samples]
        computed = decoded = 0
        for number, (sampled, members) in enumerate(static_batches(samples, setting["batch"])):
            width = max(len(samples[i]["ids"]) for i in members)
            new = max(samples[i]["max_new"] for i in members)
            made = self._batch([samples[i]["ids"] for i in members], width, new, number if sampled else None)
            for i, ids in zip(members, made, strict=True):
                outputs[i] = ids[: samples[i]["max_new"]]
            computed += width * len(members)
            decoded += (new - 1) * len(members)
        return join_samples(rows, outputs), {"prompt_tokens_computed": computed, "decode_rows": decoded}

    def _batch(self, prompts: list[list[int]], width: int, new: int, seed: int | None) -> list[list[int]]:
        params = genai.GeneratorParams(self._model)
        length = width + new
        params.set_search_options(batch_size=len(prompts), min_length=length, max_length=length)
        if seed is None:
            params.set_search_options(do_sample=False)
        else:
            params.set_search_options(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, random_seed=seed)
        generator = genai.Generator(self._model, params)
        padded = [ids + [self._pad] * (width - len(ids)) for ids in prompts]
        generator.append_tokens(np.array(padded, dtype=np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [[int(i) for i in generator.get_sequence(row)[width:]] for row in range(len(prompts))]


def _convert(model: str, folder: Path, precision: str) -> None:
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    places = ["-i", model, "-o", str(folder), "-c", str(folder / "cache")]
    done = subprocess.run(
        [*builder, *places, "-p", precision, "-e", "cpu"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError("the model builder failed: " + " / ".join(done.stderr.strip().splitlines()[-3:]))


def load(request: dict[str, Any]) -> Engine:
    """The engine of a load request."""
    if request["device"] != "cpu":
        raise RuntimeError("supported on CPUs only; give --device cpu")
    dtype = request["dtype"]
    if dtype not in _PRECISIONS:
        if request["keep_dtype"]:
            raise RuntimeError(f"{dtype} is not supported on a CPU; supported: {', '.join(_PRECISIONS)}")
        dtype = "float32"
    precision = _PRECISIONS[dtype]
    kind = f"onnxruntime-genai {genai.__version__} {precision}"
    model = request["model"]
    folder = cached_conversion(request["cache"], model, kind, lambda temporary: _convert(model, temporary, precision))
    return Engine(folder, dtype, request["threads"])
