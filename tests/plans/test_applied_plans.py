"""A plan is put on in one way, and a guard that is put on later knows of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

import stopdown
from models.snapshots import assert_untouched
from stopdown.plans.applier import find_applied
from stopdown.plans.calibrated import measure_plan
from stopdown.records import Plan
from stopdown.runtime.guard import Guard
from stopdown.runtime.repairs import cast_component

WIDTH = 32


@contextmanager
def guard_with_plan(module: torch.nn.Module, plan: Plan) -> Iterator[Guard]:
    with stopdown.guard(module, plan, announce=lambda text: None) as handle:
        yield handle


@contextmanager
def guard_after_plan(module: torch.nn.Module, plan: Plan) -> Iterator[Guard]:
    with stopdown.apply_plan(module, plan), ExitStack() as stack:
        yield stack.enter_context(stopdown.guard(module, announce=lambda text: None))


class Net(torch.nn.Module):
    """A residual stream that is beyond fp16's range, and a part of it that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 64), torch.nn.Linear(64, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, inner: torch.Tensor) -> Any:
        return self.norm(x + self.down(self.up(x) + inner))


def make_planned() -> tuple[Net, Plan, list[torch.Tensor]]:
    """Return a module, a plan of it for a call, and the arguments of that call."""
    torch.manual_seed(3)
    net = Net().eval().requires_grad_(False)
    net.up.weight.mul_(2.0**12)
    net.down.weight.mul_(2.0**9)
    given = [torch.randn(6, WIDTH), torch.randn(6, 64)]
    return net, measure_plan(net, run=lambda: net(*given)), given


def test_a_guard_with_a_plan_is_a_plan_and_a_guard() -> None:
    """The same call is repaired in the same way, bit for bit, and the plan is updated alike."""
    found: list[Any] = []
    for put in (guard_with_plan, guard_after_plan):
        net, plan, given = make_planned()
        with torch.no_grad(), assert_untouched({"net": net}), put(net, plan) as handle:
            made = [net(*given), net(given[0], torch.full((6, 64), 6e4)), net(*given)]
            updated = handle.updated_plan()
            said = [(x.kind, x.action, x.evidence) for x in handle.repairs]
        assert updated is not None
        assert updated.components != plan.components
        found.append((made, said, updated.components))
    assert found[0][1]
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert found[0][1:] == found[1][1:]


@pytest.mark.parametrize("cast", [True, False])
def test_a_plan_comes_back_as_it_was_put_on(cast: bool) -> None:
    """After a repair in its place a guard leaves the plan's dtypes and results, and it still comes off."""
    net, plan, given = make_planned()
    with torch.no_grad(), assert_untouched({"net": net}), stopdown.apply_plan(net, plan, cast=cast):
        before, dtypes = net(*given), [y.dtype for y in net.parameters()]
        with stopdown.guard(net) as handle:
            applied = find_applied(net)
            handle.session.find_component(net).put_on((cast_component("bf16"),))
            assert {y.dtype for y in net.parameters()} == {torch.bfloat16}
        assert [y.dtype for y in net.parameters()] == dtypes
        assert find_applied(net) is applied is not None
        assert torch.equal(net(*given), before)


def test_a_plan_that_comes_off_under_a_guard_stays_off() -> None:
    """The guard leaves the module as it was before the plan."""
    net, plan, given = make_planned()
    with torch.no_grad(), assert_untouched({"net": net}):
        applied = stopdown.apply_plan(net, plan)
        with stopdown.guard(net):
            net(*given)
            applied.undo()
