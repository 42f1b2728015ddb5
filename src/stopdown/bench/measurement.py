"""One run measured: seconds, peak memory, what the host waits for, and how far it is from fp32.

A run in which blocks and latents are read comes first; it warms up and gives the error. Then one is
counted, and some are timed with nothing on them.

**Catches** memory of PyTorch's allocators; on the CPU the growth of resident memory, weights added.
**Does not catch** what a driver and libraries take for themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stopdown.bench.records import KernelTime
from stopdown.component_calls.components import find_components
from stopdown.devices.device_memory import free_memory, peak_memory
from stopdown.devices.environment import Device
from stopdown.doctor import attend_with, list_kernels
from stopdown.memory.speed import time_runs
from stopdown.number_formats import FORMATS, PRECISIONS
from stopdown.numerics import iterate_tensors

REPEATS = 2
"""Timed runs of which the fastest counts."""

_CALLS = 5
"""Calls of an attention kernel of which the fastest counts."""


class Counter(TorchDispatchMode):
    """Counts operations, and values that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default or _leaves_device(args, output):
            self.reads += 1
        else:
            self.operations += 1
        return output

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counter]:
        """Also `tolist`, which asks no operation for the values of a tensor on the CPU."""
        plain = torch.Tensor.tolist

        def tolist(tensor: torch.Tensor) -> Any:
            self.reads += bool(tensor.dim() and tensor.device.type == "cpu")
            return plain(tensor)

        torch.Tensor.tolist = tolist  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield self
        finally:
            del torch.Tensor.tolist


def _leaves_device(given: Any, made: Any) -> bool:
    """Whether an operation copied from an accelerator to the host."""
    if not isinstance(made, torch.Tensor) or made.device.type != "cpu":
        return False
    return any(x.device.type not in ("cpu", "meta") for x in iterate_tensors(given))


def measure_peak(device: Device, pipe: Any, run: Callable[[], object]) -> tuple[int, str]:
    """Most bytes that a run takes, weights included, and how that was read."""
    free_memory()
    with peak_memory(device) as peak:
        run()
    if device.type != "cpu":
        return peak.peak_bytes, peak.method
    tensors = [x for m in find_components(pipe).values() for x in (*m.parameters(), *m.buffers())]
    owned = {id(s): s.nbytes() for x in tensors if (s := x.untyped_storage())}
    return peak.peak_bytes + sum(owned.values()), f"weights, and {peak.method}"


def time_attention(device: Device) -> tuple[KernelTime, ...]:
    """Each kernel of attention in each format, `[1, 8, 1024, 64]`."""
    return tuple(
        KernelTime(kernel, name, _time_kernel(device, kernel, name))
        for kernel in list_kernels()
        for name in PRECISIONS
    )


def _time_kernel(device: Device, kernel: str, name: str) -> float | None:
    try:
        given = torch.ones(
            1, 8, 1024, 64, dtype=FORMATS[name].torch_dtype, device=device.torch_name
        )
        with torch.inference_mode():
            attend_with(kernel, given)
            return time_runs(device, lambda: attend_with(kernel, given), _CALLS)
    except (RuntimeError, TypeError, NotImplementedError):
        return None
