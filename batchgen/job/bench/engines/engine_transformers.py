"""transformers `generate`: eager loop, SDPA attention, left-padded batches of a size to be tried."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from peer_tools import apart, at_its_best, static_batches, together

BATCH_SIZES = {"cpu": (8, 16, 32, 64, 128, 256), "cuda": (64, 128, 256, 512)}

# Lengths are fixed: nothing ends a row early, and greedy needs no sampling settings of the checkpoint.
_GREEDY = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
_DRAWN = transformers.GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)


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
        """What is in force, and the batches to try: of outputs that are alike in length, or of prompts that are."""
        return {
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "device": self._device,
            "threads": torch.get_num_threads(),
            "settings": [
                {"batch": size, **order} for order in ({}, {"prompt_first": 1}) for size in BATCH_SIZES[self._device]
            ],
        }

    def generate(self, rows: list[dict[str, Any]], setting: dict[str, Any]) -> tuple[list[list[int]], dict[str, int]]:
        """Rows of like lengths go together, the best that a padded batch can have; samples are rows of their own."""
        alone = apart(rows)
        outputs: list[list[int]] = [[] for _ in alone]
        prompt_tokens = decode_rows = 0
        for drawn, members in static_batches(alone, setting["batch"], prompt_first="prompt_first" in setting):
            width = max(len(alone[i]["ids"]) for i in members)
            new = max(alone[i]["max_new"] for i in members)
            tokens = self._batch([alone[i]["ids"] for i in members], width, new, _DRAWN if drawn else _GREEDY)
            for i, ids in zip(members, tokens, strict=True):
                outputs[i] = ids[: alone[i]["max_new"]]
            prompt_tokens += width * len(members)
            decode_rows += (new - 1) * len(members)
        return together(rows, outputs), {"prompt_tokens_computed": prompt_tokens, "decode_rows": decode_rows}

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
    """An engine for the driver's request."""
    torch.set_num_threads(request["threads"])
    return Engine(request["model"], at_its_best(request), request["device"])
