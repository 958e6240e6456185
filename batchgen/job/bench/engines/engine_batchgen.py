"""batchgen itself, through its Python API: rows in, planning and all, completions out."""

from __future__ import annotations

from typing import Any

import torch

from batchgen import __version__
from batchgen.engine.engine import Engine as Batchgen


class Engine:
    """One model in memory."""

    version = __version__

    def __init__(self, model: str, dtype: str, device: str, threads: int) -> None:
        self._engine = Batchgen(model, dtype=dtype, device=device, cpu_threads=threads)

    def describe(self) -> dict[str, Any]:
        """What is in force. There is nothing to try: its own defaults are what a user gets."""
        spec = self._engine.model.spec
        return {
            "dtype": str(spec.dtype).removeprefix("torch."),
            "device": spec.device.type,
            "threads": torch.get_num_threads(),
            "settings": [{}],
        }

    def generate(self, rows: list[dict[str, Any]], setting: dict[str, Any]) -> tuple[list[list[int]], dict[str, int]]:
        """Greedy, lengths fixed."""
        asked = [
            {
                "input_ids": row["ids"],
                "sampling_params": {"temperature": 0, "max_new_tokens": row["max_new"], "ignore_eos": True},
            }
            for row in rows
        ]
        outputs: list[list[int]] = [[] for _ in rows]
        for completion in self._engine.generate(asked):
            if completion.error is not None:
                raise RuntimeError(f"row {completion.row_index}: {completion.error.message}")
            outputs[completion.row_index] = [int(i) for i in completion.output_ids or ()]
        running = self._engine.last_run
        assert running is not None
        stats = running.scheduler.stats
        return outputs, {
            "prompt_tokens_computed": stats.prompt_tokens + stats.recomputed_tokens + stats.relogit_tokens,
            "decode_rows": stats.decode_tokens,
            "steps": stats.steps,
            "preemptions": stats.preemptions,
            "decode_kv_positions": stats.decode_kv_positions,
            "decode_kv_reads": stats.decode_kv_reads,
            "kv_peak_bytes": stats.peak_pages * running.page_bytes,
        }


def load(request: dict[str, Any]) -> Engine:
    """An engine for the driver's request."""
    return Engine(request["model"], request["dtype"], request["device"], request["threads"])
