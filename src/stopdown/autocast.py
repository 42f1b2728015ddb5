"""Autocast around calls: read, and left where casts of its own would undo what a module needs.

Under `torch.autocast` weights are fp32 and products run in 16 bits. Exponents are found and put on
outside of it, where the same products have the same values; what has to stay in fp32 would
otherwise be cast down again. Code may also enter autocast by itself, around a call or inside of a module.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from stopdown.environment import KINDS
from stopdown.patches import Patches


def list_autocast() -> tuple[str, ...]:
    """Device types whose autocast is on."""
    return tuple(filter(torch.is_autocast_enabled, KINDS))


def read_autocast(module: torch.nn.Module) -> torch.dtype | None:
    """What autocast brings a module's products to; None where it is off, or its weights are no wider."""
    weight = next((x for x in module.parameters() if x.is_floating_point()), None)
    if weight is None or weight.device.type not in list_autocast():
        return None
    dtype: torch.dtype = torch.get_autocast_dtype(weight.device.type)
    return dtype if dtype.itemsize < weight.dtype.itemsize else None


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Every autocast that is on is off inside."""
    with contextlib.ExitStack() as stack:
        for kind in list_autocast():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def watched_autocast(*, is_off: bool = False) -> Iterator[list[torch.dtype]]:
    """The dtypes of autocast that code enters by itself meanwhile, in this thread.

    Args:
        is_off: it has no effect there: what is fp32 stays fp32.
    """
    entered: list[torch.dtype] = []
    thread, original = threading.get_ident(), torch.autocast.__enter__

    def enter(region: Any) -> Any:
        if threading.get_ident() != thread or not region._enabled:
            return original(region)
        entered.append(region.fast_dtype)
        region._enabled = not is_off
        try:
            return original(region)
        finally:
            region._enabled = True

    with Patches() as patches:
        patches.set_class_attribute(torch.autocast, "__enter__", enter)
        yield entered


def leave_autocast(module: torch.nn.Module, patches: Patches) -> None:
    """Have a module's calls run outside of autocast, until `patches` is undone."""
    running: list[contextlib.ExitStack] = []  # of the calls that run, the innermost last

    def enter(part: Any, args: Any) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(without_autocast())
        running.append(stack)

    def leave(part: Any, args: Any, output: Any) -> None:
        if running:
            running.pop().close()

    patches.defer(module.register_forward_pre_hook(enter).remove)
    patches.defer(module.register_forward_hook(leave, always_call=True).remove)
