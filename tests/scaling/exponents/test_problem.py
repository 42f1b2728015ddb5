"""Equations of a module's calls, collected: shared parameters, split weights, other ranges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from models.branch_networks import WIDTH, make_overflowing
from models.rescaling_models import make_example, measure_call, run_calls
from stopdown.scaling.exponents import problem as problems
from stopdown.scaling.exponents.problem import MeasuredCall, Problem, Statements, state_problem
from stopdown.scaling.folding.folds import cast_
from stopdown.scaling.rescale import rescale_


class Divided(nn.Module):
    """A matrix whose rows, or columns, are split by each call in its own way."""

    def __init__(self, *, by_column: bool) -> None:
        super().__init__()
        self.by_column, self.gelu = by_column, nn.GELU()
        self.value, self.up = nn.Linear(4, WIDTH), nn.Linear(4, WIDTH)
        self.value.weight.data.mul_(2.0**18)
        self.all, self.out = nn.Linear(4, 2 * WIDTH), nn.Linear(2 * WIDTH, 4 * WIDTH)
        self.out.weight.data[:, :WIDTH].mul_(2.0**-18)

    def forward(self, x: torch.Tensor, parts: int) -> torch.Tensor:
        if not self.by_column:
            split = self.out(self.all(x)).chunk(parts, dim=-1)
            return split[0] * functional.gelu(split[-1])
        if parts == 1:
            return self.out(self.all(x))
        first = self.value(x).chunk(parts - 1, dim=-1)
        return self.out(torch.cat([*first, self.gelu(self.up(x))], dim=-1))


@pytest.mark.parametrize(("by_column", "ways"), [(False, (2, 4)), (True, (2, 3)), (True, (1, 2))])
def test_calls_that_split_a_weight_differently_give_it_one_exponent(
    by_column: bool, ways: tuple[int, ...]
) -> None:
    """Or that only some of them split: what each would fold into it would be folded twice."""
    torch.manual_seed(0)
    module, x = Divided(by_column=by_column).eval().requires_grad_(False), torch.randn(2, 5, 4)
    calls = [(module, (x, parts), {}) for parts in ways]

    def list_folds_of_out(*numbers: int) -> set[str]:
        measured = [measure_call(*calls[number]) for number in numbers]
        named = state_problem(module, measured).parameters
        return {name for name in named if name.startswith("out.weight")}

    assert len(list_folds_of_out(1)) > 1
    assert list_folds_of_out(0, 1) == {"out.weight"}
    reference = run_calls(calls, torch.float32)
    rescale_(module, calls=calls)
    assert all(map(torch.equal, run_calls(calls, torch.float32), reference))


def _read_problem(problem: Problem) -> list[object]:
    """All that the solver is given."""
    system = problem.system
    roots = {key: system.find(unknown) for key, unknown in system.keys.items()}
    held = problem.limits, problem.floors, problem.parameters, problem.multiplies
    return [*held, roots, system.reduced(), problem.facts.layers, problem.outputs]


def test_a_problem_with_other_ranges_is_not_stated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what stating it gives, and so is one whose graph has other limits; solving changes neither."""
    module, x = Cubed().eval(), torch.randn(2, 3, 4)
    measured = [measure_call(module, (x,))]

    def enlarge(size: float, least: float = 1.0) -> list[MeasuredCall]:
        ranges = {
            name: tuple(replace(x, amax=x.amax * size, least=x.least * least) for x in parts)
            for name, parts in measured[0].ranges.items()
        }
        return [replace(measured[0], ranges=ranges)]

    stated, counted = Statements(), list[object]()
    monkeypatch.setattr(
        problems, "state_problem", lambda *a, **k: counted.append(a) or state_problem(*a, **k)
    )
    asked = [(measured, 1), (enlarge(8.0), 1), (enlarge(1e6), 2), (enlarge(1.0, 0.5), 3)]
    for calls, count in asked:
        found = stated.state(module, calls, multiplies=True)
        found.system.pin(*found.system.keys.values())
        again = stated.state(module, calls, multiplies=True)
        assert _read_problem(again) == _read_problem(state_problem(module, calls, multiplies=True))
        assert len(counted) == count
    stated.state(module, measured)  # without multiplies it is another
    assert len(counted) == 4


