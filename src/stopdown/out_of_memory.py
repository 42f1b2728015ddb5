"""Recognition of out-of-memory errors of the host and of devices."""

from __future__ import annotations


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports exhausted memory; on CPU and MPS it is a RuntimeError.

    cuBLAS fails to allocate its handle if the device is full.
    """
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(x in text for x in _WORDS)


_WORDS = (
    "out of memory",
    "t allocate memory",  # of PyTorch and of the system, which spell what is before it in two ways
    "not enough memory",  # on Windows
    "cublas_status_alloc_failed",
)
