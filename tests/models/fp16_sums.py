"""Kernels that sum in fp16, emulated on any device.

The emulation adds groups of 16 products, each exact in fp32, to accumulators that are rounded to fp16 after
each group.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

from stopdown.dtype_rules.partial_sums import ProductReplacement, sum_groups


@contextlib.contextmanager
def summing_in_fp16(*operations: str) -> Iterator[None]:
    """Sum products of fp16 tensors in fp16 inside the block, on any device.

    Args:
        operations: which products, as `Sum.operation` names them; the others are summed in fp32 and
            rounded once. None for all.
    """
    multiply = functools.partial(_multiply, frozenset(operations))
    with ProductReplacement(multiply, _is_summed_in_fp16):
        yield


def _is_summed_in_fp16(factor: torch.Tensor) -> bool:
    return factor.dtype == torch.float16


def _multiply(
    operations: frozenset[str], left: torch.Tensor, right: torch.Tensor, what: str
) -> torch.Tensor:
    if operations and what not in operations:
        return torch.matmul(left.float(), right.float()).half()
    return sum_groups(left, right, lambda _, total: total.half().float()).half()
