"""transformers' `generate`: eager loop, SDPA attention, static left-padded batches."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from peer_tools import expand_samples, fastest_dtype, join_samples, static_batches

BATCH_SIZES = {"cpu": (8, 16, 32, 64, 128, 256), "cuda": (64, 128, 256, 512)}

# No end-of-sequence token, so that lengths are fixed, and no sampling defaults of the checkpoint.
_GREEDY = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
_SAMPLED = transformers.GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)


class Engine:
    """One model in memory."""

    version = transformers.__version__

    def __init__(self, model: str, dtype: str, device: str) -> None:
        transformers.utils.logging.disable_progress_bar()
        kind = getattr(torch, dtype)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=kind, attn_implementation="sdpa", local_files_only=True
        )
        self._model.to(device).eval()
        self._device = device

    def describe(self) -> dict[str, Any]:
        """Dtype, device, threads, and settings to try: batch sizes, with rows sorted by output or by prompt length."""
        return {
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "device": self._device,
            "threads": torch.get_num_threads(),
            "settings": [
                {"batch": size, **order} for order in ({}, {"prompt_first": 1}) for size in BATCH_SIZES[self._device]
            ],
        }

    def generate(self, rows: list[dict[str, Any]], setting: dict[str, Any]) -> tuple[list[list[int]], dict[str, int]]:
        """Generate with fixed lengths, in batches of rows of similar length; each sample is a row of a batch."""
        samples = expand_samples(rows)
        outputs: list[list[int]] = [[] for _ in samples]
        prompt_tokens = decode_rows = 0
        for sampled, members in static_batches(samples, setting["batch"], prompt_first="prompt_first" in setting):
            width = max(len(samples[i]["ids"]) for i in members)
            new = max(samples[i]["max_new"] for i in members)
            tokens = self._batch([samples[i]["ids"] for i in members], width, new, _SAMPLED if sampled else _GREEDY)
            for i, ids in zip(members, tokens, strict=True):
                outputs[i] = ids[: samples[i]["max_new"]]
            prompt_tokens += width * len(members)
            decode_rows += (new - 1) * len(members)
        return join_samples(rows, outputs), {"prompt_tokens_computed": prompt_tokens, "decode_rows": decode_rows}

    def _batch(
        self, prompts: list[list[int]], width: int, new: int, config: transformers.GenerationConfig
    ) -> list[list[int]]:
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        self._model.generation_config = config
        with torch.inference_mode():
            out = self._model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new)
        tokens: list[list[int]] = out[:, width:].tolist()
        return tokens


def load(request: dict[str, Any]) -> Engine:
    """The engine of a load request."""
    torch.set_num_threads(request["threads"])
    return Engine(request["model"], fastest_dtype(request), request["device"])
