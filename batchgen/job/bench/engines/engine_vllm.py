"""vLLM, offline, with its own defaults: prefix caching and CUDA graphs on."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
import vllm

_MEMORY = 0.5
"""Share of the device: other engines of the benchmark hold theirs at the same time."""


class Engine:
    """One model in memory."""

    version = vllm.__version__

    def __init__(self, model: str, dtype: str, device: str) -> None:
        self._dtype, self._device = dtype, device
        memory = {"gpu_memory_utilization": _MEMORY} if device == "cuda" else {}
        self._llm = vllm.LLM(model, dtype=dtype, skip_tokenizer_init=True, seed=0, **memory)

    def describe(self) -> dict[str, Any]:
        """What is in force."""
        threads = torch.get_num_threads()
        return {"dtype": self._dtype, "device": self._device, "threads": threads, "settings": [{}]}

    def generate(self, rows: list[dict[str, Any]], setting: dict[str, Any]) -> tuple[list[list[int]], dict[str, int]]:
        """Greedy but for rows of several samples, lengths fixed."""
        params = [
            vllm.SamplingParams(
                temperature=0.0 if row.get("samples", 1) == 1 else 1.0,
                n=row.get("samples", 1),
                max_tokens=row["max_new"],
                ignore_eos=True,
                detokenize=False,
            )
            for row in rows
        ]
        prompts = [{"prompt_token_ids": row["ids"]} for row in rows]
        answers = self._llm.generate(prompts, params, use_tqdm=False)
        return [[i for sample in answer.outputs for i in sample.token_ids] for answer in answers], {}


def load(request: dict[str, Any]) -> Engine:
    """An engine for the driver's request."""
    torch.set_num_threads(request["threads"])
    return Engine(request["model"], request["dtype"], request["device"])
