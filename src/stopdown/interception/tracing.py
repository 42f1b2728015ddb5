"""Detection of traced code: run by a compiler or exporter, on tensors without values."""

from __future__ import annotations

import threading

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
