"""`JobMedia`: the images and sounds of a running job: which requests have which, and how far they are needed."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from batchgen.engine.media.features import FeatureStore, KeptFeatures
from batchgen.engine.media.feed import DEVICE_FEATURE_BYTES, FEATURE_BYTES, PREPARED_BYTES, FeedSettings, MediaFeed
from batchgen.engine.media.reader import MediaSupport
from batchgen.engine.media.sources import GivenFeatures
from batchgen.engine.media.step import Layout, StepMedia
from batchgen.engine.observer import StepObserver
from batchgen.engine.workload import JobWorkload
from batchgen.errors import ErrorInfo
from batchgen.kernels.device import Device, cpu_quota
from batchgen.models.base import ModelSpec
from batchgen.models.media.encoder import MediaEncoder
from batchgen.plan.step_plan import StepPlan
from batchgen.plan.tree import blocks
from batchgen.request.fields.media_items import MediaItems, MediaPlan
from batchgen.request.table.request_table import RequestTable

Ints = npt.NDArray[np.int64]

_FLOAT_BYTES: Final = 4
_MOST_WORKERS: Final = 16
"""Most threads that decode items."""


@dataclass(frozen=True, slots=True)
class ItemUses:
    """Which requests have which items, each pair once, by request."""

    requests: Ints
    """[E] ascending."""
    numbers: Ints
    """[E] items."""

    @classmethod
    def of(cls, table: RequestTable, wanted: npt.NDArray[np.bool_]) -> ItemUses:
        """Those of the `wanted` [N] requests of a table."""
        assert table.media is not None
        first_id, offsets, parts = table.media.vocab_size, table.offsets.astype(np.int64), [np.zeros(0, np.int64)]
        for part in blocks(len(table)):
            begin, end = int(offsets[part.start]), int(offsets[min(part.stop, len(table))])
            tokens = table.tokens[begin:end]
            places = np.flatnonzero(tokens >= first_id)
            requests = np.searchsorted(offsets, places + begin, side="right") - 1
            inside = wanted[requests]
            pairs = requests[inside] << 32 | (tokens[places[inside]] - first_id)
            parts.append(np.unique(pairs))
        pairs = np.concatenate(parts)
        return cls(pairs >> 32, pairs & 0xFFFFFFFF)

    def of_request(self, request: int) -> list[int]:
        """The items of a request."""
        low, high = np.searchsorted(self.requests, (request, request + 1))
        numbers: list[int] = self.numbers[low:high].tolist()
        return numbers

    def with_item(self, number: int) -> Ints:
        """The requests that have an item."""
        requests: Ints = self.requests[self.numbers == number]
        return requests

    def counts(self, items: int) -> Ints:
        """[items] number of requests that have each."""
        return np.bincount(self.numbers, minlength=items)

    def in_order(self, order: npt.NDArray[np.int32]) -> list[int]:
        """The items in the order in which the requests `order` [N] first have them."""
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        numbers = self.numbers[np.argsort(rank[self.requests], kind="stable")]
        _, first = np.unique(numbers, return_index=True)
        ordered: list[int] = numbers[np.sort(first)].tolist()
        return ordered


class JobMedia(StepObserver):
    """The items of a job while it runs."""

    def __init__(
        self, workload: JobWorkload, uses: ItemUses, samples: npt.NDArray[np.int32], feed: MediaFeed, step: StepMedia
    ) -> None:
        """`uses`: the items of the requests that run; `samples`: [N] samples of each of these."""
        self._table = workload.table
        self._uses = uses
        self._samples = samples
        self._left: dict[int, int] = {}
        """Request that has begun to end -> samples that have not ended"""
        self._done = workload.done
        self._committed: deque[tuple[int, int]] = deque()
        """Prompts that were committed, not looked at yet"""
        self.feed = feed
        self.step = step

    def counts(self) -> dict[str, int]:
        """Counters for the report, by key."""
        counts = self.feed.counts
        return {
            "media_encoded": counts.encoded,
            "media_reused": self.feed.store.reused,
            "media_batches": counts.batches,
            "media_failed": counts.failed,
            "media_wait_ms": round(1e3 * counts.wait_seconds),
            "media_encode_ms": round(1e3 * counts.encode_seconds),
            "media_feature_peak_bytes": self.feed.store.peak_bytes,
            "media_device_peak_bytes": self.feed.store.device_peak_bytes,
            "media_spilled_bytes": self.feed.store.spilled_bytes,
        }

    def begin(self) -> None:
        """All unusable items are reported once more, for a further run over the same job."""
        self.feed.report_again()

    def before(self, plan: StepPlan) -> float:
        """Have the features that a step needs; returns the seconds that the encoder took."""
        self._forget_committed()
        items, numbers = self._items, dict[int, None]()
        for chunk in plan.prefills:
            ids = self._table.stored_ids(chunk.request)[chunk.start : chunk.end]
            numbers |= dict.fromkeys((np.unique(ids[ids >= items.vocab_size]) - items.vocab_size).tolist())
        before = self.feed.counts.encode_seconds
        self.feed.load(numbers)
        return self.feed.counts.encode_seconds - before

    @cached_property
    def _uncommitted(self) -> ItemUses:
        """The items of all requests whose results an earlier run has not committed."""
        return ItemUses.of(self._table, ~self._done)

    @cached_property
    def _needed(self) -> Ints:
        """[items] how many of these requests this run has not committed."""
        return self._uncommitted.counts(len(self._items))

    @property
    def _items(self) -> MediaItems:
        assert self._table.media is not None
        return self._table.media

    def names(self, computed_by: str) -> dict[int, bytes]:
        """Number of each item that may be needed -> SHA-256 of all that its features depend on.

        `computed_by`: what is the same for all items: the model, and the versions that compute.
        """
        needed = np.flatnonzero(self._needed).tolist()
        return {n: hashlib.sha256(f"{computed_by} {self._items[n].key}".encode()).digest() for n in needed}

    def keep_in(self, kept: KeptFeatures) -> None:
        """Keep features in files for as long as a row that is not committed needs them. Before the job's first step."""
        self.feed.store.kept = kept

    def committed(self, prompts: Iterable[tuple[int, int]]) -> None:
        """Record the row and prompt indexes of results that are committed; by any thread."""
        self._committed.extend(prompts)

    def _forget_committed(self) -> None:
        while self._committed:
            for request in self._table.requests_of(*self._committed.popleft()):
                for number in self._uncommitted.of_request(request):
                    self._needed[number] -= 1
                    if not self._needed[number]:
                        self.feed.store.forget(number)

    def failed(self) -> Iterator[tuple[int, ErrorInfo]]:
        """Requests that have an item that turned out to be unusable since the last call, with their errors."""
        self.feed.prefetch()
        for number, error in self.feed.failed():
            for request in self._uses.with_item(number).tolist():
                yield request, error

    def error_of(self, request: int) -> ErrorInfo | None:
        """Why a request cannot be computed: its first unusable item; None if there is none, as far as known."""
        errors = self.feed.errors
        if not errors:
            return None
        return next((errors[number] for number in self._uses.of_request(request) if number in errors), None)

    def ended(self, request: int, numbers: Sequence[int], samples: int = 1) -> None:
        """Samples of a request have ended; after the last its items are released."""
        if not self._samples[request]:
            return
        left = self._left.pop(request, int(self._samples[request])) - samples
        if left > 0:
            self._left[request] = left
        elif left == 0:
            for number in self._uses.of_request(request):
                self.feed.release(number)

    def close(self) -> None:
        """End the threads of the feed."""
        self.feed.close()


