"""What is tried in which order, and what of it is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from scipy.optimize import milp
from torch import nn

from models.rescaling_models import measure_call
from stopdown import rescale_
from stopdown.errors import CaptureError, ScalingError
from stopdown.scaling.exponents import solver
from stopdown.scaling.exponents.problem import state_problem
from stopdown.scaling.trials import search
from stopdown.scaling.trials.search import (
    PostponedError,
    Relaxation,
    find_scaling,
    take_first,
)


def refuse(why: str) -> int:
    """Nothing is found."""
    raise ScalingError(why)


def test_the_first_strategy_that_does_is_taken() -> None:
    """What found nothing says why; what comes after the first that does is not tried."""
    left: list[CaptureError | ScalingError] = []
    tried: list[int] = []
    strategies = [
        lambda: refuse("too hot"),
        lambda: 3,
        lambda: 2,
        lambda: tried.append(1) or 1,
    ]
    assert take_first(strategies, does=lambda found: found < 3, left=left) == 2
    assert [x.what for x in left] == ["too hot"]
    assert not tried


def test_where_none_does_the_cheapest_is_taken() -> None:
    """The first of equals; the last reason where nothing was found."""
    found = [partial(int, x) for x in (5, -3, 3)]
    assert take_first(found, does=refuse_all, price=abs) == -3
    assert take_first(found, does=refuse_all) == 5
    with pytest.raises(ScalingError, match="too cold"):
        take_first([lambda: refuse("too hot"), lambda: refuse("too cold")])


def refuse_all(found: int) -> bool:
    """No result is accepted at once."""
    return False


def postpone(go_on: Callable[[], int], can_beat: Callable[[int], bool] = lambda _: True) -> int:
    """Something that takes long, and would not do."""
    raise PostponedError(go_on, can_beat)


def test_what_is_postponed_counts_only_where_nothing_does() -> None:
    """It is not looked for beside one that does; else it is one of those found, in its place."""
    late: list[int] = []
    waits = partial(postpone, lambda: late.append(7) or 7)
    other = lambda: 7 + len(late)  # noqa: E731 - a strategy
    assert take_first([waits, lambda: 2]) == 2
    assert not late
    assert take_first([waits, other], does=refuse_all) == 7
    assert take_first([other, waits], does=refuse_all, price=lambda found: -found) == 8
    assert len(late) == 2
    with pytest.raises(ScalingError, match="too late"):
        take_first([lambda: postpone(lambda: refuse("too late"))])


def test_what_is_postponed_is_left_out_where_it_cannot_be_cheaper() -> None:
    """Than one before it, which is taken where both cost the same; a later one may be as cheap."""
    late: list[int] = []

    def wait(made: int, least: int) -> Callable[[], int]:
        return partial(postpone, lambda: late.append(made) or made, lambda found: least < found)

    waiting = [wait(3, 1), wait(3, 3), wait(2, 2), wait(1, 1)]
    assert take_first(waiting, does=refuse_all, price=abs) == 1
    assert late == [3, 2, 1]
    late.clear()
    found = [wait(2, 2), lambda: 2, wait(2, 2)]
    assert take_first(found, does=refuse_all, price=abs) == 2
    assert late == [2]


class Placed(nn.Module):
    """A projection whose sum with positions nothing can scale, up to 50,000 for inputs up to 64."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8, bias=False)
        nn.init.constant_(self.proj.weight, 50000 / 8 / 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) + torch.arange(8).to(x.dtype)


class Model(nn.Module):
    """An embedding with positions, and a linear that makes it much or little of the work."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.norm, self.out = Placed(), nn.LayerNorm(8), nn.Linear(8, width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.embed(hidden_states)))


@pytest.mark.parametrize(("width", "kept"), [(512, ("embed",)), (8, ())])
def test_headroom_is_worth_a_little_work_in_fp32(width: int, kept: tuple[str, ...]) -> None:
    """A fiftieth of the work in fp32 buys a bit of headroom; half of it does not."""
    module = Model(width).eval().requires_grad_(False)
    measured = measure_call(module, (torch.full((2, 8), 64.0),))
    found = find_scaling(module, [measured])
    assert found.fp32_modules == kept
    assert found.headroom_bits is not None
    assert (found.headroom_bits >= 1) == bool(kept)


@pytest.mark.parametrize("size", [64.0, 640.0])
def test_modules_in_fp32_are_looked_for_late_where_nothing_does_without(size: float) -> None:
    """Ten times larger inputs leave fp16 whatever is folded: that is said before the long search."""
    module = Model(512).eval().requires_grad_(False)
    measured = measure_call(module, (torch.full((2, 8), size),))
    if size == 64.0:
        assert find_scaling(module, [measured], postpones=True) == find_scaling(module, [measured])
        return
    found = find_scaling(module, [measured])
    assert found.fp32_modules
    with pytest.raises(PostponedError) as postponed:
        find_scaling(module, [measured], postpones=True)
    assert postponed.value.go_on() == found
    assert not postponed.value.can_beat(found)
    assert postponed.value.can_beat(replace(found, fp32_modules=("",), fp32_flops=1.0))


def test_a_postponed_search_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It solves what is left, and nothing without fp32 is solved before."""
    module = Model(512).eval().requires_grad_(False)
    measured = measure_call(module, (torch.full((2, 8), 640.0),))
    solved: list[bool] = []
    solve = search.solve_problem

    def count(*args: Any, fp32_modules: bool, **options: Any) -> Any:
        solved.append(fp32_modules)
        return solve(*args, fp32_modules=fp32_modules, **options)

    monkeypatch.setattr(search, "solve_problem", count)
    with pytest.raises(PostponedError) as postponed:
        find_scaling(module, [measured], postpones=True)
    assert not solved
    postponed.value.go_on()
    assert solved == [True]


