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
        (RuntimeError("MPS backend out of memory"), True),
        (RuntimeError("expected scalar type Half"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_exhausted_memory_is_told_from_other_errors(error: Exception, expected: bool) -> None:
    """On CPU and MPS it is a RuntimeError with its own words."""
    assert is_out_of_memory(error) is expected
