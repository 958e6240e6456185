"""Large results on their way to the host: copied beside the computation, in bounded memory, read in order.

What is sent is read a step late, when there is nothing left to wait for. A step that sends more than the ring holds
makes the host read the oldest first, and with that wait for the device: memory stays bounded, however large a prompt's
states are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final

from torch import Tensor

from batchgen.kernels.device import Array, Device, Download

__all__ = ["CHUNK_BYTES", "RING_BYTES", "OutputRing", "Take"]

RING_BYTES: Final = 256 << 20
"""Unread results that are in flight at once; a single one may be larger."""

CHUNK_BYTES: Final = 32 << 20
"""What is larger is better sent in pieces of about this, which several fit into the ring."""

Take = Callable[[list[Array]], None]
"""Takes the arrays that were sent, and copies what it keeps: their memory is used again."""


class OutputRing:
    """Downloads of a run that no next step waits for.

    Args:
        device: what the results are on.
        budget: bytes in flight.
    """

    def __init__(self, device: Device, budget: int = RING_BYTES) -> None:
        self.device = device
        self._budget = budget
        self._unread: deque[tuple[Download, int, Take]] = deque()
        self._sent = self._read = 0
        self.bytes_in_flight = 0
        self.peak_bytes = 0
        """Most bytes in flight at once."""
        self.early_reads = 0
        """Results that were read before their time, to make room."""

    def send(self, tensors: Seq[Tensor], take: Take) -> int:
        """Begin to copy `tensors` to the host.

        Args:
            tensors: nobody writes to them any more.
            take: called with their values as `Download.wait` gives them, by the `read` of the number returned, or
                earlier by a `send` that needs room.

        Returns:
            The number under which they can be read.
        """
        size = sum(tensor.nbytes for tensor in tensors)
        while self._unread and self.bytes_in_flight + size > self._budget:
            self.early_reads += 1
            self._take_oldest()
        self._unread.append((self.device.download(*tensors, lane="outputs"), size, take))
        self._sent += 1
        self.bytes_in_flight += size
        self.peak_bytes = max(self.peak_bytes, self.bytes_in_flight)
        return self._sent

    def read(self, number: int) -> None:
        """Wait for what was sent under `number`, and all that was sent before; each is handed over once."""
        assert number <= self._sent
        while self._read < number:
            self._take_oldest()

    def _take_oldest(self) -> None:
        download, size, take = self._unread.popleft()
        self._read += 1
        self.bytes_in_flight -= size
        take(download.wait())
