"""transformers `generate`: eager loop, SDPA attention, left-padded batches of a size to be tried."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers

BATCH_SIZES = {"cpu": (8, 16, 32, 64), "cuda": (64, 128, 256)}

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
        # Lengths are fixed: nothing ends a row early, and greedy needs no sampling settings of the checkpoint.
        self._model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
        self._device = device

    def describe(self) -> dict[str, Any]:
        """What is in force, and the batch sizes to try."""
        return {
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "device": self._device,
            "threads": torch.get_num_threads(),
            "settings": [{"batch": size} for size in BATCH_SIZES[self._device]],
        }

    def generate(self, rows: list[dict[str, Any]], setting: dict[str, Any]) -> tuple[list[list[int]], dict[str, int]]:
        """Rows of like lengths go together, the best that a padded batch can have; samples are rows of their own."""
        samples = [row.get("samples", 1) for row in rows]
        if max(samples) > 1:
            alone = [{**row, "samples": 1} for row, count in zip(rows, samples, strict=True) for _ in range(count)]
            greedy, self._model.generation_config = self._model.generation_config, _DRAWN
            made, counted = self.generate(alone, setting)
            self._model.generation_config = greedy
            parts = iter(made)
            return [[i for _ in range(count) for i in next(parts)] for count in samples], counted
        order = sorted(range(len(rows)), key=lambda i: (-rows[i]["max_new"], -len(rows[i]["ids"])))
        outputs: list[list[int]] = [[] for _ in rows]
        prompt_tokens = decode_rows = 0
        for begin in range(0, len(order), setting["batch"]):
            members = order[begin : begin + setting["batch"]]
            width = max(len(rows[i]["ids"]) for i in members)
            new = max(rows[i]["max_new"] for i in members)
            tokens = self._batch([rows[i]["ids"] for i in members], width, new)
            for i, ids in zip(members, tokens, strict=True):
                outputs[i] = ids[: rows[i]["max_new"]]
            prompt_tokens += width * len(members)
            decode_rows += (new - 1) * len(members)
        return outputs, {"prompt_tokens_computed": prompt_tokens, "decode_rows": decode_rows}

    def _batch(self, prompts: list[list[int]], width: int, new: int) -> list[list[int]]:
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        with torch.inference_mode():
            out = self._model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new)
        tokens: list[list[int]] = out[:, width:].tolist()
        return tokens


def at_its_best(dtype: str, device: str) -> str:
    """The dtype, or float32 where PyTorch multiplies that twice as fast: bfloat16 on a CPU without its instructions."""
    if device != "cpu" or dtype == "float32":
        return dtype
    return "float32" if _product_seconds(dtype) > 2 * _product_seconds("float32") else dtype


def _product_seconds(dtype: str) -> float:
    x, weight = (torch.full(size, 0.5, dtype=getattr(torch, dtype)) for size in ((64, 576), (1152, 576)))
    taken = []
    for _ in range(6):
        begin = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        taken.append(time.perf_counter() - begin)
    return min(taken)


def load(request: dict[str, Any]) -> Engine:
    """An engine for the driver's request."""
    torch.set_num_threads(request["threads"])
    dtype, device = request["dtype"], request["device"]
    return Engine(request["model"], dtype if request["keep_dtype"] else at_its_best(dtype, device), device)
