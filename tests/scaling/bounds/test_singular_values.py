"""Bounds of the largest singular value of a weight."""

from __future__ import annotations

import pytest
import torch

from stopdown.scaling.bounds import singular_values
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


@pytest.mark.parametrize("shape", [(96, 24), (24, 96), (64, 64)])
def test_a_small_weight_has_its_largest_singular_value(shape: tuple[int, int]) -> None:
    """The bound for small matrices is above the singular value, by 0.1 % at most, at any size of values."""
    for size in (1e-30, 1.0, 1e30):
        weight = size * torch.randn(shape, generator=torch.Generator().manual_seed(1))
        exact = float(torch.linalg.matrix_norm(weight.double(), 2))
        assert exact <= singular_values.measure_sigma(weight) <= 1.001 * exact


@pytest.mark.parametrize("shape", [(96, 24), (24, 96), (64, 64)])
def test_a_gram_matrix_gives_the_largest_singular_value(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound for large matrices is above the singular value, by less than 1 %, at any size of values."""
    monkeypatch.setattr(singular_values, "SMALL", 0)
    for size in (1e-30, 1.0, 1e30):
        weight = size * torch.randn(shape, generator=torch.Generator().manual_seed(1))
        exact = float(torch.linalg.matrix_norm(weight.double(), 2))
        assert exact <= singular_values.measure_sigma(weight) <= 1.01 * exact


def test_a_matrix_that_is_taken_apart_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of columns are bounded together: above the singular value, below the root of their number."""
    monkeypatch.setattr(singular_values, "SMALL", 0)
    monkeypatch.setattr(singular_values, "MOST_COLUMNS", 12)
    weight = torch.randn((96, 24), generator=torch.Generator().manual_seed(1))
    exact = float(torch.linalg.matrix_norm(weight.double(), 2))
    assert exact < singular_values.measure_sigma(weight) < 2**0.5 * exact
    aligned = torch.ones((96, 24))  # nothing is lost where both parts point the same way
    assert 48.0 <= singular_values.measure_sigma(aligned) < 48.3
