"""Memory of a device while something runs: its peak, giving it back, and errors when it is full."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stopdown.devices.device_choice import Device
from stopdown.errors import StopdownError, take_one_line
from stopdown.out_of_memory import is_out_of_memory


def free_memory() -> None:
    """Collect garbage and return cached device memory; a discarded pipeline may hold itself in a cycle."""
    import torch

    gc.collect()
    if torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()


_CGROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
"""Files below a root of control groups, of version 2 and of version 1: limit, use, and in
`memory.stat` what of the use is files that can be dropped."""


HOST_SHARE = 0.7
"""Of the host memory that is free: weights that take more wait in the checkpoint's files."""


def find_host_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the free host memory of this process in bytes: the machine's, or its container's if lower."""
    import psutil

    free = int(psutil.virtual_memory().available)
    for limit, used, files in _CGROUPS:
        try:
            most, taken = (int((root / name).read_text()) for name in (limit, used))
            stat = (root / limit).with_name("memory.stat").read_text().split()
        except (OSError, ValueError):  # another version, or no limit ("max")
            continue
        free = min(free, max(0, most - taken + int(stat[stat.index(files) + 1])))
    return free


@contextmanager
def describing_out_of_memory() -> Iterator[None]:
    """Convert a device's out-of-memory errors within the block to a `StopdownError` with a remedy."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise StopdownError(
            f"The device ran out of memory: {take_one_line(error, 200)}",
            expected="A run needs memory for the weights and for the largest layer's activations.",
            remedy='Leave memory="none" out if you gave it, or use a smaller `height` and `width`, fewer '
            "`frames`, or a 16-bit `precision`.",
        ) from error


@dataclass
class PeakMemory:
    """The peak of memory use during a block; complete when the block has ended.

    Attributes:
        peak_bytes: the largest use. On accelerators all that was allocated on the device; on the
            CPU the growth of the process's resident memory (RSS) since the block began.
        method: what was measured, one sentence.
    """

    peak_bytes: int = 0
    method: str = field(default="")


_SAMPLE_S = 0.02


@contextmanager
def peak_memory(device: Device) -> Iterator[PeakMemory]:
    """Measure the peak of memory use during the block.

    On the CPU and on mps a thread reads the use every 20 ms, so a peak shorter than that can be
    missed, and memory that was freed before the block and is used again does not count as growth.
    Elsewhere the allocator's own peak is exact; its counter is reset, so blocks must not be nested.
    """
    if device.type == "mps":
        measure = _sample_peak(
            _read_mps_bytes, 0, "memory of the Metal driver, sampled every 20 ms"
        )
    elif device.type == "cpu":
        text = "increase in RSS, sampled every 20 ms"
        measure = _sample_peak(_read_rss_bytes, _read_rss_bytes(), text)
    else:
        measure = _ask_allocator(device)
    with measure as peak:
        yield peak


@contextmanager
def _ask_allocator(device: Device) -> Iterator[PeakMemory]:
    import torch

    module = torch.get_device_module(device.type)
    module.reset_peak_memory_stats(device.index)
    name = "CUDA" if device.type == "cuda" else device.type
    peak = PeakMemory(method=f"peak of PyTorch's {name} allocator")
    try:
        yield peak
    finally:
        peak.peak_bytes = int(module.max_memory_allocated(device.index))


@contextmanager
def _sample_peak(read: Callable[[], int], base: int, method: str) -> Iterator[PeakMemory]:
    peak, ended = PeakMemory(method=method), threading.Event()

    def sample() -> None:
        peak.peak_bytes = max(peak.peak_bytes, read() - base)

    def watch() -> None:
        while not ended.wait(_SAMPLE_S):
            sample()

    thread = threading.Thread(target=watch, name="stopdown-memory", daemon=True)
    sample()
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()
        sample()


def _read_rss_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _read_mps_bytes() -> int:
    import torch

    return int(torch.mps.driver_allocated_memory())
