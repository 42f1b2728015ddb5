"""Memory of devices: measuring the peak of a block, freeing cached memory, and out-of-memory errors."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stopdown.devices.device_choice import Device
from stopdown.devices.environment import list_memory_limits
from stopdown.errors import StopdownError, take_one_line
from stopdown.out_of_memory import is_out_of_memory


def free_memory() -> None:
    """Collect garbage, as a discarded pipeline may be part of a cycle, and release cached device memory."""
    import torch

    gc.collect()
    if torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()


_USES = (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file"))
"""Files of control groups version 2 and 1 with the use of memory, and the field of `memory.stat` for the
page cache that can be dropped."""


HOST_SHARE = 0.7
"""Share of free host memory for idle weights; if they need more, they are read from files instead."""


def find_host_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the free host memory of this process in bytes: the machine's, or that of its container or
    control group if lower.
    """
    import psutil

    free = int(psutil.virtual_memory().available)
    for folder, most in list_memory_limits(root):
        for used, files in _USES:
            try:
                taken = int((folder / used).read_text())
                stat = (folder / "memory.stat").read_text().split()
            except OSError:  # another version
                continue
            dropped = int(stat[stat.index(files) + 1]) if files in stat else 0
            free = min(free, max(0, most - taken + dropped))
    return free


def find_device_bytes(device: Device) -> int:
    """Return the memory of an accelerator that this process may use, in bytes: what is free, and its own.

    On mps, which doesn't say what other programs take, it's all of the memory.
    """
    import torch

    module = torch.get_device_module(device.type)
    ask = getattr(module, "mem_get_info", None)
    if ask is None:
        return device.memory_bytes
    free, _ = ask(device.index)
    return min(device.memory_bytes, int(free) + int(module.memory_reserved(device.index)))


@contextmanager
def describing_out_of_memory() -> Iterator[None]:
    """Convert out-of-memory errors raised in the block to a `StopdownError` with a remedy."""
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
    """Peak of memory use during a block; filled in when the block has ended.

    Attributes:
        peak_bytes: peak memory. On accelerators, all that was allocated on the device; on the CPU, the
            growth of the process's resident memory (RSS) since the block began.
        method: description of what was measured.
    """

    peak_bytes: int = 0
    method: str = field(default="")


_SAMPLE_S = 0.02


@contextmanager
def peak_memory(device: Device) -> Iterator[PeakMemory]:
    """Measure the peak of memory use during the block.

    On the CPU and on mps, a thread reads the use every 20 ms, so that shorter peaks can be missed. On the
    CPU, memory that was freed before the block and is used again does not count. Elsewhere the allocator's
    own peak is exact; its counter is reset, so blocks must not be nested.
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
