"""Known values of a call: sizes, tables, parts of weights, and constants without values."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import stopdown
from models.bound_ascent import Cut, bound_module, bound_one, climb
from stopdown.scaling.bounds import propagation as bounds_module
from stopdown.scaling.exponents.problem import split_values
from stopdown.scaling.graph.nodes import is_kind


def test_sizes_of_the_call_are_known_exactly() -> None:
    """A size that fp16 can hold has no error, so a wave of it is as good as a number."""

    class Model(nn.Module):
        def forward(self, original_size: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sin(original_size.float() * 3)

    model = Model()
    call = {"original_size": torch.tensor([[1024.0]]), "x": torch.randn(2, 1)}
    case = bound_one(model, model, (), call)
    (bound,) = [x for n, x in case.bounds.values.items() if n == "mul_1"]
    assert bound is not None
    assert bound.largest <= abs(math.sin(3072.0)) * 64 * 1.01


class Times(nn.Module):
    """An embedding of the time, as in diffusion transformers."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        nn.init.constant_(self.first.weight, size)
        nn.init.constant_(self.second.weight, 0.5)

    def forward(self, timestep: torch.Tensor) -> torch.Tensor:
        waves = torch.sin(timestep[:, None].float() * torch.arange(1, 9))
        return self.second(nn.functional.silu(self.first(waves.to(self.first.weight.dtype))))


@pytest.mark.parametrize(("size", "least"), [(0.5, 2.0**-5), (2.0**-5, 2.0**-11)])
def test_weights_before_a_function_have_less_room_below(size: float, least: float) -> None:
    """A linear of timesteps that a function follows takes large weights to be stored as large ones."""
    module = Times(size).eval().requires_grad_(False)
    case = bound_one(module, module, (), {"timestep": torch.tensor([500])})
    names = {name: node for node, name in case.capture.parameters.items()}
    found = {
        name: case.bounds.ranges[names[name]][0].least_stored
        for name in ("first.weight", "second.weight")
    }
    assert found == {"first.weight": least, "second.weight": 2.0**-11}


class Known(nn.Module):
    """A table of timesteps that is joined to nothing, and a mask that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.time = nn.Linear(8, 8), nn.Linear(8, 8)
        self.linear.weight.data *= 1e6

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        waves = timestep[:, None].float() * torch.exp(-torch.arange(8, dtype=torch.float32))
        table = torch.cat([waves[:, :0], waves.sin()], -1).to(x.dtype)
        return self.linear(x) * torch.ones(8, dtype=torch.bool).reshape(1, 8) + self.time(table)


def test_known_values_may_be_empty_or_boolean() -> None:
    """They are bounded as any other."""
    call = (torch.randn(2, 8), torch.tensor([5, 9]))
    assert stopdown.rescale_(Known(), call, ranges="bound").scaling.bounded


class Pooled(nn.Module):
    """PyTorch's own attention, with a query of its own: one weight is split in the call."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.randn(1, 1, 16))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.attention.in_proj_weight.data[16:].mul_(16.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.attention(self.probe, x, x)[0])


def test_parts_of_a_split_weight_bound_their_products() -> None:
    """Every value has a bound, no input exceeds one, and a small part has the room of the whole weight."""
    torch.manual_seed(0)
    case = bound_module(Pooled(), torch.randn(1, 3, 16))
    assert all(x is not None for x in case.bounds.values.values())
    rng = random.Random(0)
    assert [x for _ in range(20) for x in climb(case, rng, 5)] == []
    nodes = {x.name: x for x in case.capture.graph.graph.nodes}
    linears = [x for x in nodes.values() if is_kind(x, "linear")]
    walk = bounds_module.Propagation(
        case.capture, case.tensors.__getitem__, case.limits, {}, frozenset()
    )
    parts = [x.args[1] for x in linears if x.args[1].name not in case.capture.parameters]
    sizes = [float(walk.load(x).abs().max()) for x in parts]
    assert len(parts) == 2
    assert sizes[1] > 8 * sizes[0]
    assert walk.floor(parts[0]) * sizes[0] == pytest.approx(walk.floor(parts[1]) * sizes[1])


def test_a_constant_without_values_has_no_bound() -> None:
    """What a dry run took from another call is fake: nothing is read of it, and nothing is certified."""
    torch.manual_seed(0)
    case = bound_module(Cut(), torch.randn(1, 8, 4), torch.tensor([2, 3]))
    name = next(iter(case.capture.parameters))
    mode = FakeTensorMode()
    constants = {**case.capture.constants, name: mode.from_tensor(torch.ones(8, 4))}
    others = {x: y for x, y in case.capture.parameters.items() if x != name}
    capture = replace(case.capture, parameters=others, constants=constants)
    load, blocks = case.tensors.__getitem__, split_values(capture)
    again = bounds_module.bound_call(capture, load, case.limits, blocks)
    assert name not in again.ranges
    assert len(again.ranges) < len(case.bounds.ranges)
