"""Bounds hold for every input that can be found, and a wrong rule does not go unseen."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from models.bound_ascent import Cut, bound_example, bound_module, climb, draw_inputs, run_in_fp16
from models.rescaling_models import EXAMPLES
from stopdown.scaling.bounds import propagation as bounds_module
from stopdown.scaling.exponents.problem import split_values

SAMPLE = ("CogVideoX sinusoidal", "T5 gated", "SD VAE")
EVALUATIONS = 10_000


def search(name: str, evaluations: int, seed: int = 0) -> tuple[list[str], int]:
    """What exceeds a bound of a class, and how many evaluations looked for it."""
    rng, found, done = random.Random(seed), [], 0
    cases = bound_example(name)
    while done < evaluations:
        for case in cases:
            found += climb(case, rng, 5)
            done += 5
    return found, done


@pytest.mark.parametrize("name", SAMPLE)
def test_no_input_exceeds_a_bound(name: str) -> None:
    """Random inputs and gradient ascent stay below every bound, by element and by row."""
    found, done = search(name, 10)
    assert not found
    assert done >= 10


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_no_input_exceeds_a_bound_of_any_class(name: str) -> None:
    """Over all classes of the rescale table at least 10,000 evaluations stay below every bound."""
    found, done = search(name, math.ceil(EVALUATIONS / len(EXAMPLES)))
    assert not found
    assert done * len(EXAMPLES) >= EVALUATIONS


@pytest.mark.parametrize(
    "name", ["CogVideoX sinusoidal", "CogVideoX sinusoidal at another size", "T5"]
)
def test_roundings_stay_below_the_bounds(name: str) -> None:
    """What really comes out in fp16, every operation rounded, is below every bound."""
    rng = random.Random(1)
    for case in bound_example(name):
        assert not run_in_fp16(case, draw_inputs(case, rng))


def test_an_operation_without_a_rule_has_no_bound() -> None:
    """What has no rule has no bound, and the next norm is bounded again."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(torch.lgamma(x)) * 2

    case = bound_module(Model(), torch.rand(2, 8) + 1)
    assert case.bounds.values["lgamma"] is None
    assert "lgamma" not in case.bounds.ranges
    assert case.bounds.ranges["mul"][0].certain


def test_values_written_in_place_are_seen_through_every_name() -> None:
    """A bound of a tensor covers what is copied into a part of it later."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 0.01
            y[:, :2] = x[:, :2] * 3
            return y + 0

    case = bound_module(Model(), torch.randn(2, 4))
    assert not climb(case, random.Random(0), 5)
    assert case.bounds.ranges["mul"][0].amax >= 3 * 64


def check_raised_limits(name: str) -> None:
    """Raise the limit of each input a hundredfold: from earlier bounds and from scratch."""
    for case in bound_example(name):
        load, blocks = case.tensors.__getitem__, split_values(case.capture)
        for given, limit in case.limits.largest.items():
            largest = {**case.limits.largest, given: 100 * limit}
            limits = replace(case.limits, largest=largest)
            bounds = [
                bounds_module.bound_call(case.capture, load, limits, blocks, (), before)
                for before in (None, case.bounds)
            ]
            assert bounds[0].ranges == bounds[1].ranges, given
            sizes = [{x: y and y.largest for x, y in one.values.items()} for one in bounds]
            assert sizes[0] == sizes[1], given


@pytest.mark.parametrize("name", ["CogVideoX sinusoidal", "SD3"])
def test_another_limit_of_an_input_gives_the_bounds_of_a_first_pass(name: str) -> None:
    """Only what an input reaches is bounded again, and it is bounded alike."""
    check_raised_limits(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_another_limit_gives_the_bounds_of_a_first_pass_in_any_class(name: str) -> None:
    check_raised_limits(name)


def test_a_product_of_sizes_is_no_written_norm() -> None:
    """Bounds with more room for a low weight pass over it; it was a bare KeyError."""
    torch.manual_seed(0)
    case = bound_module(Cut(), torch.randn(1, 8, 4), torch.tensor([2, 3]))
    load, blocks = case.tensors.__getitem__, split_values(case.capture)
    again = bounds_module.bound_call(
        case.capture, load, case.limits, blocks, ["inner.weight"], case.bounds
    )
    assert set(again.ranges) == set(case.bounds.ranges)
