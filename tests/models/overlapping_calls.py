"""Two threads in one module at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


def overlap_calls(
    module: torch.nn.Module,
    first: Callable[[], object],
    second: Callable[[], object],
    between: Callable[[], object] = lambda: None,
) -> None:
    """Make two calls of a module: another thread's begins before this thread's, and ends inside of it.

    Hooks that the module has already run before the calls meet.

    Args:
        first: the other thread's call.
        second: this thread's.
        between: runs once the first has ended, still inside of the second.
    """
    has_begun, is_inside = threading.Event(), threading.Event()

    def meet(*_: Any) -> None:
        if threading.current_thread() is other:
            has_begun.set()
            assert is_inside.wait(9)
        else:
            is_inside.set()
            other.join()
            between()

    hook = module.register_forward_pre_hook(meet)
    other = threading.Thread(target=first)
    other.start()
    assert has_begun.wait(9)
    second()
    hook.remove()
