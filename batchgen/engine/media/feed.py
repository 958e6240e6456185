"""`MediaFeed`: features of a job's items, decoded by threads ahead of the device and encoded once.

Threads decode and prepare items in the order in which the plan needs them, as far ahead as their memory allows. When a
step needs items that are not encoded yet, the towers encode them, together with what is ready behind them. Only a step
that comes before its items are prepared waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition
from typing import Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from batchgen.engine.media.features import FeatureStore, Floats
from batchgen.engine.media.sources import Source
from batchgen.engine.memory.oom import is_out_of_memory
from batchgen.errors import ErrorInfo, ModelError, row_error
from batchgen.kernels.device import Device
from batchgen.models.media.encoder import MediaEncoder
from batchgen.models.media.processor import PreparedItem
from batchgen.request.fields.media_items import DistinctItem, MediaItems

PREPARED_BYTES: Final = 256 << 20
"""Most bytes of items that are prepared and not encoded, and of those that threads decode at once, as far as their
sizes tell; a single item may have more."""
FEATURE_BYTES: Final = 512 << 20
"""Most bytes of features in the memory of the host; others are in files."""
DEVICE_FEATURE_BYTES: Final = 512 << 20
"""Most bytes of features in the memory of a GPU; others are in that of the host."""
BATCH_FEATURES: Final = 4096
"""Most features of a batch of the encoder, unless it is a single item."""


@dataclass(slots=True)
class MediaCounts:
    """What a feed has done."""

    encoded: int = 0
    """Items that were encoded."""
    batches: int = 0
    """Calls of the encoder."""
    failed: int = 0
    """Items that could not be decoded or encoded."""
    wait_seconds: float = 0.0
    """Time that steps waited for items to be prepared."""
    encode_seconds: float = 0.0
    """Time of the encoder."""


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """How the items of a job are prepared and encoded."""

    width: int
    """W, numbers in a feature."""
    workers: int
    """Threads that prepare items."""
    device: Device
    """The device that computes."""
    together: bool
    """Whether items are encoded in batches, which may change their last bits."""


class _Room:
    """Bytes of the items that threads decode at once: one that needs more than all of them is decoded alone."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._changed = Condition()

    @contextmanager
    def of(self, nbytes: int) -> Iterator[None]:
        """Room for an item, as soon as there is any."""
        taken = min(nbytes, self._size)
        with self._changed:
            self._changed.wait_for(lambda: taken <= self._free)
            self._free -= taken
        try:
            yield
        finally:
            with self._changed:
                self._free += taken
                self._changed.notify_all()


