"""Bounds of linears, convolutions and heads: sums, lengths, and the room that their weights have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.bound_ascent import bound_example, bound_module, bound_one
from stopdown.scaling.bounds import product_rules
from stopdown.scaling.bounds import propagation as bounds_module
from stopdown.scaling.bounds.row_sums import WEIGHT_FLOOR
from stopdown.scaling.graph.nodes import is_kind

SMALL_PART = 0.75 * 2.0**-13
"""Beside a weight of 1 that is stored at 2**-11, three quarters of the least of fp16: it becomes 2**-13."""


def test_a_small_group_has_the_room_of_its_whole_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel of a depthwise convolution is rounded by what the largest of all channels is stored at.

    Without the room for rounding the result, which is relative to the largest channel too.
    """
    monkeypatch.setattr(bounds_module, "inflate", lambda bound, *_: bound)
    conv = nn.Conv2d(2, 2, 1, groups=2, bias=False)
    conv.weight.data = torch.tensor([1.0, SMALL_PART]).reshape(2, 1, 1, 1)
    x = torch.ones(1, 2, 4, 4)
    case = bound_one(conv, conv, (x,), {})
    (node,) = [x for x in case.list_nodes() if is_kind(x, "convolution")]
    (most,) = case.limits.largest.values()
    found = case.bounds.values[node.name].peak.reshape(-1)
    assert found[1] >= most * 2.0**-13


def test_a_small_head_has_the_room_of_its_whole_weight() -> None:
    """The same of the columns by which a linear reads one of several heads."""
    outer = torch.tensor([[1.0, 0.0], [0.0, SMALL_PART]])
    peak = torch.tensor([0.0, 1.0]).double()
    found = product_rules._sum_heads(outer, torch.eye(2), None, 1.0, peak, 2, WEIGHT_FLOOR)
    assert found[1] >= 2.0**-13


def test_heads_are_bounded_as_one_map() -> None:
    """An output after attention is bounded by values and output together, tighter than in turn."""
    case = bound_example("CogVideoX sinusoidal")[0]
    after = [n for n in case.list_nodes() if n.name.startswith("dropout")]
    by_name = {n.name: n for n in case.list_nodes()}
    linear = next(by_name[x.args[0].name] for x in after if "to_out" in str(x.meta))
    bound, stated = case.bounds.values[linear.name], case.bounds.ranges[linear.name][0]
    assert bound is not None
    assert bound.largest < 0.85 * stated.amax


class Cancelling(nn.Module):
    """Two linears of shifts that cancel in the whole sum and not in its first half."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, elementwise_affine=False)
        self.known, self.behind = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        for layer in (self.known, self.behind):
            nn.init.ones_(layer.weight)

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        shift = torch.tensor([500.0] * 4 + [-500.0] * 4) * timestep[:, None].sign()
        shift = shift.to(x.dtype)
        return self.behind(self.norm(x) + shift[:, None]) + self.known(shift)[:, None]


def test_parts_of_sums_are_in_the_range() -> None:
    """Where terms cancel, the range of a linear covers what half of them add up to."""
    module = Cancelling().eval().requires_grad_(False)
    call = {"x": torch.randn(1, 2, 8), "timestep": torch.tensor([7])}
    case = bound_one(module, module, (), call)
    linears = [x.name for x in case.list_nodes() if x.name.startswith("linear")]
    bounds = [case.bounds.values[name] for name in linears]
    assert all(bound is not None and bound.largest < 100 for bound in bounds)
    assert all(case.bounds.ranges[name][0].amax >= 2000 for name in linears)


class Lengthened(nn.Module):
    """A linear to more channels behind a norm, whose rows may point anywhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear = nn.RMSNorm(12), nn.Linear(12, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def search_length() -> tuple[float, float]:
    """Bound and largest norm of a row behind a linear, whose input is its first singular vector."""
    module = Lengthened().eval().requires_grad_(False)
    case = bound_module(module, torch.randn(1, 12))
    bound = case.bounds.values[case.list_nodes()[-1].name]
    assert bound is not None
    aimed = torch.linalg.svd(module.linear.weight).Vh[:1]
    return float(bound.norm), float(module(aimed).norm())


def test_a_row_is_no_longer_than_a_matrix_makes_it() -> None:
    """The norm of a linear's result is bounded by the largest singular value, to 2 %."""
    bound, found = search_length()
    assert found < bound < 1.02 * found


def test_a_wrong_singular_value_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A singular value that is stated a tenth too small gives a bound that a row exceeds."""
    right = product_rules.measure_sigma
    monkeypatch.setattr(product_rules, "measure_sigma", lambda *x: 0.9 * right(*x))
    bound, found = search_length()
    assert found > bound
