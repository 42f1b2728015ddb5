"""Calls that were observed: their ranges are merged, and one set of exponents is for all of them."""

from __future__ import annotations

import torch
from torch import nn

from stopdown.module_calls.call import ComponentCall
from stopdown.module_calls.callee import Callee
from stopdown.scaling.folding.folds import fold_scaling
from stopdown.scaling.trials.observed_calls import ObservedCalls


class Stream(nn.Module):
    """A linear into a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(4, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embed(x))


def _make() -> Stream:
    torch.manual_seed(0)
    return Stream().eval().requires_grad_(False)


def _call(module: Stream, *args: torch.Tensor) -> ComponentCall:
    return ComponentCall(Callee("", module, "forward", "call"), args)


def test_ranges_are_those_of_the_largest_call() -> None:
    """Two calls of one kind share a capture, and the larger one decides."""
    module = _make()
    observed = ObservedCalls()
    observed.observe(module, _call(module, torch.ones(1, 4)))
    small = observed.find_exponents(module)
    observed.observe(module, _call(module, torch.full((1, 4), 6e4)))
    large = observed.find_exponents(module)
    assert len(observed.measured) == 1
    assert observed.calls == 2
    assert small.exponents == {}
    assert large.exponents["embed.weight"] < 0


def test_other_lengths_meet_in_the_parameters() -> None:
    """Two lengths are two graphs and one set of exponents."""
    module = _make()
    observed = ObservedCalls()
    for length in (1, 3):
        observed.observe(module, _call(module, torch.full((length, 4), 6e4)))
    scaling = observed.find_exponents(module)
    assert len(observed.measured) == 2
    assert set(scaling.exponents) == {"embed.weight", "embed.bias"}
    x = torch.randn(5, 4)
    reference = module(x)
    rescaling = fold_scaling(module, scaling)
    assert torch.equal(module(x), reference)
    rescaling.undo()
