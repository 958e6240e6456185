"""Bytes of CPU tensors alive at once, kernels' own scratch included: what PyTorch's allocator tells its profiler."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

__all__ = ["LiveMeter"]


class LiveMeter:
    """A `Meter` for a CPU."""

    def __init__(self) -> None:
        self.taken = 0
        """Bytes allocated in all, by the last body."""

    def peak(self, body: Callable[[], None]) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as watched:
            body()
        events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
        live = most = self.taken = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            live += event.nbytes()
            most = max(most, live)
            self.taken += max(0, event.nbytes())
        return most
