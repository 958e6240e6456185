"""transformers' continuous batching: a paged cache with prefix sharing of whole blocks.

Each pass has a new manager, so that its prefix cache is empty. The manager is created, and its CUDA graphs are
captured, before the measured time.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from batchgen.bench.engines.peer_tools import Outputs, PeerEngine, Row, Setting, load_transformers

_HANG_SECONDS = 120.0
"""Seconds without a finished request after which the engine is considered hung."""
_STEP_TOKENS = (256, 1024)
"""Tokens per step to try on a CPU."""
_CACHE_BYTES = 4 << 30
"""Largest KV cache on a CPU."""
_SAMPLED = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


class Engine(PeerEngine):
    """One model in memory. Settings are tokens per step on a CPU."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request)
        self._model = load_transformers(request)
        self.threads = torch.get_num_threads()
        self.dtype = str(self._model.dtype).removeprefix("torch.")
        self._manager: Any = None
        if self.device != "cuda":
            self.settings = [{"batched_tokens": tokens} for tokens in _STEP_TOKENS]
        # Without a FlashAttention library it falls back to SDPA, which is much slower; the version shows it.
        flash = is_flash_attn_3_available() or is_flash_attn_2_available()
        self.version = f"{transformers.__version__}, {'flash' if flash else 'SDPA'}"

    def prepare(self, rows: list[Row], setting: Setting) -> None:
        """Create and start the manager of the next pass."""
        sampled = any(row["samples"] > 1 for row in rows)  # all rows of a workload have the same number
        config = transformers.GenerationConfig(
            do_sample=sampled, eos_token_id=-1, pad_token_id=0, max_new_tokens=1, **(_SAMPLED if sampled else {})
        )
        small = {}
        if self.device != "cuda":
            step_tokens = setting.get("batched_tokens", _STEP_TOKENS[0])
            small["continuous_batching_config"] = cpu_batching(self._model, rows, step_tokens)
        with torch.no_grad():
            self._manager = self._model.init_continuous_batching(generation_config=config, **small)
            if self.device == "cuda":
                self._manager.warmup()
            self._manager.start()

    def run(self, samples: list[Row], setting: Setting) -> Outputs:
        """See `PeerEngine`. Every sample is a request; they are sorted so that prefixes are adjacent."""
        manager, self._manager = self._manager, None
        outputs: list[list[int]] = [[] for _ in samples]
        try:
            for i in sorted(range(len(samples)), key=lambda i: samples[i]["ids"]):
                manager.add_request(samples[i]["ids"], request_id=str(i), max_new_tokens=samples[i]["max_new"])
            left = len(samples)
            while left:
                result = manager.get_result(timeout=_HANG_SECONDS)
                if result is None:
                    raise RuntimeError(f"continuous batching ended with {left} requests unanswered")
                if result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(str(result.error))
                    outputs[int(result.request_id)] = result.generated_tokens
                    left -= 1
        finally:  # the process cannot exit while the manager's thread runs
            manager.stop(block=True, timeout=5)
            manager.destroy()
        return outputs, {}


def cpu_batching(model: Any, rows: list[Row], step_tokens: int) -> transformers.ContinuousBatchingConfig:
    """Configuration on a CPU, with blocks for all rows, up to `_CACHE_BYTES`. The default takes nearly all memory."""
    made = transformers.ContinuousBatchingConfig(max_batch_tokens=step_tokens)
    sizes = model.config.get_text_config()
    heads = getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads
    width = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
    bytes_of_token = 2 * sizes.num_hidden_layers * heads * width * model.dtype.itemsize
    wanted = sum(row["samples"] * (-(-(len(row["ids"]) + row["max_new"]) // made.page_size) + 1) for row in rows)
    made.num_blocks = max(2, min(wanted, _CACHE_BYTES // (bytes_of_token * made.page_size)))
    return made
