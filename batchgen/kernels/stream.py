"""Weights that do not fit into a device: blocks that are copied to it in every pass, just before they compute.

A pass is one run of a step through all blocks. The blocks that stay on the device and those that are streamed are
planned from their bytes, before weights are read. A streamed block has one flat buffer on the host, and its tensors are
views of one of at most two buffers on the device, its slot. When a block is done, the next block of its slot is copied
there, while the blocks of the other slot compute. After the last block of a slot comes its first one, of the next pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor

from batchgen.kernels.device import Arrival, Device

_T = TypeVar("_T")

_LINE: Final = 256
"""Tensors in a buffer begin at multiples of so many bytes, as those that are allocated one by one do."""
_SLOTS: Final = 2
_MEASURED_BYTES: Final = 64 << 20
_REPEATS: Final = 5


def in_lines(nbytes: int) -> int:
    """Bytes of a tensor in a buffer."""
    return -(-nbytes // _LINE) * _LINE


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Which blocks of a model stay on the device, and which are copied to it in every pass."""

    blocks: tuple[int, ...]
    """Bytes of the weights of each block."""
    others: int
    """Bytes of all other weights, which stay on the device."""
    streamed: tuple[int, ...] = ()
    """Numbers of the blocks that are copied, in order; empty: all fit."""
    slots: int = 0
    """Buffers on the device for the streamed blocks."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: the largest streamed block."""
        return max((self.blocks[block] for block in self.streamed), default=0)

    @property
    def pass_bytes(self) -> int:
        """Bytes that are copied to the device in a pass."""
        return sum(self.blocks[block] for block in self.streamed)

    @property
    def device_bytes(self) -> int:
        """Bytes of the weights on the device, slots included."""
        return self.others + sum(self.blocks) - self.pass_bytes + self.slots * self.slot_bytes


def plan_stream(blocks: Sequence[int], others: int, room: int) -> StreamPlan:
    """The plan with the most resident blocks that fits `room` bytes, else the one that takes the fewest.

    Streamed blocks lie evenly between the others, so that each is copied while others compute. A slot has at least two
    blocks: a single one would stay there. So with two slots there are at least four, and with one at least two.
    """
    sizes, plan = tuple(blocks), StreamPlan(tuple(blocks), others)
    for count in (0, *range(2, len(sizes) + 1)):
        streamed = tuple(i * len(sizes) // count for i in range(count))
        plan = StreamPlan(sizes, others, streamed, 0 if not count else 1 if count < 2 * _SLOTS else _SLOTS)
        if plan.device_bytes <= room:
            return plan
    return StreamPlan(sizes, others, plan.streamed, min(1, plan.slots))


def copy_rate(device: Device) -> float:
    """Bytes a second at which blocks are copied from the host to the device: the best of some copies."""
    source, best = device.host_memory(_MEASURED_BYTES).fill_(1), math.inf
    target = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, device=device.torch_device)
    for _ in range(_REPEATS):
        began = time.perf_counter()
        device.copy_ahead(source, target).join()
        int(target[-1])  # waits for the device
        best = min(best, time.perf_counter() - began)
    return _MEASURED_BYTES / best


class LayerStream:
    """The streamed blocks of a loaded model: their tensors on the host, and the slots on the device."""

    def __init__(self, plan: StreamPlan, device: Device) -> None:
        """`plan` streams blocks."""
        self.plan = plan
        self.device = device
        """What copies."""
        self.passes = 0
        """Number of passes begun."""
        self.copied = 0
        """Bytes of the copies that blocks have computed with. What the slots hold for the next pass counts in that."""
        order, at, slots = plan.streamed, device.torch_device, plan.slots
        self._slots = [torch.empty(plan.slot_bytes, dtype=torch.uint8, device=at) for _ in range(slots)]
        self._slot_of = {block: i % slots for i, block in enumerate(order)}
        turns = [order[i::slots] for i in range(slots)]
        self._next = {block: after for turn in turns for block, after in zip(turn, turn[1:] + turn[:1], strict=True)}
        self._held: dict[int, int] = {}
        """Slot -> the block in it, or on its way there."""
        self._arrivals: dict[int, Arrival] = {}
        self._home: dict[int, Tensor] = {}
        self._filled: dict[int, int] = {}
        """Bytes of each buffer on the host that hold tensors."""

    def move(self, block: int, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Copy tensors of a streamed block to its buffer on the host.

        Args:
            block: its number.
            tensors: further ones of its tensors, in any layout, on the host or the device.

        Returns:
            Contiguous tensors on the device of the same dtypes and shapes, which hold the values between `enter` and
            `leave` of the block.
        """
        if block not in self._home:
            self._home[block] = self.device.host_memory(self.plan.blocks[block])
        home, at = self._home[block], self._filled.get(block, 0)
        slot, places = self._slots[self._slot_of[block]], []
        for each in tensors:
            here = slice(at, at + each.nbytes)
            home[here].view(each.dtype).view(each.shape).copy_(each)
            places.append(slot[here].view(each.dtype).view(each.shape))
            at += in_lines(each.nbytes)
        self._filled[block] = at
        return places

    def over(self, layers: Sequence[_T]) -> Iterator[_T]:
        """The layers of a pass, by their blocks' numbers; each is in place until the next one is asked for."""
        for block, layer in enumerate(layers):
            self.enter(block)
            try:
                yield layer
            finally:
                self.leave(block)

    def enter(self, block: int) -> None:
        """Have what is launched next read the weights of a block. Blocks that stay on the device need no call."""
        slot = self._slot_of.get(block)
        if slot is None:
            return
        if self._held.get(slot) != block:  # the first pass, or the last one ended early
            self._fetch(block, slot)
        self._arrivals[slot].join()
        self.passes += block == self.plan.streamed[0]
        self.copied += self.plan.blocks[block]

    def leave(self, block: int) -> None:
        """All that reads the weights of a block is launched: copy the next one to its slot."""
        slot = self._slot_of.get(block)
        if slot is not None:
            self._fetch(self._next[block], slot)

    def counts(self) -> dict[str, int]:
        """Counters for the report, by key."""
        planned = self.passes * self.plan.pass_bytes
        return {"offload_passes": self.passes, "offload_weight_bytes": self.copied, "offload_planned_bytes": planned}

    def _fetch(self, block: int, slot: int) -> None:
        assert self._filled[block] == self.plan.blocks[block], "the plan counts what is copied"
        self._held[slot], home = block, self._home[block]
        self._arrivals[slot] = self.device.copy_ahead(home, self._slots[slot][: len(home)])
