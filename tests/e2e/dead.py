"""`batchgen` with a model whose every step runs out of memory: `python -m tests.e2e.dead run INPUT ...`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

import batchgen.job.setup as setup
from batchgen.cli.app import run_command
from batchgen.models.base import Model, ModelInput
from batchgen.models.check import CheckedModel
from tests.e2e.instant import InstantModel, inspect


class NoMemoryModel(InstantModel):
    """A model whose forward always runs out of memory."""

    def hidden(self, inputs: ModelInput) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _load(checked: CheckedModel, *, products: Any, **options: Any) -> Model:
    return NoMemoryModel(inspect(checked, **options))


if __name__ == "__main__":
    setup.checked_spec, setup.load_checked = inspect, _load
    sys.exit(run_command(sys.argv[1:]))
