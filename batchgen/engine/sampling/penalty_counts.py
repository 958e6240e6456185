"""Token counts for penalties, stored on the device in one list per sample.

The host does not read the tokens. It only tracks an upper bound for the length of each list: the initial ids plus one
per counted token. Lists grow by that bound.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.workload import JobWorkload
from batchgen.kernels.counts import CountLists, Penalties
from batchgen.kernels.device import Device
from batchgen.kernels.ops import Ops

_INITIAL_SLOTS, _INITIAL_WIDTH = 16, 64
"""Initial number and length of lists; both are doubled when needed."""

_ENTRY_BYTES = 8
"""Bytes of an id and its count."""

Ids = npt.NDArray[np.int32]


class TokenCounts:
    """Slots with a list of token counts each. A freed slot can be reused at once, because the device works in order."""

    def __init__(self, vocab_size: int, device: Device) -> None:
        """The device lists are allocated with the first sample."""
        self._vocab_size = vocab_size
        self._device = device
        self._lists: CountLists | None = None
        self._max_counts = np.zeros(1, np.int64)
        """[S] upper bound of each list's length"""
        self._free: list[int] = []
        self._new_slots: dict[int, Ids] = {}
        """New slot -> its initial ids, which are not uploaded yet"""

    def add(self, prompt_ids: Ids | None = None) -> int:
        """Allocate a slot for a sample. `prompt_ids`: initial ids of its list, with a count of 0."""
        if not self._free:
            slots = max(_INITIAL_SLOTS, 2 * len(self._max_counts))
            self._free = list(range(slots - 1, len(self._max_counts) - 1, -1))
            self._max_counts = np.concatenate([self._max_counts, np.zeros(slots - len(self._max_counts), np.int64)])
        slot = self._free.pop()
        ids = np.unique(prompt_ids) if prompt_ids is not None else np.zeros(0, np.int32)
        self._new_slots[slot] = ids
        self._max_counts[slot] = len(ids)
        return slot

    def release(self, slot: int) -> None:
        """Free a slot. A step in flight may still count a token for it, so its bound is kept until it is reused."""
        self._new_slots.pop(slot, None)
        self._free.append(slot)

    def width(self, slots: npt.NDArray[np.int64], more: int = 0) -> int:
        """Upper bound of the longest list of `slots` after `more` counted tokens; at least 1."""
        return max(1, min(int(self._max_counts[slots].max()) + more, self._vocab_size))

    def counted(self, slots: npt.NDArray[np.int64]) -> None:
        """Record that one token was counted for each slot."""
        self._max_counts[slots] += 1

    def lists(self, width: int = 1) -> CountLists:
        """The device lists, with room for `width` tokens each. Uploads the initial ids of new slots first."""
        lists = self._lists
        slots = len(self._max_counts)
        width = max(width, *(len(ids) for ids in self._new_slots.values())) if self._new_slots else width
        if lists is None:
            lists = CountLists.empty(slots, _power_of_2(width), self._device.torch_device)
        elif lists.ids.shape[0] < slots or lists.ids.shape[1] < width:
            lists = lists.grown(slots, max(lists.ids.shape[1], _power_of_2(width)))
        self._lists = lists
        if self._new_slots:
            self._upload(lists)
        return lists

    def _upload(self, lists: CountLists) -> None:
        new_slots = np.array(list(self._new_slots), np.int64)
        lengths = np.array([len(ids) for ids in self._new_slots.values()], np.int32)
        if not lengths.any():
            slots, used = self._device.upload(new_slots, lengths)
        else:
            places = np.concatenate([np.arange(length) for length in lengths.tolist()])
            flat = np.concatenate(list(self._new_slots.values())).astype(np.int32)
            slots, used, of, at, ids = self._device.upload(new_slots, lengths, new_slots.repeat(lengths), places, flat)
            lists.ids.index_put_((of, at), ids)
            lists.counts.index_put_((of, at), torch.zeros_like(ids, dtype=torch.float32))
        lists.used.index_put_((slots,), used)
        self._new_slots.clear()


class PenalisedRows:
    """The rows with penalties of a fixed set of rows."""

    def __init__(
        self, counts: TokenCounts, slots: npt.NDArray[np.int64], on_device: Tensor, rows: Tensor, columns: Penalties
    ) -> None:
        """All arguments have Q rows: `slots` on the host and `on_device`, `rows` their numbers in the step."""
        self._counts = counts
        self._host_slots = slots
        self._slots = on_device
        self._rows = rows
        self._columns = columns

    def penalise(self, logits: Tensor, ops: Ops) -> None:
        """Apply the penalties to logits, in place, and make room for the next token."""
        width = self._counts.width(self._host_slots)
        lists = self._counts.lists(self._counts.width(self._host_slots, 1))
        ops.penalise(logits, self._rows, self._slots, lists, self._columns, width)

    def count(self, tokens: Tensor, ops: Ops) -> None:
        """Count each row's token of `tokens` [R] int64."""
        width = self._counts.width(self._host_slots, 1)
        ops.count_tokens(self._counts.lists(width), self._slots, self._rows, tokens, width)
        self._counts.counted(self._host_slots)


def lists_bytes(workload: JobWorkload, rows: int, vocab_size: int, *, prompts: bool) -> int:
    """Peak bytes of a job's count lists, with at most `rows` sequences at once or the samples of one prompt.

    `prompts`: whether repetition penalties include prompt ids.
    """
    table, samples, params = workload.table, workload.samples, workload.table.params
    penalised = np.array([p.has_penalties for p in params], np.bool_)[table.params_id] & (samples > 0)
    if not penalised.any():
        return 0
    listed = np.array([prompts and p.repetition_penalty != 1.0 for p in params], np.bool_)
    ids = np.where(listed[table.params_id], np.diff(table.offsets), 0) + table.max_new_tokens
    width = min(int(ids[penalised].max()), vocab_size)
    new_slots = min(int(samples[penalised].sum(dtype=np.int64)), max(rows, int(samples[penalised].max())))
    slots = max(_INITIAL_SLOTS, 1 << new_slots.bit_length())  # slot 0 is unused
    return 3 * slots * _power_of_2(width) * _ENTRY_BYTES // 2  # the old lists are kept while they are copied


def _power_of_2(width: int) -> int:
    return max(_INITIAL_WIDTH, 1 << (width - 1).bit_length())
