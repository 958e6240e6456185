"""OpenVINO GenAI's continuous batching on a CPU: paged cache, prefix caching, token ids in and out.

The model is converted once by optimum-intel, with the weights in their dtype. Computation and KV cache use the
requested dtype (the library's default for the cache is 8 bits).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from batchgen.bench.engines.peer_tools import Outputs, PeerEngine, Row, Setting, cached_conversion, prefix_waves

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_BLOCK = 32
"""Number of tokens in a block of the KV cache on a CPU."""
_CACHE_GIB = 4
_SETTINGS = (
    {"prefix_cache": 1, "batched_tokens": 1024, "warm": 1},
    {"prefix_cache": 1, "batched_tokens": 1024, "warm": 0},
    {"prefix_cache": 0, "batched_tokens": 256, "warm": 0},
    {"prefix_cache": 0, "batched_tokens": 4096, "warm": 0},
)
_FIRST = {"prefix_cache": 0, "batched_tokens": 256, "warm": 0}
"""Setting of the first pipeline, which fails if the machine does not support the dtype."""


class Engine(PeerEngine):
    """A pipeline of one model. With prefix caching it is rebuilt before each pass, so that the cache is empty.

    A new pipeline allocates its cache and compiles kernels in its first pass, so it runs other prompts before.
    """

    version = genai.__version__
    settings = _SETTINGS

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request, "cpu")
        model, kind = request["model"], f"openvino {ov.__version__}"
        self._folder = cached_conversion(request["cache"], model, kind, lambda folder: _convert(model, folder))
        self._pipeline: Any = None
        self._built: Setting | None = None
        self._warm = False
        try:
            self._build(_FIRST)
        except RuntimeError:  # no bfloat16 KV cache on processors without bfloat16 instructions
            if request["keep_dtype"] or self.dtype == "float32":
                raise
            self.dtype = "float32"
            self._build(_FIRST)

    def prepare(self, rows: list[Row], setting: Setting) -> None:
        """Build a pipeline with an empty prefix cache, if the current one cannot be reused.

        A new pipeline runs rows with the same lengths and shared prefixes but different ids.
        """
        if setting != self._built or setting["prefix_cache"]:
            self._build(setting)
        if not self._warm:
            ids = [i for row in rows for i in row["ids"]]
            mirror = min(ids) + max(ids)
            self.generate([{**row, "ids": [mirror - i for i in row["ids"]]} for row in rows], setting)
            self._warm = True

    def _build(self, setting: Setting) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = bool(setting["prefix_cache"])
        scheduler.max_num_batched_tokens = setting["batched_tokens"]
        scheduler.cache_size = _CACHE_GIB
        precision = _PRECISIONS[self.dtype]
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": self.threads,
        }
        self._pipeline = self._built = None  # frees its cache before the next pipeline allocates one
        self._pipeline = genai.ContinuousBatchingPipeline(str(self._folder), scheduler, "CPU", properties)
        self._built, self._warm = setting, False

    def run(self, samples: list[Row], setting: Setting) -> Outputs:
        """See `PeerEngine`. With `warm`, one row of each shared prefix runs first with a single new token, which fills
        the prefix cache.
        """
        if setting["warm"]:
            for wave in prefix_waves([row["ids"] for row in samples], _BLOCK):
                self._pass([samples[i]["ids"] for i in wave], [_fixed(1)] * len(wave))
        seeds = [number if row["sampled"] else None for number, row in enumerate(samples)]
        configs = [_fixed(row["max_new"], seed) for row, seed in zip(samples, seeds, strict=True)]
        return self._pass([row["ids"] for row in samples], configs), {}

    def _pass(self, prompts: list[list[int]], configs: list[Any]) -> list[list[int]]:
        tensors = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        answers = self._pipeline.generate(tensors, configs)
        return [list(map(int, answer.m_generation_ids[0])) for answer in answers]


def _fixed(new: int, seed: int | None = None) -> Any:
    """Configuration of `new` tokens: greedy, or at temperature 1 with a seed."""
    config = genai.GenerationConfig()
    config.do_sample = seed is not None
    if seed is not None:
        config.temperature, config.rng_seed = 1.0, seed
    config.ignore_eos = True
    config.min_new_tokens = config.max_new_tokens = new
    return config


def _convert(model: str, folder: Path) -> None:
    from optimum.intel import OVModelForCausalLM  # imports torch, which is only needed here

    made = OVModelForCausalLM.from_pretrained(model, export=True, compile=False, load_in_8bit=False)
    made.save_pretrained(str(folder))
