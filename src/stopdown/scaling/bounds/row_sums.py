"""Multiply a weight by columns, by magnitudes and by squares in one fp32 pass, with proved error bounds.

A weight is read in parts that stay in a processor's cache. Each is scaled by one power of two so that
its largest value lies between a half and one. A sum of n products in fp32 is off by at most `n u / (1 -
n u)` of the sum of their magnitudes (u is 2**-24); the results include that error. Products that are
too small for fp32 are covered by the allowance for weights that are subnormal in fp16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from stopdown.numerics import HALVES, multiply_matrices

WEIGHT_ROUNDING = 2.0**-11
"""Relative error of a weight that is rounded to fp16."""

WEIGHT_FLOOR = 2.0**-14
"""Allowance for a weight's subnormals in fp16, relative to its largest magnitude. It suffices if that
is stored at 2**-11 or more."""

LOOSE_WEIGHT_FLOOR = 2.0**-10
"""Allowance for the subnormals of a weight whose largest magnitude is stored lower, down to 2**-15. For
a row much smaller than the largest, it is far more than all other roundings."""

NARROW_WEIGHT_FLOOR = 2.0**-20
"""Allowance for the subnormals of a weight whose largest magnitude is stored at 2**-5 or more."""

ENTRIES = 1 << 18
"""Weights are widened to fp32 in parts of at most this many values."""

DEVICE_ENTRIES = 1 << 24
"""Values per part on an accelerator, which has no such cache, and where starting a kernel costs time."""


@dataclass(frozen=True)
class Products:
    """Products of a weight `W [out, in]` with columns `[in, k]`, each `[out, k]` float64.

    Attributes:
        plain: `W @ columns`, each off by at most `plain_error` times the norms of its row and column.
        magnitudes: upper bound of `|W| @ columns`.
        squares: upper bound of `W**2 @ columns`.
        plain_error: relative error of `plain`.
        slack: largest error of rounding a value of the weight that is subnormal in fp16.
    """

    plain: torch.Tensor
    magnitudes: torch.Tensor
    squares: torch.Tensor
    plain_error: float
    slack: float


def multiply_rows(
    weight: torch.Tensor,
    *,
    plain: torch.Tensor | None = None,
    magnitudes: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    floor: float = WEIGHT_FLOOR,
    largest: float | None = None,
) -> Products:
    """Multiply a weight `[out, in]`, its magnitudes and its squares by columns `[in, k]`, in one pass.

    The weight is read on its device; columns and products are float64 on the host. Products with omitted
    columns are empty.

    Args:
        plain: columns to multiply the weight by.
        magnitudes, squares: columns, without negative values, to multiply `|W|` and `W**2` by.
        floor: allowance for the weight's subnormals in fp16, relative to its largest magnitude.
        largest: the weight's largest magnitude, if known; for a part of a weight, that of the whole.

    Cost: one pass; values are widened in parts (`split_rows`).
    """
    width, wide = weight.shape[1], torch.promote_types(weight.dtype, torch.float32)
    none = torch.zeros(width, 0).double()
    columns = [none if x is None else x for x in (plain, magnitudes, squares)]
    tops = [x.abs().amax(0).clamp(min=1e-300) for x in columns]
    shares = [(x / top).T.to(wide).contiguous() for x, top in zip(columns, tops, strict=True)]
    narrow = [x.to(weight.device) for x in shares]
    largest = find_largest_magnitude(weight) if largest is None else largest
    scale = choose_scale(largest)
    found: tuple[list[torch.Tensor], ...] = ([], [], [])
    parts = split_rows(weight)
    held = torch.empty(parts[0].shape, dtype=wide, device=weight.device)
    for part in parts:
        rows = held[: len(part)].copy_(part).mul_(scale)
        found[0].append(multiply_matrices(rows, narrow[0]))
        found[1].append(multiply_matrices(rows.abs_(), narrow[1]))
        found[2].append(multiply_matrices(rows.square_(), narrow[2]))
    made = [torch.cat(x).cpu().double() * top for x, top in zip(found, tops, strict=True)]
    losses = (width + 8) * 2.0**-23
    return Products(
        made[0] / scale,
        made[1] / scale * (1 + losses),
        made[2] / scale**2 * (1 + losses),
        losses,
        floor * largest * (1 + losses),
    )


def split_rows(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split the rows of a weight `[out, in]` into parts that fit in a cache, to be processed one at a
    time.
    """
    entries = ENTRIES if weight.device.type == "cpu" else DEVICE_ENTRIES
    return weight.split(max(1, entries // max(weight.shape[1], 1)))


def find_largest_magnitude(weight: torch.Tensor) -> float:
    """Return the largest magnitude of a weight; 0 if it has no values."""
    return max(map(abs, map(float, torch.aminmax(weight)))) if weight.numel() else 0.0


def is_exact_in_fp16(weight: torch.Tensor) -> bool:
    """Return whether rounding a weight to fp16 loses no bits, if its exponents are in range: 11
    significant bits suffice.
    """
    if weight.dtype in HALVES:
        return True
    significands = torch.frexp(weight.float()).mantissa.mul_(2.0**11)
    return weight.dtype != torch.float64 and torch.equal(significands, significands.round())


def choose_scale(largest: float) -> float:
    """Return the power of two by which to multiply a tensor so that its largest magnitude is between a
    half and one.
    """
    return 2.0 ** -max(-126, min(126, math.frexp(largest)[1]))


@dataclass(frozen=True)
class RowSums:
    """Upper bounds of sums over each row of a weight, including its rounding to fp16.

    Attributes:
        absolute: upper bound of `sum |w| peak` of each row, `[out]` float64.
        euclidean: upper bound of `sqrt(sum w**2)` of each row, `[out]` float64.
        slack: largest error of rounding a value of the weight that is subnormal in fp16.
    """

    absolute: torch.Tensor
    euclidean: torch.Tensor
    slack: float


def sum_rows(
    weight: torch.Tensor,
    peak: torch.Tensor,
    floor: float = WEIGHT_FLOOR,
    largest: float | None = None,
) -> RowSums:
    """Bound two sums over each row of a weight `[out, in]`: its magnitudes times the inputs' peaks, and
    its 2-norm.

    Both hold for the weight rounded to fp16.

    Args:
        peak: largest magnitude of each input, `[in]` or `[1]` float64.
        floor: allowance for the weight's subnormals in fp16, relative to its largest magnitude.
        largest: the weight's largest magnitude, if known.

    Cost: one pass over the weight.
    """
    peaks = peak.expand(weight.shape[1])[:, None]
    squares = torch.ones_like(peaks)
    found = multiply_rows(weight, magnitudes=peaks, squares=squares, floor=floor, largest=largest)
    return read_sums(found, peaks)


def read_sums(found: Products, peaks: torch.Tensor) -> RowSums:
    """Return bounds of each weight row's sums, as `sum_rows` does, from products that were computed
    already.

    Args:
        found: products whose first columns are `peaks` and, for the squares, ones.
        peaks: largest magnitude of each input, `[in, 1]` float64.
    """
    width, spread, rounding = len(peaks), float(peaks.sum()), 1 + WEIGHT_ROUNDING
    return RowSums(
        found.magnitudes[:, 0] * rounding + found.slack * spread,
        found.squares[:, 0].sqrt() * rounding + found.slack * math.sqrt(width),
        found.slack,
    )
