"""Operations that make finite values of Inf: found under the guard, repaired, left alone where meant."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from models.pipeline_calls import quiet
from stopdown import make_plan
from stopdown.plans.calibrated import measure_plan
from stopdown.runtime.guard import guard
from stopdown.runtime.hidden_values import FUNCTIONS, noting_hidden


def fill_infinite(x: torch.Tensor) -> torch.Tensor:
    """A copy with 0 where it is not finite."""
    x = x.clone()
    x[~x.isfinite()] = 0
    return x


EDGES = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0])

HIDING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": lambda x: torch.tanh(x * 2**-17),
    "sigmoid": lambda x: (x * 2**-17).sigmoid(),
    "where": lambda x: torch.where(x.isfinite(), x, 0) * 2**-17,
    "where method": lambda x: x.where(x.isfinite(), torch.zeros_like(x)) * 2**-17,
    "nan_to_num": lambda x: torch.nan_to_num(x, posinf=1e4, neginf=-1e4) * 2**-17,
    "nan_to_num method": lambda x: x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) * 2**-17,
    "clamp": lambda x: (x * 2**-17).clamp(-5, 5),
    "clip in place": lambda x: (x * 2**-17).clip_(-5, 5),
    "whole numbers": lambda x: (x * 2**-14).to(torch.int32).clamp(-8, 8).to(x.dtype),
    "long": lambda x: (x * 2**-14).long().clamp(-8, 8).to(x.dtype),
    "atan2": lambda x: torch.atan2(x * 2**-17, torch.ones_like(x)),
    "division": lambda x: 1 / (1 + x.abs() * 2**-17),
    "rsqrt": lambda x: torch.rsqrt(1 + x.abs() * 2**-17),
    "power": lambda x: (1 + x.abs() * 2**-17) ** -0.5,
    "pow": lambda x: torch.pow(1 + x.abs() * 2**-17, -1),
    "masked_fill": lambda x: x.masked_fill(~x.isfinite(), 0) * 2**-17,
    "index": lambda x: fill_infinite(x) * 2**-17,
    "hardsigmoid": lambda x: nn.functional.hardsigmoid(x * 2**-17),
    "relu6": lambda x: nn.functional.relu6(x * 2**-17),
    "expit": lambda x: torch.special.expit(x * 2**-17),
    "NaN as a whole number": lambda x: (
        ((x - 0.5 * x) * 2**-13).to(torch.int32).clamp(-8, 8).to(x.dtype)
    ),
    "hardtanh": lambda x: nn.functional.hardtanh(x * 2**-17, -5, 5),
    "masked_scatter": lambda x: x.masked_scatter(~x.isfinite(), torch.zeros_like(x)) * 2**-17,
    "index_put": lambda x: x.index_put((~x.isfinite(),), torch.zeros((), dtype=x.dtype)) * 2**-17,
    "NaN and a mask": lambda x: torch.nan_to_num(x * x.isfinite()) * 2**-17,
    "nansum": lambda x: torch.nansum(x - x.clone() * 0.5, -1, keepdim=True).expand_as(x) * 2**-17,
    "threshold": lambda x: -nn.functional.threshold(-(x * 2**-17).abs(), -5.0, -5.0),
    "min": lambda x: torch.min((x * 2**-17).abs(), torch.full_like(x, 5.0)),
    "fmin": lambda x: torch.fmin((x * 2**-17).abs(), torch.full_like(x, 5.0)),
    "amin": lambda x: torch.stack([(x * 2**-17).abs(), torch.full_like(x, 5.0)]).amin(0),
    "elu": lambda x: nn.functional.elu(-x.abs() * 2**-17),
    "selu": lambda x: nn.functional.selu(-x.abs() * 2**-17),
    "celu": lambda x: nn.functional.celu(-x.abs() * 2**-17),
    "softplus": lambda x: nn.functional.softplus(-x.abs() * 2**-17),
    "logsigmoid": lambda x: nn.functional.logsigmoid(x.abs() * 2**-17),
    "comparison": lambda x: (x * 2**-17 > 5).to(x.dtype),
    "comparing method": lambda x: x.ge(2.0**18).to(x.dtype),
    "argmax": lambda x: nn.functional.one_hot(x.argmax(-1), 16).to(x.dtype),
    "topk": lambda x: nn.functional.one_hot(x.topk(3, -1).indices, 16).sum(-2).to(x.dtype),
    "argsort": lambda x: x.argsort(-1).to(x.dtype),
    "sort": lambda x: x.sort(-1).indices.to(x.dtype),
    "bucketize": lambda x: torch.bucketize(x * 2**-17, EDGES.to(x.dtype)).to(x.dtype),
    "heaviside": lambda x: torch.heaviside(x * 2**-17 - 5, torch.zeros_like(x)),
    "floor division": lambda x: 16 // (1 + x.abs() * 2**-17),
    "asked": lambda x: torch.zeros_like(x) if torch.isinf(x).any() else x * 2**-17,
    "fp8": lambda x: (x * 2**-14).to(torch.float8_e4m3fn).to(x.dtype),
}
"""Whose true results of values up to 1e6 are moderate."""


class Hiding(nn.Module):
    """A linear that overflows, and an operation that hides it."""

    def __init__(self, hide: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.wide, self.narrow, self.hide = nn.Linear(16, 16), nn.Linear(16, 16), hide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, 16]`, the same again."""
        made: torch.Tensor = self.narrow(self.hide(self.wide(x)))
        return made


