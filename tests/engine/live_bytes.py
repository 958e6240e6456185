"""Peak bytes of CPU tensors, including kernel workspaces, from the memory events of PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

__all__ = ["LiveMeter"]


class LiveMeter:
    """A memory `Meter` for CPUs."""

    def __init__(self) -> None:
        self.taken = 0
        """Total bytes allocated by the last `body`."""

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
