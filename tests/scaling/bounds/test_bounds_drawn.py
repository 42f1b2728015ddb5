"""Inputs that hypothesis draws stay below the bounds of real classes; what it finds it makes small."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from models.bound_ascent import Bounded, GraphRun, bound_example, bound_one, list_excesses
from models.rescaling_models import EXAMPLES
from stopdown.scaling.bounds.known_values import BoundedOperation
from stopdown.scaling.bounds.propagation import RULES
from stopdown.scaling.bounds.values import Bound

SAMPLE = ("T5 gated", "CogVideoX sinusoidal", "CogView3-Plus")
FREE = 1e4
"""What an input without a limit is drawn up to."""

PATTERNS = ("constant", "signs", "spike", "channel", "row", "ramp", "noise", "zero")
QUICK: dict[str, Any] = {
    "deadline": None, "database": None, "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate),
}  # fmt: skip

bound_cases = functools.cache(bound_example)
"""Bounds do not depend on the inputs: they are found once for each class."""


def draw_floats(data: st.DataObject, shape: tuple[int, ...], limit: float) -> torch.Tensor:
    """A tensor within its limit: a pattern, at the limit itself or any binade below it."""
    size = limit * data.draw(st.sampled_from([1.0, -1.0]) | st.floats(1e-8, 1.0))
    pattern = data.draw(st.sampled_from(PATTERNS))
    value, count = torch.zeros(shape, dtype=torch.float64), max(math.prod(shape), 1)
    place = data.draw(st.integers(0, count - 1))
    if pattern == "constant":
        value += size
    elif pattern == "signs":
        value.flatten()[:] = size * (1 - 2 * (torch.arange(count) // (place + 1) % 2))
    elif pattern == "spike":
        value.flatten()[place] = size
    elif pattern == "channel" and shape:
        value[..., place % shape[-1]] = size
    elif pattern == "row" and shape:
        value.reshape(-1, shape[-1])[place % (count // shape[-1])] = size
    elif pattern == "ramp":
        value.flatten()[:] = size * torch.linspace(-1, 1, count)
    elif pattern == "noise":
        generator = torch.Generator().manual_seed(place)
        value = (torch.randn(shape, generator=generator).double() * size).clamp(-limit, limit)
    return value


def draw_call(data: st.DataObject, case: Bounded) -> dict[str, torch.Tensor]:
    """A call's inputs within their limits."""
    limits, drawn = case.limits, {}
    for name, like in case.inputs.items():
        if name in limits.timesteps:
            steps = limits.timesteps[name].values
            last = len(steps) - 1
            number = data.draw(st.sampled_from([0, 1, last - 1, last]) | st.integers(0, last))
            drawn[name] = torch.full_like(like, steps[number].item())
        elif case.names[name] == "input_ids":
            ids = data.draw(st.lists(st.integers(0, 63), min_size=1, max_size=like.numel()))
            repeated = torch.tensor(ids).repeat(like.numel())[: like.numel()]
            drawn[name] = repeated.reshape(like.shape)
        elif like.is_floating_point() and name not in limits.fixed:
            limit = limits.largest.get(name, math.inf)
            limit = FREE if math.isinf(limit) else limit
            drawn[name] = draw_floats(data, tuple(like.shape), limit)
        else:
            drawn[name] = like
    return drawn


def list_exceeded(data: st.DataObject, case: Bounded) -> list[str]:
    """What exceeds its bound with inputs that are drawn."""
    run = GraphRun(case, draw_call(data, case), torch.float64)
    with torch.no_grad():
        run.run()
    return list(list_excesses(case, run.seen, case.list_nodes()))


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", SAMPLE)
@given(data=st.data())
@settings(max_examples=8, **QUICK)
def test_no_drawn_input_exceeds_a_bound(name: str, data: st.DataObject) -> None:
    """Spikes, edges, patterns and any timestep stay below every bound, by element and by row."""
    for case in bound_cases(name):
        assert not list_exceeded(data, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXAMPLES))
@given(data=st.data())
@settings(max_examples=100, **QUICK)
def test_no_drawn_input_exceeds_a_bound_of_any_class(name: str, data: st.DataObject) -> None:
    """A hundred draws for each class of the rescale table stay below every bound."""
    for case in bound_cases(name):
        assert not list_exceeded(data, case)


class Doubled(nn.Module):
    """A sum whose bound is reached by one constant at its limit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + x.flip(0)) * 1


def test_draws_find_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that promises nine tenths of its bound is found out by a draw."""
    right = RULES["add"]

    def wrong(op: BoundedOperation) -> Bound:
        bound = right(op)
        return Bound(bound.peak * 0.9, bound.norm * 0.9, bound.rows, bound.typical)

    @given(data=st.data())
    @settings(max_examples=60, derandomize=True, **QUICK)
    def search(data: st.DataObject) -> None:
        assert not list_exceeded(data, case)

    case = bound_one(Doubled(), Doubled(), (), {"x": torch.randn(2, 4)})
    search()
    monkeypatch.setitem(RULES, "add", wrong)
    case = bound_one(Doubled(), Doubled(), (), {"x": torch.randn(2, 4)})
    with pytest.raises(AssertionError, match=r"an element is 1\.1"):
        search()
