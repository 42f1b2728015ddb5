"""Decide whether folded exponents also hold for a call that they weren't solved for.

The equations of the call's graph are stated, with every parameter, eps and multiply fixed at its
exponent. If they have a solution, the call is right with the exponents that the solution has for its
arguments and outputs: an optional input that is added to a scaled activation is multiplied by a power
of two before the call, and a scaled output is multiplied back. If they have none, the call needs other
exponents.

**Catches** every operation between the arguments and the outputs of the call, by the rules with which
exponents are solved.

**Does not catch** how large its activations are: nothing is measured.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stopdown.fold_names import (
    Folds,
    list_folds,
    name_parameters,
    split_fold_name,
    spread_columns,
    spread_rows,
)
from stopdown.interception.patches import Place
from stopdown.scaling.exponents.linear_system import ZERO, System
from stopdown.scaling.exponents.problem import (
    MeasuredCall,
    Problem,
    list_running,
    split_values,
    state_problem,
)
from stopdown.scaling.graph.capture import Capture
from stopdown.scaling.trials.measurement import list_read
from stopdown.scaling_records import Scaling


@dataclass(frozen=True)
class CallEnds:
    """Powers of two for a call's arguments and outputs, with which it's right although weights are scaled.

    Attributes:
        inputs: maps the index of a tensor among its arguments, in the order of `flatten_call`, to the
            exponent by which it is multiplied.
        outputs: maps the index of a tensor that it returns to the exponent that is removed from it.
        given: number of tensors among the arguments.
        returned: number of tensors that it returns.
    """

    inputs: Mapping[int, int] = field(default_factory=dict)
    outputs: Mapping[int, int] = field(default_factory=dict)
    given: int = 0
    returned: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether no argument or output has to be multiplied."""
        return not (self.inputs or self.outputs)


def find_ends(
    module: torch.nn.Module,
    scaling: Scaling,
    capture: Capture,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> CallEnds | None:
    """Find the powers of two for a call's arguments and outputs with which it is right on scaled weights.

    Return None if there are none.

    Args:
        module: the module without exponents; its weights may be on `meta`.
        scaling: exponents that are folded into the weights.
        capture: capture of the call with the scaling's residual stream.

    Cost: the equations of one graph; no tensor value is read.
    """
    problem = state_problem(
        module,
        [MeasuredCall(capture, split_values(capture), {})],
        multiplies=True,
        stream=scaling.stream,
        has_free_ends=True,
    )
    found = _Exponents(problem.system)
    if not _fix_all(found, problem, module, scaling, capture):
        return None
    for number in _sort_inputs(capture, args, kwargs, scaling.signatures):
        if number in problem.inputs and not found.settle(problem.inputs[number]):
            return None
    if not found.settle_rest():
        return None
    inputs, outputs = (
        {number: exponent for number, unknown in ends.items() if (exponent := found.at(unknown))}
        for ends in (problem.inputs, problem.outputs)
    )
    return CallEnds(inputs, outputs, len(capture.inputs), capture.outputs)


def _fix_all(
    found: _Exponents,
    problem: Problem,
    module: torch.nn.Module,
    scaling: Scaling,
    capture: Capture,
) -> bool:
    """Set the unknown exponents of parameters, eps and multiplies to those that are folded.

    Return False if the call's graph contradicts one.
    """
    folds, named = list_folds(scaling.exponents), name_parameters(module)
    for name, unknown in problem.parameters.items():
        bare, place = split_fold_name(name)
        exponent = _read_exponent(folds.get(bare, ()), place, tuple(named[bare].shape))
        if exponent is None or not found.fix(unknown, exponent):
            return False
    stated = {split_fold_name(name)[0] for name in problem.parameters}
    if any(folds.get(name) for name in list_read(capture) if name not in stated):
        return False  # a table that other sizes don't read
    for key, unknown in problem.eps.items():
        if not found.fix(unknown, scaling.eps.get(".".join(filter(None, key)), 0)):
            return False
    for path, unknown in problem.multiplies.items():
        if not found.fix(unknown, scaling.multiplies.get(path, 0)):
            return False
    beyond = scaling.multiplies.keys() - problem.multiplies.keys()
    running = {path for node in capture.graph.graph.nodes for path in list_running(node)}
    return not beyond & running and found.spread()


def _read_exponent(folds: Folds, place: Place, shape: tuple[int, ...]) -> int | None:
    """Return the exponent that is folded into a block of rows or columns; None if the block has several.

    Args:
        folds: blocks of the parameter and their exponents.
        shape: the parameter's shape.
    """
    if not folds:
        return 0
    rows = spread_rows(folds, shape[0] if shape else 1)
    columns = spread_columns(folds, shape[1] if len(shape) > 1 else 1)
    if place:
        rows = rows[place[0]]
    if len(place) > 1:
        columns = columns[place[1]]
    values = {(a + b) for a in rows.unique().tolist() for b in columns.unique().tolist()}
    return values.pop() if len(values) == 1 else None


def _sort_inputs(
    capture: Capture,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    signatures: Collection[str],
) -> list[int]:
    """Order a call's arguments by preference for staying unmultiplied: first those that the measured
    calls had.

    Return the indices of the tensors among them. Where the equations leave a choice, a new argument is
    multiplied rather than a known one.

    Args:
        signatures: signatures of the measured calls.
    """
    flat, _ = pytree.tree_flatten_with_path((args, dict(sorted(kwargs.items()))))
    paths = [path for path, x in flat if isinstance(x, torch.Tensor)]
    known = " ".join(signatures)

    def is_new(number: int) -> bool:
        keys = [str(getattr(x, "key", "")) for x in paths[number]]
        return bool(keys[1:2]) and bool(keys[1]) and keys[1] not in known

    return sorted(range(len(capture.inputs)), key=is_new)


class _Exponents:
    """Exponents found so far, and the equations that are left to solve."""

    def __init__(self, system: System) -> None:
        self._rows, self._system = system.reduced(), system
        self._known = {system.find(ZERO): 0}

    def at(self, unknown: int) -> int:
        return self._known.get(self._system.find(unknown), 0)

    def fix(self, unknown: int, exponent: int) -> bool:
        """Set the scale exponent of an unknown; return False if it already has another one."""
        return self._known.setdefault(self._system.find(unknown), exponent) == exponent

    def settle(self, unknown: int) -> bool:
        """Set an exponent to 0 unless the equations determine it; return whether no equation is
        violated.
        """
        self._known.setdefault(self._system.find(unknown), 0)
        return self.spread()

    def settle_rest(self) -> bool:
        """Set all exponents that the equations leave open to 0; return whether no equation is violated."""
        while self._rows:
            if not self.settle(next(x for x in self._rows[0] if x not in self._known)):
                return False
        return True

    def spread(self) -> bool:
        """Solve all equations that have one unknown scale exponent left; return False if an equation is
        violated.
        """
        is_new = True
        while is_new:
            is_new, rest = False, []
            for row in self._rows:
                unknown = [x for x in row if x not in self._known]
                total = sum(
                    factor * self._known[x] for x, factor in row.items() if x in self._known
                )
                if len(unknown) > 1:
                    rest.append(row)
                elif unknown:
                    if total % row[unknown[0]]:
                        return False
                    self._known[unknown[0]] = -total // row[unknown[0]]
                    is_new = True
                elif total:
                    return False
            self._rows = rest
        return True
