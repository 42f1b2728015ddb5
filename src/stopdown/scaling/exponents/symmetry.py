"""Shrink the solver's problem by giving similar modules, such as a transformer's blocks, the same
exponents.

The search decides for each module whether its output is multiplied. With hundreds of independent
modules it takes minutes. But blocks of one list whose parameters have the same shapes usually need the
same exponents. So their unknowns are merged for the search. The exponents are then solved again, for
each block by itself, with only the multiplies that the search chose. Merging adds equations and removes
none: a solution holds for the whole problem too. If there is none, the whole problem is searched.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

import torch

from stopdown.fold_names import split_fold_name
from stopdown.scaling.exponents.problem import Problem


def name_likenesses(module: torch.nn.Module) -> dict[str, str]:
    """Map each module's path to that of the first similar module: `blocks.7.attn` to `blocks.0.attn`.

    Modules are similar if they are members of one list (children with numbers for names) and have the
    same class and parameter shapes.
    """
    names = {"": ""}
    for path, owner in module.named_modules():
        first: dict[Hashable, str] = {}
        for name, child in owner.named_children():
            like = first.setdefault(_describe(child), name) if name.isdigit() else name
            names[_join(path, name)] = _join(names.get(path, path), like)
    return names


def merge_alike(problem: Problem, names: Mapping[str, str]) -> Problem:
    """Return a smaller problem, in which each parameter has the same unknown exponent in all similar
    modules.

    The solver prices it once for each of them.

    Args:
        names: path of each module to that of the first similar one (`name_likenesses`).
    """
    system = problem.system.copy()
    groups: dict[Hashable, list[int]] = {}
    for name, unknown in problem.parameters.items():
        owner, _, last = name.rpartition(".")
        groups.setdefault((names.get(owner, owner), last), []).append(unknown)
    for (path, attribute), unknown in problem.eps.items():
        groups.setdefault((names.get(path, path), attribute), []).append(unknown)
    for path, unknown in problem.multiplies.items():
        groups.setdefault(names.get(path, path), []).append(unknown)
    for unknowns in groups.values():
        system.equate(*unknowns)
    return replace(problem, system=system, apart=problem.system)


def tie_columns(problem: Problem) -> Problem | None:
    """Return the problem with one scale exponent for all columns of each weight, as DoRA adapters need.

    Return None if that changes nothing.
    """
    groups: dict[str, list[int]] = {}
    for name, unknown in problem.parameters.items():
        bare, place = split_fold_name(name)
        if len(place) > 1:
            groups.setdefault(bare, []).append(unknown)
    if not groups:
        return None
    system = problem.system.copy()
    for unknowns in groups.values():
        system.equate(*unknowns)
    return replace(problem, system=system)


def keep_multiplies(problem: Problem, kept: frozenset[str]) -> Problem:
    """Return the problem with explicit multiplies allowed only at the outputs of these modules."""
    system = problem.system.copy()
    left = {path: unknown for path, unknown in problem.multiplies.items() if path in kept}
    system.pin(*(problem.multiplies[path] for path in problem.multiplies if path not in left))
    return replace(problem, system=system, multiplies=left)


def find_used(problem: Problem, exponents: Mapping[int, int]) -> frozenset[str]:
    """Return the paths of the modules whose outputs a solution multiplies, that is by another number
    than 1.

    Args:
        exponents: the solution, by representative of an unknown.
    """
    used = problem.multiplies.items()
    return frozenset(path for path, unknown in used if exponents[problem.system.find(unknown)])


def _describe(module: torch.nn.Module) -> Hashable:
    parameters = tuple((name, tuple(x.shape)) for name, x in module.named_parameters())
    return type(module), parameters


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
