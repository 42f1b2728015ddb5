"""Which errors report exhausted memory."""

from __future__ import annotations

import pytest
import torch

from stopdown.out_of_memory import is_out_of_memory


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("unable to mmap 8 bytes from file <a>: Cannot allocate memory (12)"), True),
        (RuntimeError("MPS backend out of memory"), True),
        (
            RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("expected scalar type Half"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_exhausted_memory_is_told_from_other_errors(error: Exception, expected: bool) -> None:
    """On CPU and MPS it is a RuntimeError with its own words."""
    assert is_out_of_memory(error) is expected


def test_a_tensor_without_memory_is_another_error() -> None:
    """PyTorch's advice for it speaks of allocating memory as well; it was taken for exhausted memory."""
    weight = torch.ones(3, 2)
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="actually allocate memory") as caught:
        torch._weight_norm(weight, torch.ones(3, 1))
    assert not is_out_of_memory(caught.value)
