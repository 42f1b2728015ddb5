"""Modules that are alike, so that the search for multiplies sees one block of a model and not forty.

Which modules' outputs have to be multiplied is a search: each one is there or not, and hundreds of
them take minutes. But blocks of one list whose parameters have the same shapes want the same. So
the search is done with their unknowns merged, and the exponents are then found anew with the
multiplies that it chose, each block by itself. Merging adds demands and takes none away: whatever
it finds holds for the whole problem, and where it finds nothing the whole problem is searched.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

import torch

from stopdown.fold_names import split_fold_name
from stopdown.scaling.exponents.problem import Problem


def name_likenesses(module: torch.nn.Module) -> dict[str, str]:
    """Map the path of each module to that of the first one like it: `blocks.7.attn` to `blocks.0.attn`.

    Alike are the members of one list (children with numbers for names) whose classes and
    parameter shapes are the same.
    """
    names = {"": ""}
    for path, owner in module.named_modules():
        first: dict[Hashable, str] = {}
        for name, child in owner.named_children():
            like = first.setdefault(_describe(child), name) if name.isdigit() else name
            names[_join(path, name)] = _join(names.get(path, path), like)
    return names


def merge_alike(problem: Problem, names: Mapping[str, str]) -> Problem:
    """Return the same problem with one exponent for like modules; its prices count each of them.

    Args:
        names: of `name_likenesses`.
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
    """Return a problem where columns of a weight share one exponent; None if no weight has several."""
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
    """Return the same problem with multiplies at these modules only."""
    system = problem.system.copy()
    left = {path: unknown for path, unknown in problem.multiplies.items() if path in kept}
    system.pin(*(problem.multiplies[path] for path in problem.multiplies if path not in left))
    return replace(problem, system=system, multiplies=left)


def find_used(problem: Problem, exponents: Mapping[int, int]) -> frozenset[str]:
    """Find the modules whose multiply is not by 1, given the exponents of representatives."""
    used = problem.multiplies.items()
    return frozenset(path for path, unknown in used if exponents[problem.system.find(unknown)])


def _describe(module: torch.nn.Module) -> Hashable:
    parameters = tuple((name, tuple(x.shape)) for name, x in module.named_parameters())
    return type(module), parameters


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
