"""`batchgen` with a model that computes nothing: `python -m tests.e2e.instant run INPUT ...`.

Everything around the model runs as usual. Prints the process's peak memory in bytes as its last line. With
INSTANT_STEPS=N in the environment, step N takes minutes.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import batchgen.job.setup as setup
from batchgen.cli.app import run_command
from batchgen.kernels.types import LayerKV
from batchgen.models.base import Model, ModelInput, ModelSpec
from batchgen.models.check import CheckedModel
from batchgen.models.load import checked_spec

LIKELIEST = 7
"""Token id that a greedy row generates."""


class InstantModel:
    """A model that returns the same logits for every row, with a tiny KV cache."""

    stream = None

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._logits = torch.zeros(1, spec.vocab_size)
        self._logits[0, LIKELIEST] = 4.0
        self._steps = int(os.environ.get("INSTANT_STEPS", "0"))

    def hidden(self, inputs: ModelInput) -> Tensor:
        if self._steps:
            self._steps -= 1
            if not self._steps:
                time.sleep(300)
        states = torch.zeros(len(inputs.input_ids), self.spec.hidden_size)
        if inputs.capture is not None:
            for layer in inputs.capture.layers:
                inputs.capture.store(layer, states)
        return inputs.select(states)

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        return self._logits.repeat(len(hidden), 1)

    def accepts_embeds(self) -> bool:
        return True


def inspect(checked: CheckedModel, **options: Any) -> ModelSpec:
    spec = checked_spec(checked, **options)
    return replace(spec, hidden_size=4, num_layers=1, kv_layers=(LayerKV(1, 1, 1),))


def load(checked: CheckedModel, spec: ModelSpec) -> Model:
    return InstantModel(spec)


def install() -> None:
    """Let jobs of this process run the instant model."""
    setup.checked_spec, setup.load_checked = inspect, load


def peak_bytes() -> int:
    """Peak resident memory of this process; that of `getrusage` begins with the memory of the one that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main() -> int:
    install()
    code = run_command(sys.argv[1:])
    print(peak_bytes())
    return code


if __name__ == "__main__":
    sys.exit(main())
