"""Errors of a host or device that has no memory left."""

from __future__ import annotations


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left; the CPU's and MPS's are RuntimeErrors."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "allocate memory" in text or "out of memory" in text.lower()
    )
