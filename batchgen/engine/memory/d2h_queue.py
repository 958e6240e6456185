"""`D2HQueue`: copies large results to the host during the computation, in bounded memory and in order.

Results are read one step later, when the copies are complete. If a step sends more than the queue holds, the host
reads the oldest results first and so waits for the device: memory stays bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final

from torch import Tensor

from batchgen.kernels.device import Array, Device, Download

QUEUE_BYTES: Final = 256 << 20
"""Most bytes in flight; a single result may be larger."""

Consumer = Callable[[list[Array]], None]
"""Receives the sent arrays; it must copy what it keeps, because their memory is reused."""


class D2HQueue:
    """Device-to-host copies of results that the next step does not need, with at most `budget` bytes in flight."""

    def __init__(self, device: Device, budget: int = QUEUE_BYTES) -> None:
        self.device = device
        self._budget = budget
        self.chunk_bytes = budget // 8
        """Size of the pieces in which larger results should be sent, so that several fit into the queue."""
        self._unread: deque[tuple[Download, int, Consumer]] = deque()
        self._sent = self._read = 0
        self.bytes_in_flight = 0
        self.peak_bytes = 0
        """Most bytes in flight at once."""
        self.forced_syncs = 0
        """Number of results that were read early to make room."""

    def send(self, tensors: Seq[Tensor], consume: Consumer) -> int:
        """Start copying `tensors`, which must not be written to any more, to the host; returns the number for `read`.

        `consume` is called with the arrays of `Download.wait`, by that `read`, or earlier by a `send` that needs room.
        """
        size = sum(tensor.nbytes for tensor in tensors)
        while self._unread and self.bytes_in_flight + size > self._budget:
            self.forced_syncs += 1
            self._consume_oldest()
        self._unread.append((self.device.download(*tensors, lane="outputs"), size, consume))
        self._sent += 1
        self.bytes_in_flight += size
        self.peak_bytes = max(self.peak_bytes, self.bytes_in_flight)
        return self._sent

    def read(self, number: int) -> None:
        """Wait for the results up to `number` and pass each to its consumer, once."""
        assert number <= self._sent
        while self._read < number:
            self._consume_oldest()

    def _consume_oldest(self) -> None:
        download, size, consume = self._unread.popleft()
        self._read += 1
        self.bytes_in_flight -= size
        consume(download.wait())
