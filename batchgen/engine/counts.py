"""`TokenCounts`: the slots of penalised samples in lists of counts on the device.

The host knows no token here, only how many there can be: each sample's list holds at most the ids it was given and one
for each draw that was counted. Lists grow by that bound, so nothing is ever read back.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.planning import Workload
from batchgen.kernels.counts import CountLists
from batchgen.kernels.device import Device
from batchgen.kernels.ops import Ops

__all__ = ["PenalisedRows", "TokenCounts", "lists_bytes"]

_SLOTS, _WIDTH = 16, 64
"""What is taken at first; both double."""

_ENTRY = 8
"""Bytes of an id and its count."""

Ids = npt.NDArray[np.int32]

Penalties = tuple[Tensor, Tensor, Tensor]
"""Repetition, frequency and presence, each [Q] float32."""


class TokenCounts:
    """Slots and their lists. A slot that was given back may be taken at once: the device works in order."""

    def __init__(self, vocab_size: int, device: Device) -> None:
        """Nothing is taken on the device before the first sample."""
        self._vocab_size = vocab_size
        self._device = device
        self._lists: CountLists | None = None
        self._bounds = np.zeros(1, np.int64)
        """[S] how many tokens a slot's list holds at most"""
        self._free: list[int] = []
        self._begun: dict[int, Ids] = {}
        """Slots whose lists the device does not know yet"""

    def begin(self, seen: Ids | None = None) -> int:
        """A sample's slot. `seen`: ids that stand in its list although it did not generate them (its prompt)."""
        if not self._free:
            slots = max(_SLOTS, 2 * len(self._bounds))
            self._free = list(range(slots - 1, len(self._bounds) - 1, -1))
            self._bounds = np.concatenate([self._bounds, np.zeros(slots - len(self._bounds), np.int64)])
        slot = self._free.pop()
        ids = np.unique(seen) if seen is not None else np.zeros(0, np.int32)
        self._begun[slot] = ids
        self._bounds[slot] = len(ids)
        return slot

    def end(self, slot: int) -> None:
        """Give a slot back. A step that was planned before may still count for it: its bound stays until then."""
        self._begun.pop(slot, None)
        self._free.append(slot)

    def width(self, slots: npt.NDArray[np.int64], more: int = 0) -> int:
        """How many tokens the fullest of some lists may hold, once `more` are counted; at least 1."""
        return max(1, min(int(self._bounds[slots].max()) + more, self._vocab_size))

    def counted(self, slots: npt.NDArray[np.int64]) -> None:
        """One more token was counted for each slot, once."""
        self._bounds[slots] += 1

    def lists(self, width: int = 1) -> CountLists:
        """The lists as they are now, with room for `width` tokens each. What began is uploaded first, at once."""
        found = self._lists
        slots = len(self._bounds)
        width = max(width, *(len(ids) for ids in self._begun.values())) if self._begun else width
        if found is None:
            found = CountLists.empty(slots, _power_of_2(width), self._device.torch_device)
        elif found.ids.shape[0] < slots or found.ids.shape[1] < width:
            found = found.grown(slots, max(found.ids.shape[1], _power_of_2(width)))
        self._lists = found
        if self._begun:
            self._upload(found)
        return found

    def _upload(self, lists: CountLists) -> None:
        begun = np.array(list(self._begun), np.int64)
        lengths = np.array([len(ids) for ids in self._begun.values()], np.int32)
        if not lengths.any():
            slots, used = self._device.upload(begun, lengths)
        else:
            places = np.concatenate([np.arange(length) for length in lengths.tolist()])
            flat = np.concatenate(list(self._begun.values())).astype(np.int32)
            slots, used, of, at, ids = self._device.upload(begun, lengths, begun.repeat(lengths), places, flat)
            lists.ids.index_put_((of, at), ids)
            lists.counts.index_put_((of, at), torch.zeros_like(ids, dtype=torch.float32))
        lists.used.index_put_((slots,), used)
        self._begun.clear()


class PenalisedRows:
    """The penalised rows of one set of rows, step after step."""

    def __init__(
        self, counts: TokenCounts, slots: npt.NDArray[np.int64], on_device: Tensor, rows: Tensor, columns: Penalties
    ) -> None:
        """Everything is of Q rows: `on_device` the slots again, `rows` their places."""
        self._counts = counts
        self._host_slots = slots
        self._slots = on_device
        self._rows = rows
        self._columns = columns

    def penalise(self, logits: Tensor, ops: Ops) -> None:
        """Penalise what the rows have drawn so far, in place; makes room for the next token, too."""
        width = self._counts.width(self._host_slots)
        lists = self._counts.lists(self._counts.width(self._host_slots, 1))
        ops.penalise(logits, self._rows, self._slots, lists, *self._columns, width)

    def count(self, tokens: Tensor, ops: Ops) -> None:
        """Count each row's token of `tokens` [R] int64."""
        width = self._counts.width(self._host_slots, 1)
        ops.count_tokens(self._counts.lists(width), self._slots, self._rows, tokens, width)
        self._counts.counted(self._host_slots)


def lists_bytes(workload: Workload, rows: int, vocab_size: int, *, prompts: bool) -> int:
    """Most bytes that the lists of a job take, while they grow.

    Args:
        workload: the job.
        rows: most sequences at once, but for the samples of one prompt, which begin together.
        vocab_size: V.
        prompts: whether a repetition penalty falls on the ids of prompts, too.
    """
    table, samples = workload.table, workload.samples
    params = table.params
    penalised = np.array([p.penalised for p in params], np.bool_)[table.params_id] & (samples > 0)
    if not penalised.any():
        return 0
    listed = np.array([prompts and p.repetition_penalty != 1.0 for p in params], np.bool_)
    ids = np.where(listed[table.params_id], np.diff(table.offsets), 0) + table.max_new_tokens
    width = min(int(ids[penalised].max()), vocab_size)
    begun = min(int(samples[penalised].sum(dtype=np.int64)), max(rows, int(samples[penalised].max())))
    slots = max(_SLOTS, 1 << begun.bit_length())  # slot 0 is nobody's
    return 3 * slots * _power_of_2(width) * _ENTRY // 2  # half as much again is held while they are moved


def _power_of_2(width: int) -> int:
    return max(_WIDTH, 1 << (width - 1).bit_length())
