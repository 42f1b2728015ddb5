"""Bounds of the largest singular value of a weight."""

from __future__ import annotations

import pytest
import torch

from stopdown.scaling.bounds.singular_values import (
    bound_parts,
    bound_top,
    estimate_sigma,
    measure_sigma,
)


@pytest.mark.parametrize("shape", [(8, 8), (300, 200), (200, 700)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_the_bound_is_above_and_close(shape: tuple[int, int], scale: float) -> None:
    """It is never below the value that float64 gives, and within a hundredth of it."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale
    exact = float(torch.linalg.matrix_norm(weight.double(), 2))
    assert exact <= measure_sigma(weight) <= 1.01 * exact
    assert 0.8 * exact <= estimate_sigma(weight) <= 1.0001 * exact


def test_parts_bound_the_squares_of_columns() -> None:
    """Side by side they bound the whole."""
    weight = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    exact = float(torch.linalg.matrix_norm(weight.double(), 2))
    assert sum(bound_parts(weight)) >= exact**2


def test_a_matrix_of_zeros_has_no_eigenvalue_above_zero() -> None:
    """Where no decomposition succeeds, the eigenvalues themselves are taken."""
    assert bound_top(torch.zeros(4, 4)) == 0.0