def test_without_that_relaxation_headroom_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly any headroom is what was taken before a little fp32 was tried."""
    left = tuple(x for x in search.RELAXATIONS if x != Relaxation(1.0, fp32_flops=0.05))
    assert len(left) == len(search.RELAXATIONS) - 1
    monkeypatch.setattr(search, "RELAXATIONS", left)
    module = Model(512).eval().requires_grad_(False)
    found = find_scaling(module, [measure_call(module, (torch.full((2, 8), 64.0),))])
    assert not found.fp32_modules
    assert found.headroom_bits is not None
    assert found.headroom_bits < 1


class Beside(Model):
    """With a value between two linears beside it, up to 2.6e6, that only an exponent brings into fp16."""

    def __init__(self) -> None:
        super().__init__(512)
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 512, bias=False)
        nn.init.constant_(self.up.weight, 5000.0)
        nn.init.constant_(self.down.weight, 2.0**-10)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + self.down(self.up(hidden_states))


@pytest.mark.parametrize("ranges", ["bound", "auto"])
def test_a_bound_needs_no_headroom_where_no_work_is_in_fp32(ranges: str) -> None:
    """Small inputs need nothing in fp32, so bounds take nothing either; `auto` keeps a bit of headroom."""
    module = Beside().eval().requires_grad_(False)
    rescaling = rescale_(module, (torch.ones(2, 8),), ranges=ranges)
    assert not rescaling.fp32_modules
    assert rescaling.certified
    assert (rescaling.headroom_bits < 1) == (ranges == "bound")
    rescaling.undo()


class Exponential(nn.Module):
    """A value in its own code that nothing scales."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.out(hidden_states.exp())


def test_whole_component_is_refused_before_its_exponents_are_priced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A value of its own code is in fp32 only with all of it; other modules are found as before."""
    module = Exponential().eval().requires_grad_(False)
    measured = measure_call(module, (torch.full((2, 8), 16.0),))
    assert find_scaling(module, [measured]).fp32_modules == ("",)
    other = Model(512).eval().requires_grad_(False)
    large = measure_call(other, (torch.full((2, 8), 640.0),))
    assert find_scaling(other, [large], whole=False) == find_scaling(other, [large])
    asked = list[bool]()
    solve = search.solve_problem

    def count(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs["fp32_modules"])
        return solve(*args, **kwargs)

    monkeypatch.setattr(search, "solve_problem", count)
    with pytest.raises(ScalingError, match="Only the whole component in fp32"):
        find_scaling(module, [measured], whole=False)
    assert asked
    assert not any(asked)


def count_solutions(monkeypatch: pytest.MonkeyPatch, *, hopeless: bool | None) -> int:
    """How many programs are solved until it is known that nothing brings a value of 8.9e6 into fp16."""
    asked = list[float]()
    solve = search.solve_problem

    def count(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs["hard_top_bits"])
        return solve(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(search, "solve_problem", count)
        if hopeless is not None:
            patched.setattr(search, "is_hopeless", lambda *_, **__: hopeless)
        module = Exponential().eval().requires_grad_(False)
        measured = measure_call(module, (torch.full((2, 8), 16.0),))
        with pytest.raises(ScalingError, match="No exponents keep every value in range"):
            find_scaling(module, [measured], fp32_modules=False)
    return len(asked)


def test_what_nothing_keeps_in_range_is_known_after_one_relaxation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One linear program ends the search; without it every relaxation is solved."""
    assert count_solutions(monkeypatch, hopeless=None) == count_solutions(
        monkeypatch, hopeless=True
    )
    assert count_solutions(monkeypatch, hopeless=None) < count_solutions(
        monkeypatch, hopeless=False
    )


@pytest.mark.parametrize("fp32_modules", [False, True])
def test_a_search_ends_by_branches_and_not_by_the_clock(
    fp32_modules: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is ten times slower finds the same exponents."""
    given = list[dict[str, Any]]()
    solve = solver.milp

    def count(*args: Any, **kwargs: Any) -> Any:
        given.append(dict(kwargs.get("options", {})))
        return solve(*args, **kwargs)

    monkeypatch.setattr(solver, "milp", count)
    module = Exponential().eval().requires_grad_(False)
    problem = state_problem(module, [measure_call(module, (torch.full((2, 8), 4.0),))])
    assert solver.solve_problem(problem, hard_top_bits=1.0, fp32_modules=fp32_modules) is not None
    assert [x["node_limit"] <= 300 and x["time_limit"] >= 600 for x in given] == [True]


def test_the_last_digits_of_ranges_do_not_reach_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Processors sum in other orders; what HiGHS is given does not differ by that."""
    given: list[Any] = []

    def note(costs: Any, **program: Any) -> Any:
        rows = program["constraints"]
        given.append((costs, rows.A.toarray().tolist(), list(rows.lb), list(rows.ub)))
        return milp(costs, **program)

    monkeypatch.setattr(solver, "milp", note)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    measured = measure_call(module, (torch.randn(2, 8) * 3e4,))
    for factor in (1.0, 1.0 + 1e-6):
        ranges = {
            name: tuple(replace(x, amax=x.amax * factor, rms=x.rms * factor) for x in parts)
            for name, parts in measured.ranges.items()
        }
        find_scaling(module, [replace(measured, ranges=ranges)])
    assert given[: len(given) // 2] == given[len(given) // 2 :]
