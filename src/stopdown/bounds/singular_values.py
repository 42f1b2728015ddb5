"""The largest singular value of a weight: how much longer a linear can make a row.

Small matrices are decomposed. Of large ones the Gram matrix is made in parts, and the error of making
it is added before its root is taken.
"""

from __future__ import annotations

import math

import torch

DECOMPOSED = 1 << 27
"""Matrices with `out * in * min(out, in)` up to this are decomposed."""

MOST_WORK = 1 << 38
"""Beyond this a Gram matrix takes longer than its bound is worth (12288 x 3072: 2**36.8, 3 s)."""

GRAM_ROWS = 256
"""Products that are summed in fp32 at a time."""

MOST_COLUMNS = 1536
"""Larger matrices are taken apart: two halves of 3072 columns take half the time, for 0.3 bits."""

MARGIN = 1 + 1e-9
"""Of a decomposition in float64."""


def count_work(weight: torch.Tensor) -> int:
    """Multiplications in the Gram matrix of a weight `[out, in]`."""
    return math.prod(weight.shape) * min(weight.shape)


def measure_sigma(weight: torch.Tensor) -> float:
    """The largest singular value of `[out, in]`, no smaller than it is.

    Of columns `A` and `B` side by side the square is at most the sum of the squares of each.
    Cost: a decomposition in float64; or at most `count_work` in fp32, and decompositions of squares of
    `MOST_COLUMNS`.
    """
    if count_work(weight) <= DECOMPOSED:
        return float(torch.linalg.matrix_norm(weight.double(), 2)) * MARGIN
    tall = weight if weight.shape[0] >= weight.shape[1] else weight.T
    count = math.ceil(tall.shape[1] / MOST_COLUMNS)
    return math.sqrt(sum(_bound_gram(part) for part in tall.chunk(count, dim=1))) * MARGIN


def sum_squares(weight: torch.Tensor) -> float:
    """The squared Frobenius norm, in float64 and in parts."""
    return sum(float(part.double().square().sum()) for part in weight.split(GRAM_ROWS))


def _bound_gram(weight: torch.Tensor) -> float:
    """The largest eigenvalue of `W^T W`, with the errors of its sums.

    A sum of n products in fp32 is off by at most `n u / (1 - n u)` of the sum of magnitudes (u is
    2**-24), so the error of all parts has no larger 2-norm than that times the squares of `W`; and what is
    below the least normal number is lost.
    """
    exponent = math.frexp(float(weight.abs().max()))[1]
    gram = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64)
    for part in weight.split(GRAM_ROWS):
        scaled = torch.ldexp(part.float(), torch.tensor(-exponent))  # its squares stay in range
        gram += scaled.T @ scaled
    scaled_squares = math.ldexp(sum_squares(weight), -2 * exponent)
    error = 2 * GRAM_ROWS * 2.0**-24 * scaled_squares + weight.numel() * 2.0**-126
    top = float(torch.linalg.eigvalsh(gram)[-1])
    return math.ldexp(max(top, 0.0) + error, 2 * exponent)
