"""A solution as plain data: exponents by the names of parameters and modules, and what they promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from stopdown.fold_names import split_name
from stopdown.graph.mixed_dtypes import merge_operands
from stopdown.numerics import headroom_bits
from stopdown.records import Operands, Scaling
from stopdown.scaling.certificate import bound_sums, find_least_headroom, find_uncertain
from stopdown.scaling.problem import Problem
from stopdown.scaling.solver import Solution

Of = TypeVar("Of", int, tuple[int, int])


def describe_solution(problem: Problem, solution: Solution) -> Scaling:
    """A solution as plain data, by names instead of unknowns."""

    def at(unknown: int) -> int:
        return solution.exponents[problem.system.find(unknown)]

    folds = {name: at(unknown) for name, unknown in problem.parameters.items()}
    eps = {".".join(filter(None, key)): at(unknown) for key, unknown in problem.eps.items()}
    multiplies = {path: at(unknown) for path, unknown in problem.multiplies.items()}
    outputs = {number: at(unknown) for number, unknown in problem.outputs.items()}
    limits = problem.list_fp16_limits(solution.fp32_modules)
    rooms = ((headroom_bits(x.range.amax, x.dtype) - at(x.unknown), x.place) for x in limits)
    headroom, tightest = min(rooms, default=(None, ""))
    values, uncertain = len(limits), find_uncertain(limits, at)
    return Scaling(
        exponents=_without_zeros(_join_columns(folds)),
        eps=_without_zeros(eps),
        multiplies=_without_zeros(multiplies),
        fp32_modules=solution.fp32_modules,
        headroom_bits=headroom,
        tightest=tightest,
        certified=bool(values) and not uncertain,
        values=values,
        bounded=values - len(uncertain),
        uncertain=tuple(x.place for x in uncertain),
        measured_bits=find_least_headroom(uncertain, at),
        pinned={name: tuple(sorted(set(places))) for name, places in problem.pinned.items()},
        fp32_flops=sum(problem.flops.get(path, 0.0) for path in solution.fp32_modules),
        kept_buffers=tuple(sorted(problem.kept_buffers)),
        outputs=outputs,
        layers=_list_layers(problem, at),
        sums=bound_sums(limits, at),
        operands=_find_operands(problem, solution.fp32_modules),
    )


def _list_layers(problem: Problem, at: Callable[[int], int]) -> dict[str, tuple[int, int]]:
    """Layers whose input or output is scaled, and alike in every call."""
    calls = {
        path: {(at(source), at(result)) for source, result in ends}
        for path, ends in problem.layers.items()
    }
    found = {path: ends.pop() for path, ends in calls.items() if len(ends) == 1}
    return {path: ends for path, ends in _join_columns(found).items() if ends != (0, 0)}


def _find_operands(problem: Problem, fp32_modules: tuple[str, ...]) -> Operands:
    """What makes operands one, where modules from elsewhere run inside of fp32 modules."""
    guests = {name for path in fp32_modules for name in problem.guests.get(path, ())}
    return merge_operands(problem.operands, Operands(fp32_parameters=tuple(guests)))


def _join_columns(named: Mapping[str, Of]) -> dict[str, Of]:
    """The same by name, with one entry where all columns of a tensor, or inputs of a layer, are alike."""
    values: dict[str, set[Of]] = {}
    for name, value in named.items():
        values.setdefault(split_name(name)[0], set()).add(value)
    joined = {}
    for name, value in named.items():
        bare, place = split_name(name)
        joined[bare if len(place) > 1 and len(values[bare]) == 1 else name] = value
    return joined


def _without_zeros(exponents: Mapping[str, int]) -> dict[str, int]:
    return {name: exponent for name, exponent in exponents.items() if exponent}
