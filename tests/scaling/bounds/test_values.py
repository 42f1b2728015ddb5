"""Bounds of values: views, parts, wholes and roundings of them keep what is true."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stopdown.scaling.bounds import values
from stopdown.scaling.bounds.values import (
    Bound,
    choose,
    concatenate,
    inflate,
    join,
    make_bound,
    norm_over,
    reshape,
    take,
)

SHAPES = [((2, 6), (2, 2, 3)), ((2, 2, 3), (2, 6)), ((4, 3), (12,)), ((1, 5, 4), (5, 4)),
          ((2, 3, 4), (6, 4)), ((6,), (3, 2)), ((2, 3, 4), (2, 12))]  # fmt: skip


@pytest.mark.parametrize(("shape", "target"), SHAPES)
@given(seed=st.integers(0, 2**20))
@settings(max_examples=10, deadline=None)
def test_views_keep_what_is_true(
    shape: tuple[int, ...], target: tuple[int, ...], seed: int
) -> None:
    """A reshaped bound holds for the reshaped value, from any bound that held before."""
    value, bound = draw_bound(shape, seed)
    demand(reshape(bound, shape, target), value.reshape(target))


@given(seed=st.integers(0, 2**20), dim=st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_parts_and_wholes_keep_what_is_true(seed: int, dim: int) -> None:
    """Slices, concatenations and unions of bounded values have the bounds that are computed."""
    shape = (2, 3, 4)
    (first, one), (other, two) = draw_bound(shape, seed), draw_bound(shape, seed + 1)
    whole = list(shape)
    whole[dim] *= 2
    both = concatenate([one, two], [shape, shape], tuple(whole), dim)
    demand(both, torch.cat([first, other], dim))
    kept = list(shape)
    kept[dim] = 1
    demand(take(one, tuple(kept), dim, 1, 2), first.narrow(dim, 1, 1))
    generator = torch.Generator().manual_seed(seed)
    for mask in (torch.rand(shape, generator=generator), torch.rand(kept, generator=generator)):
        along = [d for d in range(3) if mask.shape[d] > 1]
        mixed = torch.where(mask > 0.5, first, other)
        demand(choose(one, two, shape, along), mixed)
    written = first.clone()
    written.narrow(dim, 1, 1).copy_(other.narrow(dim, 0, 1))
    part = take(two, tuple(kept), dim, 0, 1)
    demand(join(one, part, shape, tuple(kept), {dim}), written)
    demand(join(one, part, shape, tuple(kept), None), written)


def draw_bound(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, Bound]:
    """A value and a bound of it: exact along some dimensions, one number along the others."""
    rng = random.Random(seed)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()
    peak, norm = value.abs(), value
    rows = [d for d in range(len(shape)) if rng.random() < 0.5] or [len(shape) - 1]
    for dim in range(len(shape)):
        peak = peak.amax(dim, keepdim=True) if rng.random() < 0.5 else peak
    norm = norm.square()
    for dim in rows:
        norm = norm.sum(dim, keepdim=True)
    for dim in range(len(shape)):
        norm = norm.amax(dim, keepdim=True) if rng.random() < 0.5 else norm
    return value, make_bound(peak, shape, typical=1.0, norm=norm.sqrt(), rows=rows)


def demand(bound: Bound, value: torch.Tensor) -> None:
    """Fail when a value exceeds a bound, by element or by row, or by any part of a row."""
    shape = tuple(value.shape)
    assert bool((value.abs() <= bound.peak * (1 + 1e-12)).all())
    for dims in ([d] for d in range(len(shape))):
        norm = value.square().sum(dims, keepdim=True).sqrt()
        assert bool((norm <= norm_over(bound, shape, dims) * (1 + 1e-12)).all())


def test_rounding_is_given_room() -> None:
    """A bound is widened by more than half a unit of fp16 in the last place."""
    bound = make_bound(torch.tensor([1.0, 0.0]).double(), (2,), typical=1.0)
    wider = inflate(bound, 2.0**-9, 2.0**-18, (2,))
    assert float(wider.peak[0]) > 1 + 2.0**-10
    assert 0 < float(wider.peak[1]) < 1e-5
    assert float(wider.norm) > float(bound.norm)


def test_what_is_collapsed_at_once_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller of two bounds, by channel and by row, is what it is entry by entry and then collapsed."""
    monkeypatch.setattr(values, "MOST_ENTRIES", 64)
    drawn, made = torch.Generator().manual_seed(0), set[bool]()
    for _ in range(300):
        shape = tuple(torch.randint(1, 9, (4,), generator=drawn).tolist())
        cuts = torch.randint(0, 2, (2, 4), generator=drawn).tolist()
        pair = [
            torch.rand(
                [n if cut else 1 for n, cut in zip(shape, one, strict=True)], generator=drawn
            )
            for one in cuts
        ]
        right = values.collapse(torch.minimum(*pair), shape)
        assert torch.equal(values._take_smaller(*pair, shape), right)
        made.add(torch.minimum(*pair).numel() > values.MOST_ENTRIES)
    assert made == {True, False}


def test_a_bound_by_row_and_channel_takes_no_room_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and channels that are 2^24 together are bounded without an entry for each pair."""
    largest = list[int]()
    collapse = values.collapse

    def watch(bound: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        largest.append(bound.numel())
        return collapse(bound, shape)

    monkeypatch.setattr(values, "collapse", watch)
    shape = (1 << 14, 1 << 10)
    peak, norm = torch.rand(1, 1 << 10), torch.rand(1 << 14, 1)
    values.make_bound(peak, shape, typical=1.0, norm=norm, rows=(1,))
    assert max(largest) <= values.MOST_ENTRIES
