"""Values that are known for every timestep."""

from __future__ import annotations

import pytest
import torch

from stopdown.scaling.bounds.intervals import (
    bound_interval,
    drop_repeated,
    find_repeated,
    make_interval,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bound_holds_at_every_timestep(dtype: torch.dtype) -> None:
    """Peaks and norms of rows are at least those of each timestep, and hardly more."""
    values = torch.randn(50, 3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    bound = bound_interval(make_interval(values, batched=True), (3, 8))
    largest, norms = values.double().abs().amax(0), values.double().norm(dim=-1).amax(0)
    assert bool((bound.peak >= largest).all())
    assert bool((bound.norm.squeeze(-1) >= norms).all())
    assert float(bound.norm.max()) <= 1.001 * float(norms.max())


def test_a_radius_widens_peaks_and_norms() -> None:
    """Each element may be away by so much, and a row by the norm of its radii."""
    exact = make_interval(torch.ones(2, 4))
    wide = exact.widen(torch.full((2, 4), 0.5).double())
    before, after = bound_interval(exact, (2, 4)), bound_interval(wide, (2, 4))
    assert float(after.largest) == float(before.largest) + 0.5
    assert float(after.norm.max()) == pytest.approx(float(before.norm.max()) + 1.0)


def test_repeated_entries_are_kept_once() -> None:
    """Expanded dimensions are seen by their strides, copied ones by their values."""
    once = torch.randn(5, 1, 4)
    assert drop_repeated(once.expand(5, 3, 4)).shape == (5, 1, 4)
    copied = once.repeat(1, 3, 1)
    assert drop_repeated(copied).shape == (5, 3, 4)
    assert torch.equal(find_repeated(copied), once)
    copied[0, 1] += 1
    assert find_repeated(copied).shape == (5, 3, 4)
