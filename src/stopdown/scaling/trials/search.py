"""Search order: which ways of finding exponents for one problem are tried, and which result is used.

A strategy returns a result or raises an error with the reason. `take_first` tries strategies in order
and returns the first acceptable result; if there is none, the cheapest of all results. `find_scaling`
tries `RELAXATIONS` of one problem: full headroom, then a few modules in fp32, then hardly any headroom,
then as many modules in fp32 as it takes. `bounded_search` runs it with bounds in place of measured ranges,
`call_search` with the residual stream in one dtype or another.

Not covered: larger ranges in other calls (the result is calibrated, not certified), and intermediate
values inside a fused kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, TypeVar

import torch

from stopdown.errors import CaptureError, ScalingError
from stopdown.module_calls.call_signatures import Sizes
from stopdown.scaling.certificate import describe_solution
from stopdown.scaling.exponents.problem import (
    MeasuredCall,
    Problem,
    Statements,
    find_wide_outputs,
    forbid_vanishing,
)
from stopdown.scaling.exponents.solver import (
    ASKED_BITS,
    HARDLY_BITS,
    Solution,
    explain_failure,
    is_hopeless,
    needs_whole,
    solve_problem,
)
from stopdown.scaling.exponents.symmetry import (
    find_used,
    keep_multiplies,
    merge_alike,
    name_likenesses,
    tie_columns,
)
from stopdown.scaling_records import ResidualStream, Scaling

CHEAP = 200.0
"""A solution by folding alone that costs less is used without a search for multiplies."""

FEW_MODULES = 100
"""In a problem with more modules than this, modules that are alike are first searched as one for
multiplies."""

MOST_SHAPES = 8
"""Number of calls of one signature whose sizes are recorded; calls with others are compared with them
when they come."""

Found = TypeVar("Found")
StopReason = CaptureError | ScalingError


class PostponedError(Exception):
    """Raised by a strategy that is slow and known to be rejected. It goes on only if all others fail.

    Attributes:
        go_on: computes the result, without the work that was done before.
        can_beat: whether the result may be cheaper than one that was found.
    """

    def __init__(
        self, go_on: Callable[[], Any], can_beat: Callable[[Any], bool] = lambda found: True
    ) -> None:
        super().__init__("Only a long search has a result.")
        self.go_on, self.can_beat = go_on, can_beat


def take_first(
    strategies: Iterable[Callable[[], Found]],
    *,
    does: Callable[[Found], bool] = lambda found: True,
    price: Callable[[Found], Any] = lambda found: 0,
    left: list[StopReason] | None = None,
) -> Found:
    """Try strategies in order; return the first result that is accepted, or else the cheapest of all.

    Of equally cheap results, the first is returned. If no strategy has a result, the last error is raised.

    Args:
        strategies: each returns a result, or raises the reason why there is none.
        does: whether a result is accepted at once.
        price: price of a result.
        left: receives the error of each strategy that has no result, in order.
    """
    left, found = [] if left is None else left, dict[int, Found]()
    late = dict[int, PostponedError]()
    for number, strategy in enumerate(strategies):
        try:
            made = strategy()
        except PostponedError as postponed:
            late[number] = postponed
            continue
        except (CaptureError, ScalingError) as error:
            left.append(error)
            continue
        if does(made):
            return made
        found[number] = made
    for number, waiting in late.items():
        earlier = [x for other, x in found.items() if other < number]
        if earlier and not waiting.can_beat(min(earlier, key=price)):
            continue
        try:
            found[number] = waiting.go_on()
        except (CaptureError, ScalingError) as error:
            left.append(error)
    if not found:
        raise left[-1]
    return min((found[number] for number in sorted(found)), key=price)


@dataclass(frozen=True)
class Relaxation:
    """Limits on what a search for scale exponents may cost: least headroom, and work in fp32.

    Attributes:
        headroom_bits: headroom that every 16-bit value must keep.
        fp32_flops: largest share of the matmul FLOPs in modules kept in fp32; 0 for no such modules.
    """

    headroom_bits: float
    fp32_flops: float = 0.0


RELAXATIONS = (
    Relaxation(ASKED_BITS),
    Relaxation(ASKED_BITS, fp32_flops=0.05),
    Relaxation(HARDLY_BITS),
    Relaxation(ASKED_BITS, fp32_flops=1.0),
    Relaxation(HARDLY_BITS, fp32_flops=1.0),
)
"""Relaxations in the order in which they are tried. Hardly any headroom holds for the measured calls
and few others: a few hundredths of the work in fp32 are better, all of it is not."""


def choose_multiplies(module: torch.nn.Module, wider: Problem, bits: float) -> Problem:
    """Restrict explicit multiplies, if many modules could have one, to those where a quick search uses it.

    In the quick search, similar modules such as a transformer's blocks have the same scale exponents.

    Args:
        wider: the problem with a multiply allowed at every module.
        bits: headroom in bits that every 16-bit value must keep.
    """
    if len(wider.multiplies) <= FEW_MODULES:
        return wider
    merged = merge_alike(wider, name_likenesses(module))
    found = solve_problem(merged, hard_top_bits=bits, fp32_modules=False)
    return wider if found is None else keep_multiplies(wider, find_used(merged, found.exponents))


def _describe(problem: Problem, solution: Solution | None, *, whole: bool = True) -> Scaling:
    if solution is None:
        raise explain_failure(problem)
    if not whole and "" in solution.fp32_modules:
        raise ScalingError("Only the whole component in fp32 keeps its bounds in range.")
    return describe_solution(problem, solution)


def find_scaling(
    module: torch.nn.Module,
    calls: Sequence[MeasuredCall],
    stream: ResidualStream | None = None,
    *,
    fp32_modules: bool = True,
    whole: bool = True,
    statements: Statements | None = None,
    postpones: bool = False,
) -> Scaling:
    """Find the cheapest scale exponents with which measured calls of a module run in fp16 without overflow.

    Args:
        stream: fp32 residual stream with which the calls were measured.
        fp32_modules: allow modules to stay in fp32.
        whole: allow the whole component to stay in fp32, if that is the cheapest.
        statements: cache of stated problems, for several searches that differ in ranges.
        postpones: postpone the search for fp32 modules if no exponents suffice without them, and leave
            out that for multiplies if values vanish with all that suffice, as the caller then refuses them.

    Raises:
        PostponedError: if `postpones`, and no exponents suffice without fp32 modules.
        ScalingError: if no exponents keep the calls in range.
    """
    statements = statements or Statements()
    relaxed = _RelaxedSearch(module, calls, stream, fp32_modules, whole, statements, postpones)
    if not postpones or not relaxed.needs_fp32:
        return relaxed.run(x for x in RELAXATIONS if fp32_modules or not x.fp32_flops)
    if relaxed.is_in_vain:
        raise explain_failure(relaxed.state(multiplies=True))
    go_on = partial(relaxed.run, [x for x in RELAXATIONS if x.fp32_flops])
    raise PostponedError(go_on, relaxed.may_need_less_than)


@dataclass(frozen=True, eq=False)
class _RelaxedSearch:
    """Searches for one problem under `RELAXATIONS`; what one of them finds out, the next knows.

    Attributes:
        module, calls, stream, fp32_modules, whole, statements, postpones: as of `find_scaling`.
    """

    module: torch.nn.Module
    calls: Sequence[MeasuredCall]
    stream: ResidualStream | None
    fp32_modules: bool
    whole: bool
    statements: Statements
    postpones: bool

    def run(self, relaxations: Iterable[Relaxation]) -> Scaling:
        """Return the first scaling that a relaxation allows."""
        found = take_first(partial(self._find, x) for x in relaxations)
        shapes: dict[str, dict[Sizes, None]] = {}
        for call in self.calls:
            shapes.setdefault(call.capture.signature, {})[call.capture.sizes] = None
        return replace(
            found,
            stream=self.stream,
            signatures=tuple(sorted(shapes)),
            shapes={name: tuple(shapes[name])[:MOST_SHAPES] for name in sorted(shapes)},
        )

    @cached_property
    def state(self) -> Callable[..., Problem]:
        """Function that states the problem; `multiplies=True` allows multiplies."""
        state = partial(self.statements.state, self.module, self.calls)
        return cache(partial(state, stream=self.stream, wide_outputs=find_wide_outputs(self.calls)))

    @cached_property
    def is_in_vain(self) -> bool:
        """Whether no relaxation has a solution."""
        fp32_flops = math.inf if self.fp32_modules else 0.0
        return is_hopeless(self.state(multiplies=True), fp32_flops=fp32_flops)

    @cached_property
    def needs_fp32(self) -> bool:
        """Whether no relaxation without fp32 modules has a solution."""
        return is_hopeless(self.state(multiplies=True), fp32_flops=0.0)

    @cached_property
    def is_refused(self) -> bool:
        """Whether the caller refuses all results without fp32 modules, because values vanish in fp16."""
        visible = forbid_vanishing(self.state(multiplies=True), self.calls)
        return self.postpones and is_hopeless(visible, fp32_flops=0.0)

    def may_need_less_than(self, found: Scaling) -> bool:
        """Return whether a result with fp32 modules may have less work in fp32 than one that was found,
        or as much in fewer modules.

        A result with less has only modules with less work each, and a linear program tells whether all of
        these together suffice. One module with as much is as cheap as one that was found, and no fewer
        suffice.
        """
        if len(found.fp32_modules) > 1:
            return True
        return not is_hopeless(self.state(multiplies=True), fp32_flops=found.fp32_flops)

    @cached_property
    def _solve(self) -> Callable[[float], Solution | None]:
        """Function that searches for fp32 modules with a headroom in bits."""

        def solve(bits: float) -> Solution | None:
            if self._needs_whole:
                return Solution({}, ("",), math.inf)
            return solve_problem(self.state(multiplies=True), hard_top_bits=bits, fp32_modules=True)

        return cache(solve)

    @cached_property
    def _needs_whole(self) -> bool:
        """Whether, by a cheap test, the whole module would have to stay in fp32, which isn't allowed.

        No search is made then: that solution is returned, and `_describe` refuses it.
        """
        return not self.whole and needs_whole(self.state(multiplies=True), hard_top_bits=ASKED_BITS)

    def _find(self, relaxation: Relaxation) -> Scaling:
        if relaxation != RELAXATIONS[0] and self.is_in_vain:  # frequent with loose bounds
            raise explain_failure(self.state(multiplies=True))
        if not relaxation.fp32_flops:
            return self._find_cheaply(relaxation.headroom_bits)
        solution = self._solve(relaxation.headroom_bits)
        scaling = _describe(self.state(multiplies=True), solution, whole=self.whole)
        if scaling.fp32_flops > relaxation.fp32_flops:
            raise ScalingError(f"{scaling.fp32_flops:.0%} of the matmul work would be in fp32.")
        return scaling

    def _find_cheaply(self, bits: float) -> Scaling:
        """Find scale exponents for weights alone, or with multiplies of activations where these cost less.

        No module stays in fp32. If every solution is refused, the first is returned for that.

        Args:
            bits: headroom in bits that every 16-bit value must keep.
        """
        plain = self.state()
        for problem in list_foldings(plain):
            best = solve_problem(problem, hard_top_bits=bits, fp32_modules=False)
            if best is not None and best.cost < CHEAP:
                return describe_solution(problem, best)
        if best is not None and self.is_refused:
            return describe_solution(plain, best)
        searched = choose_multiplies(self.module, self.state(multiplies=True), bits)
        other = solve_problem(searched, hard_top_bits=bits, fp32_modules=False)
        if other is not None and (best is None or other.cost < best.cost):
            return describe_solution(searched, other)
        return _describe(plain, best)


def list_foldings(problem: Problem) -> list[Problem]:
    """List a problem twice: with one scale exponent for all columns of each weight, as DoRA needs, and
    as it is.

    If the first is no different, the list has one.
    """
    tied = tie_columns(problem)
    return [problem] if tied is None else [tied, problem]
