"""transformers' continuous batching: a paged cache, prompts that share whole blocks of their beginnings, greedy."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from peer_tools import at_its_best
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

_PATIENCE = 120.0
"""Seconds without a finished request after which it counts as hung."""
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
        # Without a flash library attention is SDPA, which is much slower: a figure must say so.
        flash = is_flash_attn_3_available() or is_flash_attn_2_available()
        self.version = f"{transformers.__version__}, {'flash' if flash else 'SDPA'}"

    def describe(self) -> dict[str, Any]:
        """What is in force. Sizes of blocks, batches and graphs are the library's own choice."""
        return {
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "device": self._device,
            "threads": torch.get_num_threads(),
            "settings": [{}],
        }

    def generate(self, rows: list[dict[str, Any]], setting: dict[str, Any]) -> tuple[list[list[int]], dict[str, int]]:
        """Every sample is a request with its own length; sorted, so that prompts that share come together."""
        order = sorted(range(len(rows)), key=lambda i: rows[i]["ids"])
        drawn = any(row.get("samples", 1) > 1 for row in rows)  # of a workload all rows are
        config = transformers.GenerationConfig(
            do_sample=drawn, eos_token_id=-1, pad_token_id=0, max_new_tokens=1, **(_DRAWN if drawn else {})
        )
        owners: dict[str, int] = {}
        outputs: list[list[int]] = [[] for _ in rows]
        small = {} if self._device == "cuda" else {"continuous_batching_config": _small(), "warmup": False}
        with (
            torch.no_grad(),
            self._model.continuous_batching_context_manager(generation_config=config, timeout=5, **small) as manager,
        ):
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
        return outputs, {}


def _small() -> transformers.ContinuousBatchingConfig:
    """For a CPU, whose free memory the library would take nearly all of."""
    return transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)


def load(request: dict[str, Any]) -> Engine:
    """An engine for the driver's request."""
    torch.set_num_threads(request["threads"])
    return Engine(request["model"], at_its_best(request), request["device"])
