"""`GrammarMasks`: packed token masks of the constrained rows of a step."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.sequence import Sequence
from batchgen.kernels.device import Device
from batchgen.kernels.ops import Ops
from batchgen.kernels.shaping import bitmask_width

_SLOW_FILL_SECONDS = 0.25
"""Time to fill one step's masks after which the next step fills and times each mask separately."""


class GrammarMasks:
    """Fills the masks of a fixed set of constrained rows in every step, together and on several threads."""

    def __init__(self, rows: list[tuple[int, Sequence]], device: Device, ops: Ops) -> None:
        """`rows`: (row of the step, sample) of the constrained rows."""
        self._device = device
        self._ops = ops
        self._rows = [row for _, row in rows]
        (self._places,) = device.upload(np.array([i for i, _ in rows], np.int64))
        self._slow = False

    def fill(self, vocab: int) -> Tensor:
        """[M, ceil(V / 32)] int32 packed mask of the tokens that each row allows next.

        Ended rows allow all tokens, because their token is discarded.
        """
        states = [None if row.ended else row.grammar for row in self._rows]
        words = np.empty((len(states), bitmask_width(vocab)), np.int32)
        began = time.perf_counter()
        waiting = {
            i: state.matcher
            for i, state in enumerate(states)
            if state is not None and state.fills_in_batches and not state.has_mask
        }
        together = len(waiting) > 1 and not self._slow and _fill_together(list(waiting.values()), list(waiting), words)
        for i, state in enumerate(states):
            if state is None:
                words[i] = -1
            elif not (together and i in waiting):
                state.fill(words[i])
        self._slow = time.perf_counter() - began > _SLOW_FILL_SECONDS
        (masks,) = self._device.upload(words)
        return masks

    def apply(self, logits: Tensor, masks: Tensor) -> None:
        """Mask the tokens of `logits` [R, V] float32 that `masks` (of `fill`) do not allow, in place."""
        self._ops.apply_bitmask(logits, masks, self._places)


def _fill_together(matchers: list[Any], places: list[int], words: npt.NDArray[np.int32]) -> bool:
    try:
        _batch_matcher().batch_fill_next_token_bitmask(matchers, torch.from_numpy(words), places)
    except Exception:
        return False  # fill one by one, to find the failing matcher
    return True


@lru_cache(maxsize=1)
def _batch_matcher() -> Any:
    # Imported here, because importing xgrammar takes seconds.
    import xgrammar

    return xgrammar.BatchGrammarMatcher()
