"""Recognition of out-of-memory errors of the host and of devices."""

from __future__ import annotations


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports exhausted memory; on CPU and MPS it is a RuntimeError."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "allocate memory" in text or "out of memory" in text.lower()
    )
