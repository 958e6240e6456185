"""Calling custom logit processors: one call a step for all rows that name one, and only guilty rows fail."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.kernels.device import Device
from batchgen.processors import LogitProcessor, ProcessorRow
from batchgen.request import Request

__all__ = ["OfferedRow", "process"]


class OfferedRow(ProcessorRow):
    """A sample as its processor sees it: copies of its tokens, and a dict of its own."""

    def __init__(self, request: Request, output_ids: list[int]) -> None:
        self._request = request
        self._output_ids = output_ids

    @cached_property
    def prompt_ids(self) -> tuple[int, ...]:
        """[P]; empty where the prompt is given as embeddings."""
        return tuple(self._request.known_ids.tolist())

    @property
    def output_ids(self) -> tuple[int, ...]:
        """[C] so far."""
        return tuple(self._output_ids)

    @cached_property
    def params(self) -> Mapping[str, Any]:
        """The row's `custom_params`."""
        text = self._request.params.custom_params
        return json.loads(text) if text is not None else {}


def process(
    device: Device, function: LogitProcessor, name: str, logits: Tensor, index: list[int], rows: Sequence[OfferedRow]
) -> dict[int, ErrorInfo]:
    """Let `function` change the rows `index` of a step's logits, in place; rows it fails on stay as they are.

    A batch that it does not take whole is handed to it again row by row, so that a row's result never depends on what
    its neighbours make of the processor.

    This waits: foreign code may have waited anyway, and what it made of a row decides whether the row ends here.

    Args:
        device: the step's.
        function: the processor.
        name: as the run named it.
        logits: [R, V] float32.
        index: [r] rows that named it.
        rows: [r] what is offered of each.

    Returns:
        What went wrong, by row of the step.
    """
    (at,) = device.upload(np.array(index, np.int64))
    result, problem = _call(function, logits[at], rows)
    if result is None and len(index) == 1:
        return {index[0]: _error(name, problem)}
    if result is None:
        errors: dict[int, ErrorInfo] = {}
        for row, offered in zip(index, rows, strict=True):
            errors |= process(device, function, name, logits, [row], [offered])
        return errors
    logits.index_copy_(0, at, result)
    (largest,) = device.download(result.amax(dim=-1)).wait()
    return {
        index[i]: _error(name, "it masked every token" if value == -torch.inf else f"it gave {value} among the logits")
        for i, value in enumerate(largest.tolist())
        if not -torch.inf < value < torch.inf
    }


def _call(function: LogitProcessor, logits: Tensor, rows: Sequence[OfferedRow]) -> tuple[Tensor | None, str]:
    """The processed logits, or what is wrong with the call; `logits` is a copy that it may change."""
    shape, device = logits.shape, logits.device
    try:
        result = function(logits, rows)
    except (Exception, SystemExit) as problem:  # whatever foreign code does
        if isinstance(problem, torch.OutOfMemoryError):
            raise  # a smaller step may do
        lines = str(problem).strip().splitlines()
        return None, f"{type(problem).__name__}: {lines[0][:200]}" if lines else type(problem).__name__
    if not isinstance(result, Tensor):
        return None, f"it returned {type(result).__name__}, not a tensor"
    if result.shape != shape:
        return None, f"it returned shape {list(result.shape)}, not {list(shape)}"
    if result.dtype != torch.float32 or result.device != device or result.layout != torch.strided:
        return None, f"it returned {result.dtype} on {result.device}, not dense torch.float32 on {device}"
    return result, ""


def _error(name: str, problem: str) -> ErrorInfo:
    return ErrorInfo(
        ErrorCode.PROCESSOR_ERROR,
        f"the logit processor {name!r} failed on this row: {problem}",
        "custom_logit_processor",
    )
