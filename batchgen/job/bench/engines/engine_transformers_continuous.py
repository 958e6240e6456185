"""transformers' continuous batching: a paged cache, prompts that share whole blocks of their beginnings, greedy.

Each pass has a manager of its own, so that none finds its prompts in the cache. It is made, and its graphs are
captured, before the time that is measured.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from peer_tools import at_its_best
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

_PATIENCE = 120.0
"""Seconds without a finished request after which it counts as hung."""
_STEP_TOKENS = (256, 1024)
"""Of a CPU, to be tried."""
_CACHE_BYTES = 4 << 30
"""Of a CPU."""
_DRAWN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


class Engine:
    """One model in memory."""

    def __init__(self, model: str, dtype: str, device: str) -> None:
        transformers.utils.logging.disable_progress_bar()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
        )
        self._model.to(device).eval()
        self._device = device
        self._manager: Any = None
        # Without a flash library attention is SDPA, which is much slower: a figure must say so.
        flash = is_flash_attn_3_available() or is_flash_attn_2_available()
        self.version = f"{transformers.__version__}, {'flash' if flash else 'SDPA'}"

    def describe(self) -> dict[str, Any]:
        """What is in force. Sizes of blocks, and of a GPU's batches and graphs, are the library's own choice."""
        return {
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "device": self._device,
            "threads": torch.get_num_threads(),
            "settings": [{}] if self._device == "cuda" else [{"batched_tokens": tokens} for tokens in _STEP_TOKENS],
        }

    def warm(self, rows: list[dict[str, Any]], setting: dict[str, Any]) -> None:
        """A manager that waits for these rows' requests."""
        drawn = any(row.get("samples", 1) > 1 for row in rows)  # of a workload all rows are
        config = transformers.GenerationConfig(
            do_sample=drawn, eos_token_id=-1, pad_token_id=0, max_new_tokens=1, **(_DRAWN if drawn else {})
        )
        small = {} if self._device == "cuda" else {"continuous_batching_config": self._small(rows, setting)}
        with torch.no_grad():
            self._manager = self._model.init_continuous_batching(generation_config=config, **small)
            if self._device == "cuda":
                self._manager.warmup()
            self._manager.start()

    def generate(self, rows: list[dict[str, Any]], setting: dict[str, Any]) -> tuple[list[list[int]], dict[str, int]]:
        """Every sample is a request with its own length; sorted, so that prompts that share come together."""
        if self._manager is None:
            self.warm(rows, setting)
        manager, self._manager = self._manager, None
        order = sorted(range(len(rows)), key=lambda i: rows[i]["ids"])
        owners: dict[str, int] = {}
        outputs: list[list[int]] = [[] for _ in rows]
        try:
            for i in order:
                for sample in range(rows[i].get("samples", 1)):
                    name = f"{i}-{sample}"
                    owners[name] = i
                    manager.add_request(rows[i]["ids"], request_id=name, max_new_tokens=rows[i]["max_new"])
            left = len(owners)
            while left:
                result = manager.get_result(timeout=_PATIENCE)
                if result is None:
                    raise RuntimeError(f"continuous batching ended with {left} requests unanswered")
                if result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(str(result.error))
                    outputs[owners[result.request_id]] += result.generated_tokens
                    left -= 1
        finally:  # here, not at the end of the process, which waits for the manager's thread
            manager.stop(block=True, timeout=5)
            manager.destroy()
        return outputs, {}

    def _small(self, rows: list[dict[str, Any]], setting: dict[str, Any]) -> transformers.ContinuousBatchingConfig:
        """For a CPU, whose free memory the library would take nearly all of: all rows' blocks, up to a bound."""
        made = transformers.ContinuousBatchingConfig(max_batch_tokens=setting.get("batched_tokens", _STEP_TOKENS[0]))
        sizes = self._model.config.get_text_config()
        heads = getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads
        width = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
        bytes_of_token = 2 * sizes.num_hidden_layers * heads * width * self._model.dtype.itemsize
        wanted = sum(
            row.get("samples", 1) * (-(-(len(row["ids"]) + row["max_new"]) // made.page_size) + 1) for row in rows
        )
        made.num_blocks = max(2, min(wanted, _CACHE_BYTES // (bytes_of_token * made.page_size)))
        return made


def load(request: dict[str, Any]) -> Engine:
    """An engine for the driver's request."""
    torch.set_num_threads(request["threads"])
    return Engine(request["model"], at_its_best(request), request["device"])
