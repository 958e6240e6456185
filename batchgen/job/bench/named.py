"""The named workloads. Those sized for a CPU stand in configs/bench/ as well, in the words of a definition file."""

from __future__ import annotations

from typing import Any, Final

from batchgen.job.bench.workloads import AdapterSet, Level, Workload

__all__ = ["GPU_WORKLOADS", "ITEM_SCHEMA", "MORE_WORKLOADS", "WORKLOADS"]

_UNIQUE: Final = (Level(64, (32, 256)),)

ITEM_SCHEMA: Final[dict[str, Any]] = {
    "type": "array",
    "minItems": 64,
    "items": {
        "type": "object",
        "properties": {
            "kind": {"enum": ["note", "task", "event"]},
            "text": {"type": "string", "maxLength": 24},
            "score": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["kind", "text", "score"],
        "additionalProperties": False,
    },
}
"""Has every kind of place that a grammar can be at, and no end within some thousand tokens: rows keep their lengths."""

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("unique", "64 prompts of 32-256 tokens that share nothing, 64 out", _UNIQUE, (64, 64)),
        Workload(
            "shared-prefix",
            "64 prompts of 32 tokens after one prefix of 1,024, 32 out",
            (Level(1, (1024, 1024)), Level(64, (32, 32))),
            (32, 32),
        ),
        Workload(
            "few-shot-tree",
            "a root of 256 tokens, 8 groups of 512, 8 prompts of 32 in each, 32 out",
            (Level(1, (256, 256)), Level(8, (512, 512)), Level(8, (32, 32))),
            (32, 32),
        ),
        Workload("mixed-lengths", "64 prompts of 32-256 tokens, 8-256 out", _UNIQUE, (8, 256)),
    )
}
"""What runs where none is named, in this order."""

MORE_WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            "multi-turn",
            "8 conversations of 8 turns, a row for each turn: 64-128 tokens, then 32-96 more each time, 32 out",
            (Level(8, (64, 128)), *[Level(1, (32, 96))] * 7),
            (32, 32),
            rows_at="nodes",
        ),
        Workload(
            "n-samples",
            "8 prompts of 32-256 tokens, 8 samples of each drawn at temperature 1, 64 out",
            (Level(8, (32, 256)),),
            (64, 64),
            samples=8,
        ),
        Workload(
            "json-constrained",
            "unique, every second row held to a JSON schema",
            _UNIQUE,
            (64, 64),
            fields={"json_schema": ITEM_SCHEMA},
            every=2,
        ),
        Workload(
            "logprobs",
            "unique, with the logprobs of the 20 likeliest tokens at every position of the output",
            _UNIQUE,
            (64, 64),
            fields={"return_logprob": True, "top_logprobs_num": 20},
        ),
        Workload(
            "hidden-states",
            "unique, with the last layer's states of all output tokens, written to a Parquet file",
            _UNIQUE,
            (64, 64),
            fields={"return_hidden_states": {"layers": [-1], "tokens": "output"}},
        ),
        Workload(
            "many-loras",
            "unique, rows of 8 random LoRA adapters of rank 8 in turn",
            _UNIQUE,
            (64, 64),
            adapters=AdapterSet(8),
        ),
    )
}
"""What a row may ask for beside tokens, and other trees: they run where they are named, or `all` is."""

GPU_WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            "w-nano",
            "256 prompts of 100-1,024 tokens that share nothing, 100-1,024 out",
            (Level(256, (100, 1024)),),
            (100, 1024),
        ),
        Workload(
            "w-prefix",
            "4,096 prompts of 64 tokens after one prefix of 2,000, 128 out",
            (Level(1, (2000, 2000)), Level(4096, (64, 64))),
            (128, 128),
        ),
        Workload(
            "w-unshared",
            "4,096 prompts of 2,064 tokens that share nothing, 128 out: w-prefix without its prefix",
            (Level(4096, (2064, 2064)),),
            (128, 128),
        ),
        Workload(
            "w-tree",
            "a root of 300 tokens, 16 tasks of 1,200, 256 questions of 120 in each, 4 samples of 200 out",
            (Level(1, (300, 300)), Level(16, (1200, 1200)), Level(256, (120, 120))),
            (200, 200),
            samples=4,
        ),
    )
}
"""Sized for a GPU: hours on a CPU, so that they run only where they are named."""
