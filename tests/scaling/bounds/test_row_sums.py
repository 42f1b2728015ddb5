"""Products with a weight's rows in fp32: never less than what they bound, and hardly more."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stopdown.scaling.bounds import product_rules, singular_values
from stopdown.scaling.bounds.affine_rows import _add, _multiply
from stopdown.scaling.bounds.intervals import Interval, bound_interval
from stopdown.scaling.bounds.row_sums import (
    LOOSE_WEIGHT_FLOOR,
    WEIGHT_FLOOR,
    find_largest_magnitude,
    multiply_rows,
    sum_rows,
)
from stopdown.scaling.bounds.singular_values import bound_top
from stopdown.scaling.bounds.values import AffineRow

SIZES = (1e-30, 1e-3, 1.0, 1e30)


def draw_weight(seed: int, dtype: torch.dtype, size: float) -> torch.Tensor:
    """`[24, 300]` with values over ten orders of magnitude, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    spread = 10 ** (-5 * torch.rand(24, 300, generator=generator))
    weight = size * spread * torch.randn(24, 300, generator=generator)
    return (weight * (torch.rand(24, 300, generator=generator) > 0.1)).to(dtype)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    size=st.sampled_from(SIZES),
    other=st.sampled_from([1e-100, 1.0, 1e100]),
)
def test_products_have_room_for_their_sums(
    seed: int, dtype: torch.dtype, size: float, other: float
) -> None:
    """Whatever the sizes, the exact sums in float64 lie within what is stated."""
    weight = draw_weight(seed, dtype, size)
    columns = other * torch.randn(300, 3, generator=torch.Generator().manual_seed(seed)).double()
    found = multiply_rows(weight, plain=columns, magnitudes=columns.abs(), squares=columns.abs())
    exact = weight.double()
    magnitudes, squares = exact.abs() @ columns.abs(), exact.square() @ columns.abs()
    assert bool((found.magnitudes >= magnitudes).all())
    assert bool((found.squares >= squares).all())
    assert bool((found.magnitudes <= magnitudes * 1.001).all())
    lengths = exact.square().sum(1).sqrt()[:, None] * columns.square().sum(0).sqrt()
    assert bool(((found.plain - exact @ columns).abs() <= found.plain_error * lengths).all())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("floor", "least"), [(WEIGHT_FLOOR, -11), (LOOSE_WEIGHT_FLOOR, -15)])
def test_sums_hold_for_weights_as_fp16_stores_them(size: float, floor: float, least: int) -> None:
    """A weight whose largest value is stored at 2^-11 (2^-15) or more: no rounded row exceeds the sums."""
    weight = draw_weight(0, torch.float32, size)
    peak = torch.rand(300, generator=torch.Generator().manual_seed(1)).double()
    found = sum_rows(weight, peak, floor)
    for stored in (2.0**least, 1.0, 2.0**15):
        scale = 2.0 ** round(math.log2(stored / float(weight.abs().max())) + 0.5)
        rounded = (weight.double() * scale).half().double() / scale
        assert bool((rounded.abs() @ peak <= found.absolute).all())
        assert bool((rounded.square().sum(1).sqrt() <= found.euclidean).all())


def test_a_part_of_a_weight_has_the_room_of_the_whole() -> None:
    """A group of a convolution that is far smaller than the others is rounded by more than its size."""
    weight = draw_weight(0, torch.float32, 1.0)
    part = weight[:2] * 2.0**-13 * float(weight.abs().max()) / float(weight[:2].abs().max())
    scale, peak = 2.0**-11 / float(weight.abs().max()), torch.ones(1).double()
    stored = (part.double() * scale).half().double() / scale
    own = sum_rows(part, peak)
    right = sum_rows(part, peak, largest=find_largest_magnitude(weight))
    sums = stored.abs().sum(1)
    assert bool((sums <= right.absolute).all())
    assert bool(
        (right.absolute - own.absolute >= 300 * WEIGHT_FLOOR * float(weight.abs().max()) / 2).all()
    )


