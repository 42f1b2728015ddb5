"""Like modules in the search for multiplies: what is alike, and that merging never costs a solution."""

from __future__ import annotations

import pytest
import torch

from models.rescaling_models import WAYS, make_example, run_calls, scale_weights
from stopdown.numerics import relative_l2
from stopdown.scaling.exponents.problem import Limit, Problem
from stopdown.scaling.exponents.solver import solve_problem
from stopdown.scaling.exponents.symmetry import (
    find_used,
    keep_multiplies,
    merge_alike,
    name_likenesses,
)
from stopdown.scaling.folding.folds import cast_
from stopdown.scaling.graph.range_measurement import Range
from stopdown.scaling.rescale import rescale_
from stopdown.scaling.trials import search


def make_problem(*amaxes: float) -> Problem:
    """Values of these sizes behind multiplies at the members of a list; sizes below 1e5 are pinned.

    Each weight is pinned, so that only a multiply brings a value into range.
    """
    problem = Problem()
    for index, amax in enumerate(amaxes):
        value = problem.system.unknown(("value", index))
        problem.multiplies[f"blocks.{index}"] = problem.system.unknown(("multiply", index))
        problem.system.relate((value, -1), (problem.multiplies[f"blocks.{index}"], 1))
        if amax < 1e5:
            problem.system.pin(value)
        found = Range(amax, amax / 4, amax / 100)
        problem.limits.append(Limit(value, found, torch.float16, f"blocks.{index}"))
    return problem


def make_blocks(*widths: int) -> torch.nn.Module:
    """A list of linears of these widths."""
    return torch.nn.ModuleDict(
        {"blocks": torch.nn.ModuleList(map(torch.nn.Linear, widths, widths))}
    )


def test_members_of_a_list_with_the_same_shapes_are_alike() -> None:
    """The first one stands for all; another width is another module, and so is another list."""
    module = make_blocks(4, 6, 4)
    module.add_module("others", torch.nn.ModuleList([torch.nn.Linear(4, 4)]))
    names = name_likenesses(module)
    assert names["blocks.2"] == "blocks.0"
    assert names["blocks.1"] == "blocks.1"
    assert names["others.0"] == "others.0"


def test_paths_inside_like_blocks_are_alike() -> None:
    """What lies in block 1 is named by block 0, numbers inside it included."""
    blocks = [torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)) for _ in range(3)]
    names = name_likenesses(torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(blocks)}))
    assert names["blocks.2.1"] == "blocks.0.1"
    assert names["blocks.2.0"] == "blocks.0.0"


def test_merged_exponents_hold_for_each_block() -> None:
    """The largest of them decides for all, each counts in the price, and the search is kept apart."""
    problem = make_problem(1e6, 1e7, 2e5)
    merged = merge_alike(problem, name_likenesses(make_blocks(4, 4, 4)))
    found = solve_problem(merged, hard_top_bits=1.0, fp32_modules=False)
    assert found is not None
    assert find_used(merged, found.exponents) == {"blocks.0", "blocks.1", "blocks.2"}
    exponent = found.exponents[merged.system.find(problem.multiplies["blocks.2"])]
    assert 1e7 * 2.0**exponent < 65504
    assert found.cost >= 3 * 60
    assert len({problem.system.find(x) for x in problem.multiplies.values()}) == 3


def test_the_final_exponents_are_found_block_by_block() -> None:
    """With the multiplies that were chosen, a smaller value is scaled by less."""
    problem = make_problem(1e6, 1e9)
    kept = keep_multiplies(problem, frozenset({"blocks.0", "blocks.1"}))
    found = solve_problem(kept, hard_top_bits=1.0, fp32_modules=False)
    assert found is not None
    small, large = (found.exponents[kept.system.find(x)] for x in kept.multiplies.values())
    assert large < small < 0


def test_a_multiply_that_was_not_chosen_is_none() -> None:
    """Its exponent is 0, so the problem that needs it has no solution."""
    kept = keep_multiplies(make_problem(1e6, 1e6), frozenset({"blocks.0"}))
    assert kept.multiplies.keys() == {"blocks.0"}
    assert solve_problem(kept, hard_top_bits=1.0, fp32_modules=False) is None


def test_blocks_that_want_different_exponents_are_searched_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where one block is pinned and its like has to be scaled, merging finds nothing, and is left."""
    monkeypatch.setattr(search, "FEW_MODULES", 0)
    problem, module = make_problem(1.0, 1e7), make_blocks(4, 4)
    merged = merge_alike(problem, name_likenesses(module))
    assert solve_problem(merged, hard_top_bits=1.0, fp32_modules=False) is None
    assert search.choose_multiplies(module, problem, 1.0) is problem


@pytest.mark.thorough
def test_a_search_over_like_modules_finds_what_the_whole_one_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many multiplies, exact in fp32, and near in fp16."""
    module, calls = make_example("PixArt")
    scale_weights(module, WAYS["residual"], 18)
    reference = run_calls(calls, torch.float32)
    whole = rescale_(module, calls=calls)
    whole.undo()
    searches: list[Problem] = []
    merge = search.merge_alike
    monkeypatch.setattr(
        search, "merge_alike", lambda *given: searches.append(given[0]) or merge(*given)
    )
    monkeypatch.setattr(search, "FEW_MODULES", 0)
    found = rescale_(module, calls=calls)
    assert searches
    assert len(found.multiplies) == len(whole.multiplies) > 0
    assert all(map(torch.equal, run_calls(calls, torch.float32), reference))
    cast_(module, torch.float16, found)
    errors = map(relative_l2, run_calls(calls, torch.float16), reference)
    assert max(errors) < 0.01


def test_a_value_whose_squares_are_0_is_limited() -> None:
    """Its largest magnitude stands for its root mean square, which fp32 cannot hold; it was an error."""
    problem = make_problem(1e6)
    tiny = problem.system.unknown("tiny")
    problem.limits.append(Limit(tiny, Range(1e-30, 0.0, 1e-30), torch.float32, "tiny"))
    found = solve_problem(problem, hard_top_bits=1.0, fp32_modules=False)
    assert found is not None
    assert 1e-30 * 2.0 ** found.exponents.get(problem.system.find(tiny), 0) > 0
