"""Keys and values that do not fit into a device: layers whose pages lie on the host, and come before they are read.

A streamed layer has its pages on the host. On the device it has those of one of at most two slots, under the same
numbers, so that page tables and kernels need not know. Before it attends, the pages of the step that hold earlier
positions are copied to its slot, while layers before it compute; after that, pages with new positions are copied back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from batchgen.kernels.device import Arrival, Device
from batchgen.kernels.grouped import GroupedAttention, GroupedPool, places_of
from batchgen.kernels.stream import StreamPlan
from batchgen.kernels.types import AttentionArgs, Ints, KVPool, LayerKV, PagedAttention


@dataclass(frozen=True, slots=True)
class StreamedPool(GroupedPool):
    """A model's cache, of which some layers of the first group are streamed: these share the slots."""

    device: Device = field(kw_only=True)
    """What copies."""
    turns: dict[int, int] = field(kw_only=True)
    """Streamed layer of the model -> its place among them, in order."""
    slots: int = field(kw_only=True)
    """Number of slots."""
    kept: KVPool = field(kw_only=True)
    """The layers of the group that stay on the device."""
    home: KVPool = field(kw_only=True)
    """The streamed layers, in the memory of the host."""
    copied_back: list[Arrival] = field(default_factory=list)
    """The last copies to the host."""
    copied: Counter[str] = field(default_factory=Counter)
    """Counters for the report, by key."""

    @staticmethod
    def of(
        layers: Sequence[LayerKV],
        groups: Sequence[Sequence[int]],
        pages: Sequence[int],
        page_size: int,
        dtype: torch.dtype,
        device: Device,
        plan: StreamPlan,
    ) -> StreamedPool:
        """Zeroed pools; as `GroupedPool.allocate`. The layers of the first group, `plan`'s blocks, have one size."""
        first, sizes = [layers[i] for i in groups[0]], (page_size, dtype, device.torch_device)
        kept = KVPool.allocate(first[len(plan.streamed) :], pages[0], *sizes)
        slots = KVPool.allocate(first[: plan.slots], pages[0], *sizes)

        def home(like: Tensor) -> Tensor:
            return device.in_host(device.host_memory(like.nbytes).zero_()).view(like.dtype).view(like.shape)

        is_latent, count, others = first[0].latent, len(plan.streamed), iter(range(len(first)))
        all_keys = [home(slots.keys[0]) for _ in range(count)]
        all_values = [x[..., : first[0].value_dim] if is_latent else home(slots.values[0]) for x in all_keys]
        turns = {layer: turn for turn, layer in enumerate(plan.streamed)}
        places = [(slots, turns[i] % plan.slots) if i in turns else (kept, next(others)) for i in range(len(first))]
        keys, values = [pool.keys[i] for pool, i in places], [pool.values[i] for pool, i in places]
        rest = GroupedPool.allocate(layers, groups[1:], pages[1:], *sizes).parts
        return StreamedPool(
            [KVPool(keys, values, page_size, frozenset(range(len(first) * is_latent))), *rest],
            places_of(groups),
            device=device,
            turns={groups[0][layer]: turn for layer, turn in turns.items()},
            slots=plan.slots,
            kept=kept,
            home=KVPool(all_keys, all_values, page_size, frozenset(range(count * is_latent))),
        )

    def wholes(self) -> list[KVPool]:
        """Pools that hold each page of the first group once, for work on pages that is launched next."""
        for arrival in self.copied_back:
            arrival.join()
        return [pool for pool in (self.kept, self.home) if pool.keys]

    def copy(self, layer: int, pages: Tensor, *, back: bool = False) -> list[Arrival]:
        """Copy `pages` [n] int64 of a streamed layer of the model to its slot, or back to the host."""
        (group, index), turn, home = self.places[layer], self.turns[layer], self.home
        slot, arrivals = self.parts[group], []
        for there, here in ((home.keys, slot.keys), (home.values, slot.values))[: 1 if index in slot.latent else 2]:
            pair = (here[index], there[turn]) if back else (there[turn], here[index])
            arrivals.append(self.device.copy_ahead(*pair, pages))  # none, too: what is joined follows the last copies
            self.copied[f"offload_kv_bytes_{'out' if back else 'in'}"] += len(pages) * pair[0][0].nbytes
        return arrivals

    def counts(self) -> dict[str, int]:
        """Counters for the report, by key."""
        keys = [f"offload_kv_{kind}_{way}" for kind in ("bytes", "planned_bytes") for way in ("in", "out")]
        return {key: self.copied[key] for key in keys}


class StreamedAttention(GroupedAttention):
    """One step's attention (the `PagedAttention` protocol) in which the pages of some layers come from the host."""

    def __init__(self, parts: Sequence[PagedAttention], pool: StreamedPool, pages: tuple[Ints, Ints]) -> None:
        """`parts`: the attention of each group; `pages`: those that the step reads and writes, as its plan says."""
        super().__init__(parts, pool.places)
        self._cache, self._order = pool, list(pool.turns)
        self._in, self._out = pool.device.upload(*pages)
        page = sum(each[0].nbytes for each in pool.home.caches)
        pool.copied["offload_kv_planned_bytes_in"] += len(self._in) * page
        pool.copied["offload_kv_planned_bytes_out"] += len(self._out) * page
        self._coming = pool.copy(self._order[0], self._in)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        """See `Attention.attend`."""
        self._enter(layer)
        out = super().attend(layer, query, key, value, args)
        self._leave(layer)
        return out

    def cache(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `PagedAttention.cache`."""
        self._enter(layer)
        return super().cache(layer)

    def attend_stored(self, layer: int, query: Tensor, args: AttentionArgs) -> Tensor:
        """See `PagedAttention.attend_stored`."""
        out = super().attend_stored(layer, query, args)
        self._leave(layer)
        return out

    def _enter(self, layer: int) -> None:
        pool, turn = self._cache, self._cache.turns.get(layer)
        if turn is not None:
            for arrival in self._coming or pool.copy(layer, self._in):
                arrival.join()
            ahead = self._order[turn + 1 : turn + pool.slots]  # one layer, or with one slot none
            self._coming = [arrival for each in ahead for arrival in pool.copy(each, self._in)]

    def _leave(self, layer: int) -> None:
        if layer in self._cache.turns:
            self._cache.copied_back[:] = self._cache.copy(layer, self._out, back=True)
