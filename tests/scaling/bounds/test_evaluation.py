"""Values that depend on the timestep alone: computed at each, with an error that is followed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from models.bound_ascent import bound_module, bound_one
from stopdown.scaling.bounds import evaluation
from stopdown.scaling.bounds import propagation as bounds_module
from stopdown.scaling.bounds.evaluation import evaluate
from stopdown.scaling.bounds.intervals import Interval, make_interval
from stopdown.scaling.bounds.row_sums import WEIGHT_FLOOR, is_exact_in_fp16


def test_every_timestep_is_computed() -> None:
    """A value that depends on the timestep alone has the bound of its largest over all of them."""

    class Model(nn.Module):
        def forward(self, timestep: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sin(timestep.float() * 0.001).to(x.dtype)

    model = Model()
    case = bound_one(model, model, (), {"timestep": torch.tensor([3]), "x": torch.randn(2, 4)})
    (bound,) = [x for n, x in case.bounds.values.items() if n.startswith("mul_")][-1:]
    assert bound is not None
    assert math.sin(1.0) * 64 <= bound.largest <= math.sin(1.0) * 64 * 1.01


def test_the_same_function_of_the_time_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block applies SiLU to the same embedding: it is computed once, and once for another one."""

    class Model(nn.Module):
        def forward(self, timestep: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            emb = timestep.float()[:, None] * torch.tensor([0.001, 0.01])
            for _ in range(3):
                x = x * nn.functional.silu(emb).to(x.dtype)
            return x * nn.functional.silu(emb + 1.0).to(x.dtype)

    computed: list[str] = []

    def count(node: torch.fx.Node, known: bounds_module.Propagation) -> Any:
        computed.append(node.name)
        return evaluate(node, known)

    monkeypatch.setattr(bounds_module, "evaluate", count)
    call = {"timestep": torch.tensor([3]), "x": torch.randn(1, 2)}
    case = bound_one(Model(), Model(), (), call)
    silus = [name for name in computed if name.startswith("silu")]
    assert len(silus) == 2
    scales = [
        x for name, x in case.bounds.values.items() if name.startswith("mul_") and x is not None
    ]
    assert scales[-1].largest > 64


def test_two_timesteps_are_not_taken_for_one() -> None:
    """A difference of two timesteps is bounded for every pair, not for equal ones alone."""

    class Model(nn.Module):
        def forward(
            self, timestep: torch.Tensor, timestep_r: torch.Tensor, x: torch.Tensor
        ) -> torch.Tensor:
            return x * ((timestep - timestep_r).float() * 0.001).to(x.dtype)

    model = Model()
    call = {"timestep": torch.tensor([3]), "timestep_r": torch.tensor([3]), "x": torch.randn(2, 4)}
    case = bound_one(model, model, (), call)
    (bound,) = [x for n, x in case.bounds.values.items() if n.startswith("mul_")][-1:]
    assert bound is None or bound.largest >= 64


def apply_linear(
    weight: torch.Tensor, value: Interval, dtype: torch.dtype = torch.float32
) -> Interval:
    """A linear on a value that is known but for an error."""
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    node = graph.call_function(torch.ops.aten.linear.default, (x, w))
    node.meta["val"] = torch.empty(value.center.shape[1], weight.shape[0], dtype=dtype)
    known: Any = SimpleNamespace(
        held={x: value}, load={w: weight}.get, floor=lambda n: WEIGHT_FLOOR
    )
    made = evaluate(node, known)
    assert isinstance(made, Interval)
    return made


def test_a_value_beyond_fp32_is_not_computed() -> None:
    """What fp32 has no number for is bounded like any other value, not known as Inf."""
    value = make_interval(torch.full((3, 1, 8), 1e20), batched=True)
    assert bool(apply_linear(torch.ones(4, 8), value).center.isfinite().all())
    with pytest.raises(AssertionError):
        apply_linear(torch.full((4, 8), 1e30), value)


def round_weights(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is stated of a linear's errors in fp16, and the largest that rounding its weights can make."""
    value = make_interval(torch.ones(3, 1, weight.shape[1]).double(), batched=True)
    wrong = (weight.half().double() - weight.double()).abs().sum(1)
    return apply_linear(weight, value, torch.float16).radius[0], wrong


def test_weights_that_fp16_holds_have_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a bf16 checkpoint are exact in fp16; the rounding of others needs its room."""
    other = (1 + torch.rand(16, 512, generator=torch.Generator().manual_seed(0))) / 4
    held = other.bfloat16().float()
    stated, wrong = round_weights(other)
    assert bool((wrong <= stated).all())
    exact, none = round_weights(held)
    assert not bool(none.any())
    assert bool((exact < 0.7 * stated).all())
    assert is_exact_in_fp16(held)
    assert is_exact_in_fp16(other.half())
    assert not is_exact_in_fp16(other)
    assert not is_exact_in_fp16(torch.full((2, 2), 1 + 2.0**-11))
    monkeypatch.setattr(evaluation, "is_exact_in_fp16", lambda weight: True)
    monkeypatch.setattr(evaluation, "ROUNDING", {torch.float16: 0.0})
    monkeypatch.setattr(evaluation, "FLOOR", 0.0)
    stated, wrong = round_weights(other)
    assert bool((wrong > stated).any())


def aim_error(linears: list[torch.Tensor]) -> tuple[Interval, torch.Tensor]:
    """What is stated of an error of length 1 behind linears, and the longest that it can become."""
    width = linears[0].shape[1]
    value = Interval(torch.zeros(3, 1, width).double(), torch.ones(1, width).double(), True,
                  length=torch.ones(1, 1).double())  # fmt: skip
    product = linears[0]
    for number, weight in enumerate(linears):
        value = apply_linear(weight, value)
        product = weight @ product if number else product
    return value, product @ torch.linalg.svd(product).Vh[0]


def test_an_error_is_followed_by_its_length() -> None:
    """An error that is aimed stays within its stated length and radius, which do not grow with width."""
    turn = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(2)))[0]
    stated, found = aim_error([turn.double(), turn.T.double(), turn.double()])
    assert found.norm() <= float(stated.row_error) < 2 * found.norm()  # the rest is rounding
    assert bool((found.abs() <= stated.radius[0]).all())
    assert float(stated.radius.max()) < 2  # element by element: 130


def test_a_wrong_length_of_an_error_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A singular value that is stated a tenth too small gives a length that an error exceeds."""
    right = evaluation.measure_sigma
    monkeypatch.setattr(evaluation, "measure_sigma", lambda x: 0.9 * right(x))
    stated, found = aim_error([2 * torch.eye(8).double()])
    assert found.norm() > float(stated.row_error)


class Grid(nn.Module):
    """Positions of rows and columns, as rotary embeddings make them from the size of a call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = torch.arange(x.shape[-1])
        rows, columns = torch.meshgrid(order, order, indexing="ij")
        return x * torch.cos(rows.to(x.dtype)) + x * torch.cos(columns.to(x.dtype))


def test_a_list_of_large_known_values_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids of positions above the limit of elements aren't made, and the output still has its bound."""
    made = []

    def make(center: torch.Tensor, *, batched: bool = False) -> Interval:
        made.append(center.numel())
        return make_interval(center, batched=batched)

    monkeypatch.setattr(evaluation, "make_interval", make)
    bound_module(Grid(), torch.rand(16, 16))
    assert max(made) == 16 * 16
    made.clear()
    monkeypatch.setattr(evaluation, "MOST_ELEMENTS", 100)
    bounds = bound_module(Grid(), torch.rand(16, 16)).bounds.values
    assert max(made) <= 100
    assert bounds["add"] is not None
