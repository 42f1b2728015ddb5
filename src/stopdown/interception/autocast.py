"""Autocast state: read it, disable it around modules that it would break, and watch code that enters it.

Under `torch.autocast`, weights are fp32 and products run in 16 bits. Exponents are found and applied
outside of it, because it would cast down what has to stay in fp32. Code may also enter autocast by
itself, around a call or inside of a module.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from stopdown.interception.patches import CHANGING, Patches, RunningCalls

_TYPES = ("cpu", "cuda", "mps", "xpu")
"""Device types for which PyTorch has autocast."""


def list_autocast() -> tuple[str, ...]:
    """List the device types for which autocast is enabled."""
    return tuple(filter(torch.is_autocast_enabled, _TYPES))


def read_autocast(module: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype in which autocast runs a module's products; None if it's off or not narrower."""
    weight = next((x for x in module.parameters() if x.is_floating_point()), None)
    if weight is None or weight.device.type not in list_autocast():
        return None
    dtype: torch.dtype = torch.get_autocast_dtype(weight.device.type)
    return dtype if dtype.itemsize < weight.dtype.itemsize else None


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Disable autocast for all device types inside the block."""
    with contextlib.ExitStack() as stack:
        for kind in list_autocast():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@dataclass(eq=False)
class _Watcher:
    thread: int
    is_off: bool
    entered: list[torch.dtype] = field(default_factory=list)


_PATCHES = Patches()
_WATCHERS: list[_Watcher] = []
"""The active watchers of all threads; `torch.autocast` is patched while there are any."""


@contextlib.contextmanager
def watched_autocast(*, is_off: bool = False) -> Iterator[list[torch.dtype]]:
    """Collect the dtypes of `torch.autocast` regions that this thread's code enters in the block, in
    the yielded list.

    Args:
        is_off: disable these regions, so that fp32 values stay fp32.
    """
    watcher = _Watcher(threading.get_ident(), is_off)
    with CHANGING:
        if not _WATCHERS:
            enter = _watch(torch.autocast.__enter__)
            _PATCHES.set_class_attribute(torch.autocast, "__enter__", enter)
        _WATCHERS.append(watcher)
    try:
        yield watcher.entered
    finally:
        with CHANGING:
            _WATCHERS.remove(watcher)
            if not _WATCHERS:
                _PATCHES.undo()


def _watch(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def enter(region: Any) -> Any:
        own = [x for x in tuple(_WATCHERS) if x.thread == threading.get_ident()]
        if not own or not region._enabled:
            return original(region)
        for watcher in own:
            watcher.entered.append(region.fast_dtype)
        region._enabled = not any(x.is_off for x in own)
        try:
            return original(region)
        finally:
            region._enabled = True

    return enter


def run_within(
    module: torch.nn.Module,
    context: Callable[[], contextlib.AbstractContextManager[Any]],
    patches: Patches,
) -> None:
    """Run a module's calls within a context, such as `without_autocast`, until `patches` is undone.

    Args:
        context: makes the context of one call.
    """
    running = RunningCalls()

    def enter(part: Any, args: Any) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(context())
        running.begin(stack.close)

    def leave(part: Any, args: Any, output: Any) -> None:
        running.end()

    patches.defer(module.register_forward_pre_hook(enter).remove)
    patches.defer(module.register_forward_hook(leave, always_call=True).remove)