def make(hide: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Hiding, torch.Tensor]:
    """In fp16, and an input that fits; 1000 times that does not."""
    torch.manual_seed(0)
    module = Hiding(hide).eval().requires_grad_(False)
    module.wide.weight *= 300.0
    return module.half(), torch.randn(4, 16).half()


def widen(module: Hiding, dtype: torch.dtype) -> Hiding:
    """The same weights in another dtype."""
    other = Hiding(module.hide).eval().requires_grad_(False)
    other.load_state_dict(module.state_dict())
    return other.to(dtype)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", HIDING)
def test_what_is_hidden_is_found_and_repaired(name: str) -> None:
    """Unguarded the result is finite and wrong; guarded it is no worse than bf16's. Healthy calls stay."""
    module, x = make(HIDING[name])
    healthy, large = module(x), x * 1000
    right = widen(module, torch.float32)(large.float())
    allowed = (widen(module, torch.bfloat16)(large.bfloat16()).float() - right).norm()
    plain = module(large)
    assert plain.isfinite().all()
    assert (plain.float() - right).norm() > 2 * allowed
    with guard(module, announce=quiet) as handle:
        assert torch.equal(module(x), healthy)
        assert handle.repairs == ()
        found = module(large)
    (repair,) = handle.repairs
    assert repair.kind == "clamped"
    assert "() turned Inf into finite values" in repair.evidence
    assert (found.float() - right).norm() <= allowed
    assert torch.equal(module(x), healthy)


def test_unseen_it_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the look at these operations switched off, the same call gives the wrong values."""
    monkeypatch.setattr(
        "stopdown.runtime.watch.noting_hidden", lambda *_, **__: contextlib.nullcontext()
    )
    module, x = make(HIDING["tanh"])
    plain = module(x * 1000)
    with guard(module) as handle:
        assert torch.equal(module(x * 1000), plain)
    assert handle.repairs == ()


@pytest.mark.parametrize(
    "hide",
    [
        lambda x: torch.where(x > 0, 1 / (x * 0).abs(), 2.0).clamp(max=3.0),
        lambda x: torch.where(x > 0, x, -torch.inf).softmax(-1),
        lambda x: torch.full_like(x, -torch.inf).softmax(-1).nan_to_num(0.0),
        lambda x: torch.tanh(x * x * x),
    ],
    ids=["division by zero", "mask", "empty rows", "saturation"],
)
def test_infinities_that_are_meant_are_left(hide: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Code that makes and hides Inf by itself is right: where it is looked at, the record has it once."""
    module, x = make(hide)
    plain, said = module(x), list[str]()
    with guard(module, announce=said.append) as handle:
        assert torch.equal(module(x), plain)
        assert torch.equal(module(x), plain)
    assert handle.repairs == ()
    assert said == []
    assert [call.non_finite for call in handle.record.calls] == [0]
    left = handle.record.unwatched
    assert len(left) <= 1
    assert all(
        "turned Inf into finite values; its results are as close to those in fp32" in x
        for x in left
    )


