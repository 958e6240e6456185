"""Logit processors that the tests' rows name."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor


def boost(logits: Tensor, rows: Sequence[Any]) -> Tensor:
    """Raise one token's logit, more with each output token; lower that of the prompt's first token."""
    for i, row in enumerate(rows):
        logits[i, row.params["token"]] += row.params["by"] * (1 + len(row.output_ids)) / 4
        if len(row.prompt_ids):
            logits[i, row.prompt_ids[0]] -= 2.0
    return logits


def pause(logits: Tensor, rows: Sequence[Any]) -> Tensor:
    """At a row's token `at`, create the file `reached` and wait until the file `pause` is removed, if there is one."""
    if Path("pause").exists() and any(len(row.output_ids) == row.params["at"] for row in rows):
        Path("reached").touch()
        while Path("pause").exists():
            time.sleep(0.001)
    return logits


PAUSED = {"max_new_tokens": 10, "ignore_eos": True, "custom_logit_processor": "pause", "custom_params": {"at": 5}}
"""Fields of a row at whose fifth token a job waits while there is a file `pause`."""
PAUSING = ["--logit-processor", "pause=tests.e2e.processors:pause"]
"""Options of a command that reads such a row."""
