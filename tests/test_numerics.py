"""Tests of the pure tensor functions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from stopdown.numerics import (
    bound_values,
    count_non_finite,
    headroom_bits,
    iterate_tensors,
    measure_amax,
    multiply_matrices,
    relative_l2,
    summarise_magnitudes,
)


def test_amax_leaves_out_what_is_not_finite() -> None:
    """The largest finite magnitude comes back, whatever NaN and Inf stand beside it."""
    assert measure_amax(torch.tensor([1.0, -3.0, math.inf, math.nan])) == 3.0
    assert measure_amax(torch.empty(0)) == 0.0


def test_summary_counts_what_is_not_finite() -> None:
    """Largest, typical and smallest positive magnitude come from the finite values alone."""
    amax, rms, least, bad = summarise_magnitudes(torch.tensor([0.0, -4.0, 3.0, math.nan]))
    assert (amax, least, bad) == (4.0, 3.0, 1)
    assert rms == pytest.approx(2.5)


@pytest.mark.parametrize("tensor", [torch.zeros(3), torch.empty(0)])
def test_summary_of_nothing_is_zero(tensor: torch.Tensor) -> None:
    """Zeros and empty tensors have no magnitude, and no smallest one either."""
    assert summarise_magnitudes(tensor) == (0.0, 0.0, 0.0, 0)


def test_nan_and_inf_are_counted_apart() -> None:
    """NaN and both infinities have counts of their own."""
    assert count_non_finite(torch.tensor([math.nan, math.inf, -math.inf, 1.0])) == (1, 2)


def test_headroom_is_negative_beyond_the_end() -> None:
    """One bit below the end is one bit of headroom; one bit beyond is minus one."""
    assert headroom_bits(32752.0, torch.float16) == pytest.approx(1.0)
    assert headroom_bits(131008.0, torch.float16) == pytest.approx(-1.0)
    assert headroom_bits(0.0, torch.float16) == math.inf
    with pytest.raises(ValueError, match="isn't a floating dtype"):
        headroom_bits(1.0, torch.int64)


def test_relative_error_is_that_of_norms() -> None:
    """The error of a vector is the norm of the difference over the norm of the reference."""
    assert relative_l2(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)


def test_tensors_are_found_in_nested_objects() -> None:
    """Mappings, sequences and objects with attributes are walked into; modules are not."""

    class Output:
        def __init__(self) -> None:
            self.sample, self.extra = torch.ones(1), [torch.ones(2), {"a": torch.ones(3)}]

    found = list(iterate_tensors((Output(), torch.nn.Linear(2, 2), None)))
    assert [x.numel() for x in found] == [1, 2, 3]


@pytest.mark.parametrize("terms", [64, 600])
def test_products_of_long_sums_are_as_near_as_their_terms_allow(terms: int) -> None:
    """Whichever library computes them, each sum of n products is within n rounding errors."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.randn(count, terms, generator=generator) for count in (40, 24))
    exact = rows.double() @ columns.double().T
    room = terms * 2.0**-24 * (rows.double().abs() @ columns.double().abs().T)
    assert bool(((multiply_matrices(rows, columns) - exact).abs() <= room).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_summaries_of_16_bits_are_those_of_their_values(dtype: torch.dtype) -> None:
    """Ends that are read from bits are those of the same values in fp32."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert summarise_magnitudes(values) == summarise_magnitudes(values.float())
    values[::7] = 0
    amax, rms, least, bad = summarise_magnitudes(values)
    sizes = values[values != 0].double().abs()
    assert (amax, least, bad) == (float(sizes.max()), float(sizes.min()), 0)
    assert rms == pytest.approx(float(values.double().square().mean().sqrt()))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_summaries_hold_where_squares_leave_fp32(size: float) -> None:
    """The typical size of tiny and huge values is that of float64."""
    values = size * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    rms = summarise_magnitudes(values)[1]
    assert rms == pytest.approx(float(values.double().square().mean().sqrt()))


@pytest.mark.parametrize("ambient", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("own", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_figures_do_not_depend_on_autocast(own: torch.dtype, ambient: torch.dtype) -> None:
    """Gives the figures of outside of autocast in it, whichever dtypes meet."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(8, 600, generator=generator).to(own)
    others = torch.randn(8, 600, generator=generator)

    def compute() -> list[Any]:
        bounds = bound_values([values, others, values.float()])
        pair = bound_values([values, values])
        assert bounds is not None
        assert pair is not None
        return [
            bounds.tolist(),
            pair.tolist(),
            count_non_finite(values),
            measure_amax(values),
            summarise_magnitudes(values),
            relative_l2(values, others),
            multiply_matrices(others, values.float()).tolist(),
        ]

    plain = compute()
    with torch.autocast("cpu", dtype=ambient):
        assert compute() == plain