def test_functions_are_as_they_were() -> None:
    """They are replaced while a block is open, by the same functions each time, until the last is left."""
    plain = {name: vars(torch).get(name) for name in FUNCTIONS}
    methods = dict(vars(torch.Tensor))
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        first.enter_context(noting_hidden(lambda *given: None))
        second.enter_context(noting_hidden(lambda *given: None))
        replaced = torch.tanh
        first.close()
        assert torch.tanh is replaced
        assert torch.tanh is not plain["tanh"]
    assert {name: vars(torch).get(name) for name in FUNCTIONS} == plain
    assert dict(vars(torch.Tensor)) == methods
    with noting_hidden(lambda *given: None):
        assert torch.tanh is replaced


def test_compiled_code_is_not_compiled_again() -> None:
    """What compiled code hides is not watched, the record says so, and no graph is made anew for it."""
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    module, x = make(HIDING["tanh"])
    compiled: Any = torch.compile(module, backend=count)
    plain = compiled(x)
    made = len(graphs)
    with guard(compiled) as handle:
        assert torch.equal(compiled(x), plain)
    assert len(graphs) == made
    (said,) = handle.record.unwatched
    assert "inside of compiled code" in said


class Stream(nn.Module):
    """A sum of two layers, and what its code makes of what is not finite in it."""

    def __init__(self, end: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.last = (nn.Linear(32, 32) for _ in range(3))
        self.norm, self.end = nn.LayerNorm(32), end
        for layer in (self.first, self.second):
            layer.weight.data.mul_(3e4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = SWALLOWS[self.end](h + self.second(self.norm(h)))
        made: torch.Tensor = self.last(self.norm(h))
        return made


def drop_where_asked(h: torch.Tensor) -> torch.Tensor:
    return h.nan_to_num(0, 0, 0) if h.isinf().any() or h.isnan().any() else h


SWALLOWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nan_to_num": lambda h: h.nan_to_num(0, 0, 0),
    "where": lambda h: torch.where(torch.isfinite(h), h, torch.zeros_like(h)),
    "where NaN": lambda h: torch.where(h.isnan(), torch.zeros_like(h), h).nan_to_num(0, 0, 0),
    "masked_fill": lambda h: h.masked_fill(~h.isfinite(), 0),
    "index": fill_infinite,
    "asked": drop_where_asked,
    "in fp32": lambda h: h.float().nan_to_num(0, 0, 0).clamp(-1e8, 1e8).to(h.dtype),
}


def draw(seed: int, size: float) -> torch.Tensor:
    return torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(seed)) * size


@pytest.mark.default_rows(4)
@pytest.mark.parametrize("end", SWALLOWS)
@pytest.mark.parametrize("way", ["native", "fp32", "repaired"])
def test_what_is_swallowed_with_exponents_on_is_found(way: str, end: str) -> None:
    """Finds Inf and NaN behind a multiply or in an fp32 stream, and gives what is no worse than bf16."""
    module, x, large = Stream(end).eval().requires_grad_(False), draw(1, 1), draw(2, 300)
    right = module(large)
    near = copy.deepcopy(module).bfloat16()(large.bfloat16()).float()
    if way == "repaired":
        module, plan = module.half(), None
    else:
        plan = measure_plan(module, run=lambda: module(x), residual=way)
    with guard(module, plan, announce=quiet) as handle:
        module(x.half())
        found = module(large.half())
        assert handle.repairs[-1].kind == "clamped"
        assert torch.equal(module(large.half()), found)
    assert (found.float() - right).norm() <= (near - right).norm()


@pytest.mark.parametrize("way", ["native", "fp32"])
def test_masks_and_healthy_values_are_no_faults_with_exponents_on(way: str) -> None:
    """Leaves -Inf of masks, and what fp32 makes of it, as it is: no call is made again."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net, self.end = Stream("where"), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.net(x)
            scores = (h @ h.mT).float()
            unseen = torch.ones(6, 6, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(unseen, float("-inf"))
            scores = torch.where(unseen, float("-inf"), scores)
            made: torch.Tensor = self.end(scores.softmax(-1).to(h.dtype) @ h)
            return made

    module, x = Masked().eval().requires_grad_(False), draw(1, 1)
    plan = make_plan(module, run=lambda: module(x), residual=way)
    right = module(x)
    with guard(module, plan, announce=pytest.fail) as handle:
        found = module(x.half())
    assert not handle.repairs
    assert not handle.record.unwatched
    assert (found.float() - right).norm() < 0.01 * right.norm()
