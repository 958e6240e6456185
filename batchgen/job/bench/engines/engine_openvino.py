"""OpenVINO GenAI's continuous batching on a CPU: paged cache, prefix caching, token ids in and out.

The model is converted once by optimum-intel. Weights keep their type in the file; what is computed with, and what the
cache holds, is the asked dtype (the library's own default for the cache is 8 bits).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from peer_tools import apart, converted, shared_waves, together

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_BLOCK = 32
"""Tokens of a block of its cache on a CPU."""
_CACHE_GIB = 4
_SETTINGS = (
    {"prefix_cache": 1, "batched_tokens": 1024, "warm": 1},
    {"prefix_cache": 1, "batched_tokens": 1024, "warm": 0},
    {"prefix_cache": 0, "batched_tokens": 256, "warm": 0},
    {"prefix_cache": 0, "batched_tokens": 4096, "warm": 0},
)
_FIRST = {"prefix_cache": 0, "batched_tokens": 256, "warm": 0}
"""Says at once what the machine cannot do."""


class Engine:
    """A pipeline of one model, built anew for each pass where it has a prefix cache, which is not to know the prompts.

    A new one takes its cache's memory and makes its kernels in its first pass, so it computes other prompts before.
    """

    version = genai.__version__

    def __init__(self, folder: Path, dtype: str, threads: int, *, keep_dtype: bool = False) -> None:
        self._folder, self._dtype, self._threads = folder, dtype, threads
        self._pipeline: Any = None
        self._built: dict[str, Any] | None = None
        self._warm = False
        try:
            self.prepare(_FIRST)
        except RuntimeError:  # without its instructions the library has no bfloat16 cache, and computes in float32
            if keep_dtype or dtype == "float32":
                raise
            self._dtype = "float32"
            self.prepare(_FIRST)

    def describe(self) -> dict[str, Any]:
        """What is in force, and settings to try: the cache warmed by hand, as it comes, and without it."""
        return {"dtype": self._dtype, "device": "cpu", "threads": self._threads, "settings": list(_SETTINGS)}

    def prepare(self, setting: dict[str, Any]) -> None:
        """A pipeline that knows none of the prompts to come."""
        if setting == self._built and not setting["prefix_cache"]:
            return
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = bool(setting["prefix_cache"])
        scheduler.max_num_batched_tokens = setting["batched_tokens"]
        scheduler.cache_size = _CACHE_GIB
        precision = _PRECISIONS[self._dtype]
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": self._threads,
        }
        self._pipeline = self._built = None  # its cache goes before the next one comes
        self._pipeline = genai.ContinuousBatchingPipeline(str(self._folder), scheduler, "CPU", properties)
        self._built, self._warm = setting, False

    def warm(self, rows: list[dict[str, Any]], setting: dict[str, Any]) -> None:
        """A new pipeline computes rows of the same lengths that share as much, of other ids."""
        if self._warm:
            return
        ids = [i for row in rows for i in row["ids"]]
        mirror = min(ids) + max(ids)
        self.generate([{**row, "ids": [mirror - i for i in row["ids"]]} for row in rows], setting)
        self._warm = True

    def generate(self, rows: list[dict[str, Any]], setting: dict[str, Any]) -> tuple[list[list[int]], dict[str, int]]:
        """Greedy but for rows of several samples, lengths fixed.

        With `warm` shared prefixes are computed first, by a row of each, one token long.
        """
        alone = apart(rows)
        if setting["warm"]:
            for wave in shared_waves([row["ids"] for row in alone], _BLOCK):
                self._pass([alone[i]["ids"] for i in wave], [_fixed(1)] * len(wave))
        seeds = [number if row.get("samples", 1) > 1 else None for number, row in enumerate(alone)]
        configs = [_fixed(row["max_new"], seed) for row, seed in zip(alone, seeds, strict=True)]
        outputs = self._pass([row["ids"] for row in alone], configs)
        return together(rows, outputs), {}

    def _pass(self, prompts: list[list[int]], configs: list[Any]) -> list[list[int]]:
        tensors = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        answers = self._pipeline.generate(tensors, configs)
        return [list(map(int, answer.m_generation_ids[0])) for answer in answers]


def _fixed(new: int, seed: int | None = None) -> Any:
    """So many tokens: greedy, or drawn at temperature 1 with a seed."""
    config = genai.GenerationConfig()
    config.do_sample = seed is not None
    if seed is not None:
        config.temperature, config.rng_seed = 1.0, seed
    config.ignore_eos = True
    config.min_new_tokens = config.max_new_tokens = new
    return config


def _convert(model: str, folder: Path) -> None:
    from optimum.intel import OVModelForCausalLM  # with torch: seconds, and needed once

    made = OVModelForCausalLM.from_pretrained(model, export=True, compile=False, load_in_8bit=False)
    made.save_pretrained(str(folder))


def load(request: dict[str, Any]) -> Engine:
    """An engine for the driver's request."""
    if request["device"] != "cpu":
        raise RuntimeError("it is measured on a CPU only")
    kind = f"openvino {ov.__version__}"
    folder = converted(request["cache"], request["model"], kind, lambda aside: _convert(request["model"], aside))
    return Engine(folder, request["dtype"], request["threads"], keep_dtype=request["keep_dtype"])