def test_no_eigenvalue_is_above_its_bound() -> None:
    """Of matrices with one large eigenvalue, many alike, none: above the largest, by 3 % at most."""
    drawn = torch.randn(60, 40, generator=torch.Generator().manual_seed(0)).double()
    ones = torch.ones(40, 40).double()
    for gram in (drawn.T @ drawn, drawn @ drawn.T, ones, torch.eye(40).double(), 0 * ones):
        top = float(torch.linalg.eigvalsh(gram)[-1])
        assert top <= bound_top(gram) <= 1.03 * top + 1e-12


def test_an_estimate_that_is_too_small_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decomposition, not the estimate, says that no eigenvalue lies above."""
    monkeypatch.setattr(singular_values, "_estimate_top", lambda gram: 1.0)
    gram = torch.diag(torch.tensor([1.0, 1.2, 7.0]).double())
    assert 7.0 <= bound_top(gram) < 7.001


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("alike", [False, True])
def test_lengths_behind_heads_are_no_less(size: float, alike: bool) -> None:
    """Rows of values and output as one map, head by head: above what float64 gives, by 0.1 % at most."""
    outer = draw_weight(0, torch.float32, size)[:, :96]
    inner = draw_weight(1, torch.float32, 1 / size).repeat(4, 1)
    if alike:  # of rank one, which no Cholesky decomposition is sure of
        inner = inner[:1].expand(96, -1)
    found, exact = product_rules._sum_lengths(outer, inner, 4), torch.zeros(24).double()
    for rows, columns in zip(inner.chunk(4), outer.chunk(4, dim=1), strict=True):
        exact += (columns.double() @ rows.double()).norm(dim=1)
    assert bool((found >= exact).all())
    assert float((found - exact).max()) <= 1e-3 * float(exact.max())


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e15])
def test_norms_of_a_table_in_fp32_are_no_less(size: float) -> None:
    """The norm of a row that fp32 holds is above the exact one, however small its squares are."""
    drawn = torch.randn(7, 2, 3072, generator=torch.Generator().manual_seed(0))
    table = drawn * size
    norms, _ = Interval(table, torch.zeros(2, 3072).double(), batched=True).row_norms
    exact = table.double().norm(dim=-1, keepdim=True).amax(0)
    assert bool((norms >= exact).all())
    assert bool((norms <= exact * 1.0001 + 1e-15).all())


def test_a_table_in_fp32_has_room_for_its_basis() -> None:
    """No timestep of a table is further from its basis than stated, in exact arithmetic."""
    waves = torch.outer(torch.arange(100.0), torch.logspace(-3, 0, 64)).sin()
    for table in (waves, waves[:, :1] * torch.ones(64), waves.double()):
        row = AffineRow(1.0, torch.ones(64).double(), table, torch.zeros(64).double())
        coefficients, rows, left = row.basis
        assert bool(((table.double() - coefficients @ rows).abs() <= left).all())


@pytest.mark.parametrize(("operation", "exact"), [(_add, torch.add), (_multiply, torch.mul)])
def test_tables_in_fp32_have_room_for_what_they_round(operation: Any, exact: Any) -> None:
    """A sum and a product of two tables are no further from the exact ones than `rest` says."""
    graph, drawn = torch.fx.Graph(), torch.Generator().manual_seed(0)
    nodes = [graph.placeholder(name) for name in ("first", "second")]
    for node in nodes:
        node.meta["val"] = torch.empty(1, 64)
    first, second = (torch.randn(100, 64, generator=drawn) * size for size in (3.0, 1e-3))
    held = Interval(second[:, None], torch.zeros(1, 64).double(), batched=True)
    zeros = torch.zeros(64).double()
    rows = {nodes[0]: (AffineRow(1.0, zeros + 1, first, zeros),)}
    op = SimpleNamespace(
        given=dict(zip(("self", "other"), nodes, strict=True)),
        shape=(1, 64),
        find=lambda _: bound_interval(held, (1, 64)),
        known=SimpleNamespace(affine_rows=lambda x: rows.get(x, ()), exact=lambda _: held),
    )
    (made,) = operation(op)
    off = (made.table.double() - exact(first.double(), second.double())).abs()
    assert float(off.max()) > 0
    assert bool((off <= made.rest).all())
