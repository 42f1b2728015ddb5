"""Peaks of PyTorch's allocator, trackers with a limit, and tiny runs, for tests of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stopdown.memory.allocation_tracker import StorageTracker


def measure_allocator(call: Callable[[], Any]) -> int:
    """Peak bytes of PyTorch's allocator during a call, from its own events."""
    call()  # what is allocated once and kept is not this call's
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


class LimitedTracker(StorageTracker):
    """Refuses storages beyond a limit, as a device of that size does."""

    limit_bytes = 0

    def add(self, nbytes: int) -> None:
        """As the tracker does, up to the limit."""
        if self.live_bytes + nbytes > self.limit_bytes:
            raise torch.OutOfMemoryError(f"out of memory: tried to allocate {nbytes} bytes")
        super().add(nbytes)