def device_feature_bytes(table: RequestTable, spec: ModelSpec, device: Device) -> int:
    """Most bytes of features that a job has in the memory of a device other than the host."""
    items = table.media
    if items is None or not device.asynchronous or spec.ranks.count > 1:  # other ranks are given those of the host
        return 0
    features = sum(items[number].features for number in range(len(items)))
    return min(features * spec.features_size * spec.dtype.itemsize, DEVICE_FEATURE_BYTES)


def open_media(
    workload: JobWorkload, support: MediaSupport, encoder: MediaEncoder, spec: ModelSpec, device: Device, together: bool
) -> JobMedia:
    """The images and sounds of a job that is about to run, whose tree has requests in the order in which they begin.

    `together`: whether items are encoded in batches, which may change their last bits.
    """
    table = workload.table
    assert table.media is not None
    samples = workload.samples.copy()
    for requests, count in workload.held.values():
        samples[requests] = count
    uses = ItemUses.of(table, samples > 0)
    folder = None if table.embeds is None else table.embeds.folder
    store = FeatureStore(FEATURE_BYTES, folder, device, device_feature_bytes(table, spec, device))
    workers = max(1, min(_MOST_WORKERS, (cpu_quota() or 2) // 2))
    settings = FeedSettings(spec.features_size, workers, device, together)
    needed = uses.in_order(workload.tree.order), uses.counts(len(table.media))
    feed = MediaFeed(table.media, *needed, support.prepare, encoder, store, settings)

    def find(ids: Ints, layouts: Sequence[Layout]) -> tuple[Ints, int]:
        positions, following = encoder.positions(torch.from_numpy(ids), layouts)
        return positions.numpy(), following

    step = StepMedia(table, feed, spec.rope_axes, find)
    return JobMedia(workload, uses, samples, feed, step)


def most_media_bytes(table: RequestTable, width: int) -> int:
    """Most bytes of prepared items and of features of `width` numbers that a job has in memory at once."""
    items = table.media
    if items is None:
        return 0
    prepared: int = sum(items[number].source.nbytes for number in range(len(items)))
    features = sum(items[number].features for number in range(len(items))) * width * _FLOAT_BYTES
    return min(prepared, PREPARED_BYTES) + min(features, FEATURE_BYTES)


def plan_media(table: RequestTable, audio_rate: int) -> MediaPlan | None:
    """Count the items of a table; None if no row has any. `audio_rate`: samples per second."""
    items = table.media
    if items is None:
        return None
    prompt_tokens, used = 0, np.zeros(len(items), np.bool_)  # a row that was refused may have numbered its items
    for part in blocks(len(table.tokens)):
        tokens = table.tokens[part]
        numbers = tokens[tokens >= items.vocab_size] - items.vocab_size
        prompt_tokens += len(numbers)
        used[numbers] = True
    distinct = [items[number] for number in np.flatnonzero(used).tolist()]
    images = [item for item in distinct if item.kind == "image"]
    decoded = [item for item in distinct if item.source.size]
    pixels = sum(math.prod(item.source.size) for item in decoded if item.kind == "image")
    samples = sum(math.prod(item.source.size) for item in decoded if item.kind == "audio")
    return MediaPlan(
        items=len(distinct),
        images=len(images),
        sounds=len(distinct) - len(images),
        megapixels=round(pixels / 1e6, 3),
        audio_seconds=round(samples / max(1, audio_rate), 1),
        encoded_tokens=sum(item.features for item in distinct if not isinstance(item.source, GivenFeatures)),
        prompt_tokens=prompt_tokens,
    )
