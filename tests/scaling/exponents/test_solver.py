"""Programs have a row for each thing that they demand."""

from __future__ import annotations

import math

import torch

from stopdown.scaling.exponents.problem import Limit, Problem
from stopdown.scaling.exponents.solver import _state_program, solve_problem
from stopdown.scaling.graph.range_measurement import Range


def state(sizes: list[float], dtype: torch.dtype = torch.float16, path: str = "") -> Problem:
    """A problem of values that share an exponent."""
    problem = Problem()
    unknown = problem.system.unknown("shared")
    problem.limits = [
        Limit(unknown, Range(size, size / 2, 0.0), dtype, f"{number}", 0.0, (path,) if path else ())
        for number, size in enumerate(sizes)
    ]
    return problem


def test_values_that_share_an_exponent_share_a_row() -> None:
    """The largest decides; 42 blocks of one stream had a row for each of its values."""
    problem = state([2.0, 2.0**20, 0.0, 64.0])
    program, (_, root), _ = _state_program(problem, 1.0, 0.0)
    ((row, low, high),) = program.rows
    assert (row, high) == ({program.column(root): 1.0}, -6)
    assert low < -(2**20)
    found = solve_problem(problem, hard_top_bits=1.0, fp32_modules=False)
    assert found is not None
    assert 2.0**20 * 2.0 ** found.exponents[root] <= 2.0**15


def test_values_outside_of_fp16_have_an_upper_and_a_lower_row() -> None:
    """The smallest must not vanish in fp32."""
    problem = state([2.0**-30, 4.0], torch.float32)
    program, (_, root), _ = _state_program(problem, 1.0, 0.0)
    column = program.column(root)
    assert [(row, low, high) for row, low, high in program.rows] == [
        ({column: 1.0}, float("-inf"), 125),
        ({column: 1.0}, -69, float("inf")),
    ]


def test_modules_in_fp32_lift_their_own_values_alone() -> None:
    """Values inside of different modules keep rows of their own."""
    problem = state([2.0, 4.0], path="one")
    problem.limits += state([8.0], path="other").limits
    program, _, lifts = _state_program(problem, 1.0, math.inf)
    assert [set(row) & set(lifts.values()) for row, _, _ in program.rows] == [
        {lifts["one"]},
        {lifts["other"]},
    ]
