"""SGLang, offline, in its own engine: a radix tree of prefixes, token ids in and out."""

from __future__ import annotations

from typing import Any

import sglang

_MEMORY = 0.4
"""Share of the device: other engines of the benchmark hold theirs at the same time."""
_ATTENTION = {"float32": "triton"}
"""Where its own choice will not do: flash attention, which it takes for a Hopper GPU, has no float32."""


class Engine:
    """One model in the processes of an engine."""

    version = sglang.__version__

    def __init__(self, model: str, dtype: str, device: str, threads: int) -> None:
        self._dtype, self._device, self._threads = dtype, device, threads
        self._engine = sglang.Engine(
            model_path=model,
            dtype=dtype,
            device=device,
            attention_backend=_ATTENTION.get(dtype),
            skip_tokenizer_init=True,
            mem_fraction_static=_MEMORY,
            random_seed=0,
            log_level="error",
        )

    def describe(self) -> dict[str, Any]:
        """What is in force. Sizes of batches and chunks are its own choice."""
        return {"dtype": self._dtype, "device": self._device, "threads": self._threads, "settings": [{}]}

    def prepare(self, setting: dict[str, Any]) -> None:
        """Forget the prompts of earlier passes."""
        self._engine.flush_cache()

    def generate(self, rows: list[dict[str, Any]], setting: dict[str, Any]) -> tuple[list[list[int]], dict[str, int]]:
        """Greedy but for rows of several samples, lengths fixed."""
        params = [
            {
                "temperature": 0.0 if row.get("samples", 1) == 1 else 1.0,
                "n": row.get("samples", 1),
                "max_new_tokens": row["max_new"],
                "ignore_eos": True,
            }
            for row in rows
        ]
        answers = iter(self._engine.generate(input_ids=[row["ids"] for row in rows], sampling_params=params))
        outputs = [
            [int(i) for _ in range(row.get("samples", 1)) for i in next(answers)["output_ids"][-row["max_new"] :]]
            for row in rows
        ]
        return outputs, {}


def load(request: dict[str, Any]) -> Engine:
    """An engine for the driver's request."""
    if request["device"] != "cuda":  # there it takes all processors of a memory node, whatever threads are asked for
        raise RuntimeError("it is measured on a GPU only")
    return Engine(request["model"], request["dtype"], request["device"], request["threads"])
