"""SGLang's offline engine with its radix tree prefix cache, token ids in and out."""

from __future__ import annotations

from typing import Any

import sglang

from batchgen.bench.engines.peer_tools import Outputs, PeerEngine, Row, Setting

_MEMORY = 0.4
"""Share of the device's memory; other engines of the benchmark have models loaded at the same time."""
_ATTENTION = {"float32": "triton"}
"""Dtype -> attention backend, where SGLang's default fails: FlashAttention does not support float32."""


class Engine(PeerEngine):
    """One model in the processes of an engine, which chooses batch and chunk sizes."""

    version = sglang.__version__

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request, "cuda")  # on CPUs SGLang uses all cores of a NUMA node, whatever the threads
        self._engine = sglang.Engine(
            model_path=request["model"], dtype=self.dtype, device=self.device,
            attention_backend=_ATTENTION.get(self.dtype), skip_tokenizer_init=True, mem_fraction_static=_MEMORY,
            random_seed=0, log_level="error",
        )  # fmt: skip

    def prepare(self, rows: list[Row], setting: Setting) -> None:
        """Clear the prefix cache."""
        self._engine.flush_cache()

    def generate(self, rows: list[Row], setting: Setting) -> Outputs:
        """See `PeerEngine`."""
        params = [
            {"temperature": float(n > 1), "n": n, "max_new_tokens": row["max_new"], "ignore_eos": True}
            for row in rows
            for n in [row["samples"]]
        ]
        answers = iter(self._engine.generate(input_ids=[row["ids"] for row in rows], sampling_params=params))
        outputs = [
            [int(i) for _ in range(row["samples"]) for i in next(answers)["output_ids"][-row["max_new"] :]]
            for row in rows
        ]
        return outputs, {}
