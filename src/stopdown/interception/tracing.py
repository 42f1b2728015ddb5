"""Traced code: detection of what a compiler or exporter runs on tensors without values, and code that
compiles itself, run without the compiler.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch._guards import TracingContext

CALLS_REPLACED = threading.RLock()
"""Held while `torch.nn.Module.__call__` is replaced or restored, by a tracer or for a listener."""


def is_traced() -> bool:
    """Return whether the code that this thread runs is being traced.

    `torch.compiler.is_compiling` isn't enough: it's true in every thread while any one of them exports.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch.compiler.is_compiling() and TracingContext.try_get() is not None


_turn = threading.Lock()
_uncompiled: list[Any] = []
"""PyTorch's present switch of the compiler, once for each thread that has it off."""


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Run code that compiles itself, such as flex attention, without the compiler inside the block.

    Under a dispatch mode the compiler would give up such code, and remember this: the calls after it would
    fail. PyTorch has one switch for the whole process: other threads run compiled code as it is written
    meanwhile. The last of several threads that leave switches the compiler on again.
    """
    with _turn:
        _uncompiled.append(
            _uncompiled[0] if _uncompiled else torch.compiler.set_stance("force_eager")
        )
    try:
        yield
    finally:
        with _turn:
            stance = _uncompiled.pop()
            if not _uncompiled:
                stance.__exit__(None, None, None)