class Cubed(nn.Module):
    """A tanh of a value beside a cube of it, which may overflow while the value itself does not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        root = (x * x + 1e-3).mean(-1, keepdim=True).rsqrt()
        return torch.tanh(x * x * x * 0.04 + x) * root


def test_several_calls_share_their_parameters() -> None:
    """Two lengths give one set of exponents that holds for both."""
    module, _ = make_overflowing()
    short, long = torch.randn(1, 2, 4), torch.randn(1, 9, 4) * 100
    references = module(short), module(long)
    rescaling = rescale_(module, calls=[(module, (short,), {}), (module, (long,), {})])
    assert torch.equal(module(short), references[0])
    assert torch.equal(module(long), references[1])
    cast_(module, torch.float16, rescaling)
    assert bool(module(long.half()).isfinite().all())


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["CogVideoX learned", "CogVideoX sinusoidal"])
def test_what_is_rescaled_at_one_size_is_exact_at_every_other(name: str) -> None:
    """A table of positions is read at one size and computed at the others: nothing is folded into it.

    Rescaled for either size, both sizes give in fp32 what they gave, and are finite in fp16.
    """
    module, [(_, _, kwargs)] = make_example(name)
    assert not name.endswith("learned") or "patch_embed.pos_embedding" in module.state_dict()
    longer = {**kwargs, "hidden_states": torch.randn(1, 3, 4, 8, 8)}
    if "image_rotary_emb" in kwargs:
        longer["image_rotary_emb"] = (torch.randn(48, 16).cos(), torch.randn(48, 16).sin())
    calls = [(module, (), kwargs), (module, (), longer)]
    for path in ("patch_embed.proj", "patch_embed.text_proj", "transformer_blocks.0.ff.net.2"):
        module.get_submodule(path).weight.mul_(2.0**17)
    reference = run_calls(calls, torch.float32)
    for call in calls:
        rescaling = rescale_(module, calls=[call])
        assert rescaling.exponents or rescaling.multiplies
        assert all(map(torch.equal, run_calls(calls, torch.float32), reference))
        cast_(module, torch.float16, rescaling)
        assert all(bool(x.isfinite().all()) for x in run_calls(calls, torch.float16))
        rescaling.undo()


class Shared(nn.Module):
    """A product that only a multiply of this module's output keeps in range."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.halved = nn.Parameter(torch.randn(8, 8) * 2.0**17), Halved()

    def forward(self, x: torch.Tensor, *, is_short: bool = False) -> torch.Tensor:
        x = functional.linear(x, self.weight) * 1e-4
        return self.halved(x) if is_short else x * 0.25


class Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5


class Twice(nn.Module):
    """Two calls of one module, of which only the first lets its output be multiplied."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.shared = way, Shared()
        self.norm = nn.LayerNorm(8, elementwise_affine=False, eps=1e-2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.shared(x)
        if self.way == "changed":
            second = self.shared(x / 1000).mul_(2)
        elif self.way == "of a part":
            second = self.shared(x / 1000, is_short=True)
        elif self.way == "of itself":
            second = self.shared(first)
        else:
            second = self.shared.halved(first) + x
        return torch.sigmoid(first), self.norm(second)


@pytest.mark.parametrize("way", ["changed", "of a part", "of itself", "by a part"])
def test_a_multiply_acts_in_every_call_of_its_module(way: str) -> None:
    """A second call counts too: one whose output is changed, comes from a part, or is made of the first."""
    torch.manual_seed(0)
    module, x = Twice(way).eval().requires_grad_(False), torch.randn(2, 3, 8)
    reference = module(x)
    rescale_(module, (x,))
    assert all(map(torch.equal, module(x), reference))