class MediaFeed:
    """The features of a job's items, each from its first use to its last.

    Args:
        order: numbers of the items in the order in which the plan needs them.
        uses: [items] how often each is released before it is dropped.
        prepare: decodes and prepares an item, in any thread.
    """

    def __init__(
        self,
        items: MediaItems,
        order: Sequence[int],
        uses: npt.NDArray[np.int64],
        prepare: Callable[[DistinctItem], PreparedItem | Floats],
        encoder: MediaEncoder,
        store: FeatureStore,
        settings: FeedSettings,
    ) -> None:
        self._items = items
        self._order = deque(order)
        self._uses = uses.copy()
        self._prepare = prepare
        self._encoder = encoder
        self.store = store
        """Where features are kept."""
        self._settings = settings
        self._threads: ThreadPoolExecutor | None = None
        self._room = _Room(PREPARED_BYTES)
        self._ahead: dict[int, Future[PreparedItem | Floats]] = {}
        """Items that are being prepared or are ready, in the order of the plan."""
        self._ahead_bytes = 0
        self.errors: dict[int, ErrorInfo] = {}
        """Items that turned out to be unusable -> the error of their rows."""
        self._new_errors: list[int] = []
        self._broken: deque[int] = deque()
        """Items that threads could not prepare, not reported yet."""
        self.counts = MediaCounts()

    def prefetch(self) -> None:
        """Begin to prepare items as far ahead as their memory allows."""
        while self._order:
            number = self._order[0]
            known = number in self._ahead or number in self.store or number in self.errors
            if known or not self._uses[number]:
                self._order.popleft()
                continue
            if self._ahead and self._ahead_bytes + self._bytes(number) > PREPARED_BYTES:
                return
            self._order.popleft()
            self._submit(number)

    def load(self, numbers: Iterable[int]) -> None:
        """Have the features of items, waiting for those that are being prepared.

        Those that cannot be decoded have features of zeros; `failed` names them.
        """
        self.store.keep_arrived()
        for number in numbers:
            if number in self.errors or self.store.load(number):
                continue
            if number not in self._ahead:
                self._submit(number)
            self._encode(self._batch(number))
            self.prefetch()

    def rows(self, number: int, rows: npt.NDArray[np.int64]) -> Floats | Tensor:
        """[n, W] features of an item by their index, where `FeatureStore.get` has them."""
        if number in self.errors:
            return np.zeros((len(rows), self._settings.width), np.float32)
        features = self.store.get(number)
        if isinstance(features, np.ndarray):
            return features[rows]
        first = int(rows[0])
        in_order = int(rows[-1]) - first == len(rows) - 1  # as all indexes but those of an item that a prompt repeats
        return features[first : first + len(rows)] if in_order else features[self._settings.device.upload(rows)[0]]

    def fail(self, number: int, problem: str) -> None:
        """Make an item unusable: `problem` follows its name in the errors of its rows."""
        if number not in self.errors:
            self._fail(number, self._items[number].error(problem))

    def failed(self) -> list[tuple[int, ErrorInfo]]:
        """The items that have turned out to be unusable since the last call, with the error of their rows."""
        while self._broken:
            if (number := self._broken.popleft()) in self._ahead:
                self._take(number)
        failed, self._new_errors = self._new_errors, []
        return [(number, self.errors[number]) for number in failed]

    def report_again(self) -> None:
        """Have `failed` name all unusable items once more, for a further run over the same job."""
        self._new_errors = list(self.errors)

    def release(self, number: int) -> None:
        """Record one use less of an item; after the last its features are dropped."""
        self._uses[number] -= 1
        if not self._uses[number]:
            self.store.drop(number)
            if number in self._ahead:
                self._ahead_bytes -= self._bytes(number)
                self._ahead.pop(number).cancel()

    def close(self) -> None:
        """End the threads; what is not prepared yet is prepared when it is needed."""
        self.store.keep_arrived()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
        for number in [n for n, future in self._ahead.items() if future.cancelled()]:
            self._ahead_bytes -= self._bytes(number)
            del self._ahead[number]

    def _bytes(self, number: int) -> int:
        """Bytes of an item in memory, about."""
        source: Source = self._items[number].source
        return source.nbytes

    def _submit(self, number: int) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._settings.workers, thread_name_prefix="media")
        self._ahead[number] = self._threads.submit(self._prepared, number)
        self._ahead_bytes += self._bytes(number)

    def _prepared(self, number: int) -> PreparedItem | Floats:
        try:
            with self._room.of(self._bytes(number)):
                return self._prepare(self._items[number])
        except BaseException:
            self._broken.append(number)
            raise

    def _take(self, number: int) -> PreparedItem | Floats | None:
        """A prepared item, once it is ready; None if it failed."""
        future = self._ahead[number]
        if not future.done():
            began = time.perf_counter()
            future.exception()  # waits
            self.counts.wait_seconds += time.perf_counter() - began
        del self._ahead[number]
        self._ahead_bytes -= self._bytes(number)
        try:
            return future.result()
        except Exception as error:
            self._fail(number, error)
            return None

    def _fail(self, number: int, error: Exception) -> None:
        item = self._items[number]
        self.errors[number] = row_error(error, f"decoding `{item.place}`")
        self._new_errors.append(number)
        self.counts.failed += 1

    def _batch(self, first: int) -> list[tuple[int, PreparedItem]]:
        """An item, once it is ready, and those of its shape that are ready behind it."""
        prepared = self._take(first)
        if prepared is None:
            return []
        if isinstance(prepared, np.ndarray):
            self.store.put(first, prepared)  # features that a row gives
            return []
        batch, features = [(first, prepared)], self._items[first].features
        for number in list(self._ahead) if self._settings.together else ():
            future, more = self._ahead[number], self._items[number].features
            if features + more > BATCH_FEATURES or not future.done():
                break
            ready = None if future.exception() is not None else future.result()
            if isinstance(ready, PreparedItem) and ready.shape == prepared.shape:
                features += more
                batch.append((number, ready))
                self._take(number)
        return batch

    def _encode(self, batch: Sequence[tuple[int, PreparedItem]]) -> None:
        """Encode prepared items; after an error in halves, and what cannot be encoded alone fails."""
        if not batch:
            return
        began = time.perf_counter()
        try:
            # Copied, because a part of a batch's features would hold the memory of all.
            encoded = [each.clone() for each in self._encoder.encode([prepared for _, prepared in batch])]
        except (RuntimeError, MemoryError, ModelError) as error:
            too_large = is_out_of_memory(error)
            if not too_large and not isinstance(error, ModelError):
                raise
            if len(batch) == 1:
                item = self._items[batch[0][0]]
                self._fail(batch[0][0], MemoryError() if too_large else item.error(f"cannot be encoded: {error}"))
                return
            half = len(batch) // 2
            self._encode(batch[:half])
            self._encode(batch[half:])
            return
        for (number, _), features in zip(batch, encoded, strict=True):
            self.store.put_computed(number, features)
        self.counts.encode_seconds += time.perf_counter() - began
        self.counts.encoded += len(batch)
        self.counts.batches += 1
