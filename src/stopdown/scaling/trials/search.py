"""Search order: which ways of bringing calls into fp16's range are tried, and which result is used.

A strategy returns a result or raises an error with the reason. `take_first` tries strategies in order
and returns the first acceptable result; if there is none, the cheapest of all results. There are three
nested lists of strategies:

- `scale_calls`: an fp32 residual stream if requested, the stream in the model's dtype, an fp32 stream
if that was worse than bf16, hooks;
- `scale_by_bounds`, `scale_unmeasured`: all bounds, then fewer and fewer loose ones (`LOOSEST_BITS`);
- `find_scaling`: `RELAXATIONS` of one problem: full headroom, then a few modules in fp32, then hardly
any headroom, then as many modules in fp32 as it takes.

Not covered: larger ranges in other calls (the result is calibrated, not certified), and intermediate
values inside a fused kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, Generic, TypeVar

import torch

from stopdown.errors import CaptureError, ScalingError, TrialError
from stopdown.mapped_weights import Load
from stopdown.module_calls.call import PlainCall
from stopdown.module_calls.call_signatures import Sizes
from stopdown.scaling.bounds.input_limits import EMBEDDINGS
from stopdown.scaling.bounds.propagation import LEAST_STORED_LOOSE
from stopdown.scaling.certificate import (
    BoundedCalls,
    bound_kinds,
    describe_solution,
    leave_unmeasured,
)
from stopdown.scaling.exponents.problem import (
    MeasuredCall,
    Problem,
    Statements,
    find_wide_outputs,
)
from stopdown.scaling.exponents.solver import (
    ASKED_BITS,
    CALIBRATED_BITS,
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
from stopdown.scaling.folding.folds import read_headroom
from stopdown.scaling.graph.capture import Capture
from stopdown.scaling.graph.nodes import arguments, is_kind, strip_casts
from stopdown.scaling.graph.range_measurement import log2_of
from stopdown.scaling.trials.fallback import scale_by_hooks
from stopdown.scaling.trials.measurement import Captures, measure_kinds
from stopdown.scaling.trials.residual import (
    demand_agreement,
    find_stream,
    measure_wide_flops,
    open_fp32_modules,
)
from stopdown.scaling.trials.trial import Reference, run_reference, try_scaling
from stopdown.scaling.trials.underflow import check_underflow
from stopdown.scaling_records import ResidualStream, Scaling

CHEAP = 200.0
"""A solution by folding alone that costs less is used without a search for multiplies."""

FEW_MODULES = 100
"""In a problem with more modules than this, modules that are alike are first searched as one for
multiplies."""

LOOSEST_BITS = (math.inf, 40.0, 30.0, 24.0, 20.0, 17.0, 14.0, 11.0, 8.0, 5.0, 2.0)
"""Limits, in bits, on how far a bound may exceed the measured range and still be used; tried in this
order."""

MOST_SHAPES = 8
"""Number of calls of one signature whose sizes are recorded; calls with others are compared with them
when they come."""

LOW_WEIGHT_BITS = -12.0
"""log2 of the typical size below which a weight loses bits in fp16."""

MORE_STRAIN_BITS = 0.05
"""Bits, in the mean over the weights, by which bounds may lower typical sizes below `LOW_WEIGHT_BITS`.
A tenth of a bit shows in the output (a CogVideoX 9 % further from fp32, a Wan 25 %), a twentieth
doesn't."""

MORE_TABLE_BITS = 1.0
"""Bits by which bounds may lower the typical size of an embedding table below `LOW_WEIGHT_BITS`. All
later values depend on it: a T5 whose table is stored times 2**-13.7 is 12 % further from fp32 than with
2**-9.7, with 2**-14.7 77 %, with 2**-15.7 3.3 times as far."""

MOST_STRAIN_BITS = 0.5
"""As `MORE_STRAIN_BITS`, for bounds that are requested with `ranges="bound"`: beyond it fp16 is worse
than bf16."""

MORE_MULTIPLIES = 1
"""Number of further explicit multiplies that bounds may cost; a multiply by a power of two loses no
bits."""

VANISHING_BITS = -22
"""log2 of a size that has two significant bits in fp16, or fewer: the largest value of a parameter
after scaling, or an activation of size 1 as it is computed."""

Found = TypeVar("Found")
StopReason = CaptureError | ScalingError
Find = Callable[[torch.nn.Module, Sequence[MeasuredCall]], Scaling]


@dataclass(frozen=True)
class Candidate(Generic[Found]):
    """A strategy of a search.

    Attributes:
        find: returns a result, or raises the reason why there is none.
        does: whether a result is accepted at once. Rejected results are compared by price at the end.
        find_late: computes the result if `find` postponed it; None passes the postponement to the
            caller.
    """

    find: Callable[[], Found]
    does: Callable[[Found], bool] = lambda found: True
    find_late: Callable[[], Found] | None = None


class PostponedError(Exception):
    """Raised by a strategy that is slow and known to be rejected. It runs only if all others fail."""


def take_first(
    strategies: Iterable[Candidate[Found]],
    *,
    price: Callable[[Found], Any] = lambda found: 0,
    left: list[StopReason] | None = None,
) -> Found:
    """Return the first result that its strategy accepts; if none is accepted, the cheapest one.

    Of equally cheap results, the first is returned.

    Args:
        price: price of a result.
        left: receives the error of each strategy that has no result, in order.
    """
    left, found = [] if left is None else left, dict[int, Found]()
    late = dict[int, Callable[[], Found]]()
    for number, strategy in enumerate(strategies):
        try:
            made = strategy.find()
        except PostponedError:
            if strategy.find_late is None:
                raise
            late[number] = strategy.find_late
            continue
        except (CaptureError, ScalingError) as error:
            left.append(error)
            continue
        if strategy.does(made):
            return made
        found[number] = made
    for number, find in late.items():
        try:
            found[number] = find()
        except (CaptureError, ScalingError) as error:
            left.append(error)
    if not found:
        raise left[-1]
    return min((found[number] for number in sorted(found)), key=price)


# strategies for the exponents of one problem


@dataclass(frozen=True)
class Relaxation:
    """Limits on what exponents may cost.

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
    """Restrict explicit multiplies, if there are many, to modules where they pay in a smaller problem.

    In that problem, modules that are alike have the same exponents.
    """
    if len(wider.multiplies) <= FEW_MODULES:
        return wider
    merged = merge_alike(wider, name_likenesses(module))
    found = solve_problem(merged, hard_top_bits=bits, fp32_modules=False)
    return wider if found is None else keep_multiplies(wider, find_used(merged, found.exponents))


def _solve_with_fp32(problem: Problem, bits: float, *, whole: bool) -> Solution | None:
    """Solve a problem with modules in fp32; if these may not be the whole component, check that first."""
    if not whole and needs_whole(problem, hard_top_bits=ASKED_BITS):
        return Solution({}, ("",), math.inf)
    return solve_problem(problem, hard_top_bits=bits, fp32_modules=True)


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
    """Find the exponents, with the lowest price, that keep the measured calls in range.

    Args:
        stream: fp32 residual stream with which the calls were measured.
        fp32_modules: allow modules to stay in fp32.
        whole: allow the whole component to stay in fp32, if that is the cheapest.
        statements: cache of stated problems, for several searches that differ in ranges.
        postpones: postpone the search for fp32 modules if no exponents suffice without them.

    Raises:
        PostponedError: if `postpones`, and no exponents suffice without fp32 modules.
        ScalingError: if no exponents keep the calls in range.
    """
    state = cache(partial(
        (statements or Statements()).state, module, calls,
        stream=stream, wide_outputs=find_wide_outputs(calls),
    ))  # fmt: skip

    @cache
    def solve(bits: float) -> Solution | None:
        return _solve_with_fp32(state(multiplies=True), bits, whole=whole)

    @cache
    def ends() -> bool:
        return is_hopeless(state(multiplies=True), fp32_modules=fp32_modules)

    def needs_fp32() -> bool:
        return is_hopeless(state(multiplies=True), fp32_modules=False)

    def find(relaxation: Relaxation) -> Scaling:
        if relaxation != RELAXATIONS[0] and ends():  # frequent with loose bounds
            raise explain_failure(state(multiplies=True))
        if relaxation.fp32_flops and postpones and needs_fp32():
            raise PostponedError
        if not relaxation.fp32_flops:
            return _find_cheaply(module, state, relaxation.headroom_bits)
        scaling = _describe(state(multiplies=True), solve(relaxation.headroom_bits), whole=whole)
        if scaling.fp32_flops > relaxation.fp32_flops:
            raise ScalingError(f"{scaling.fp32_flops:.0%} of the matmul work would be in fp32.")
        return scaling

    relaxations = (x for x in RELAXATIONS if fp32_modules or not x.fp32_flops)
    found = take_first(Candidate(partial(find, x)) for x in relaxations)
    shapes: dict[str, dict[Sizes, None]] = {}
    for call in calls:
        shapes.setdefault(call.capture.signature, {})[call.capture.sizes] = None
    return replace(
        found,
        stream=stream,
        signatures=tuple(sorted(shapes)),
        shapes={name: tuple(shapes[name])[:MOST_SHAPES] for name in sorted(shapes)},
    )


def _find_cheaply(module: torch.nn.Module, state: Callable[..., Problem], bits: float) -> Scaling:
    """Find exponents by folding alone, or with multiplies if folding is expensive and these cost less."""
    plain = state()
    for problem in list_foldings(plain):
        best = solve_problem(problem, hard_top_bits=bits, fp32_modules=False)
        if best is not None and best.cost < CHEAP:
            return describe_solution(problem, best)
    searched = choose_multiplies(module, state(multiplies=True), bits)
    other = solve_problem(searched, hard_top_bits=bits, fp32_modules=False)
    if other is not None and (best is None or other.cost < best.cost):
        return describe_solution(searched, other)
    return _describe(plain, best)


def list_foldings(problem: Problem) -> list[Problem]:
    """List a problem with one exponent for all columns of a weight, which DoRA needs, and as it is."""
    tied = tie_columns(problem)
    return [problem] if tied is None else [tied, problem]


# bounds instead of measured ranges


def scale_by_bounds(
    module: torch.nn.Module,
    kinds: Sequence[MeasuredCall],
    ranges: str,
    find: Find = find_scaling,
    find_in_fp16: Find | None = None,
) -> Scaling:
    """Find exponents that rest on proven bounds where possible, or only where they cost almost nothing.

    Args:
        kinds: captured and measured calls.
        ranges: `bound` (where possible) or `auto` (at almost no cost).
        find: finds exponents for calls.
        find_in_fp16: the same without fp32 modules; used if the measured ranges need none, as bounds
            also hold with hardly any headroom.

    Cost: one or two passes over the weights for each kind, and up to a dozen solutions after each.
    """
    accepts = is_free if ranges == "auto" else is_visible

    def search(bounded: BoundedCalls) -> Scaling:
        stated = bounded.state()
        best = find_visible(find, module, stated)
        narrow = find if best.fp32_modules else find_in_fp16 or find

        def does(found: Scaling) -> bool:
            return found.bounded > best.bounded and accepts(found, best, stated)

        measured = Candidate(lambda: best, lambda found: False)
        return take_first(itertools.chain([measured], _list_bounds(module, bounded, narrow, does)))

    bounded, found = _give_room(partial(bound_kinds, module, kinds, None), search)
    return bounded.describe(found)


def scale_unmeasured(
    module: torch.nn.Module,
    calls: Sequence[tuple[Capture, tuple[Any, ...], Mapping[str, Any]]],
    load: Load,
    find: Callable[..., Scaling] = find_scaling,
    encoded: float = EMBEDDINGS,
) -> Scaling:
    """Find exponents from the weights alone: no value was measured, and typical sizes are estimates.

    The result has the least work in fp32 and, among equals, the most bounds.

    Args:
        module: fake module; only its submodules and their attributes are used.
        calls: captures, each with the arguments that it was made with.
        load: returns a parameter or buffer by name.
        find: finds exponents for calls, as `find_scaling`.
        encoded: limit of encoder outputs.

    Cost: one or two passes over the weights for each call, and up to a dozen solutions after each.
    """

    def search(bounded: BoundedCalls) -> Scaling:
        soon = partial(find, postpones=True)
        strategies = _list_bounds(module, bounded, soon, lambda x: not x.fp32_modules, find)
        return take_first(strategies, price=lambda x: (x.fp32_flops, len(x.fp32_modules)))

    kinds = leave_unmeasured(calls)
    bounded, found = _give_room(partial(bound_kinds, module, kinds, load, encoded=encoded), search)
    return bounded.describe(found)


def _give_room(
    bind: Callable[..., BoundedCalls], search: Callable[[BoundedCalls], Scaling]
) -> tuple[BoundedCalls, Scaling]:
    """Bound values and find exponents; repeat with more allowance for low weights if it certifies more.

    How low a weight is stored is known only with its exponent, which depends on the bounds.

    Args:
        bind: computes bounds, or with a list of names and earlier bounds, bounds with the loose
            allowance for these parameters.
    """
    bounded = bind()
    found = search(bounded)
    low = [
        name
        for name, bits, _ in _list_stored(found, bounded.kinds)
        if name in found.uncertain and bits >= math.log2(LEAST_STORED_LOOSE)
    ]
    if not low:
        return bounded, found
    try:
        roomier = bind(low, bounded)
        other = search(roomier)
    except ScalingError:
        return bounded, found
    is_better = other.bounded > found.bounded and _is_as_narrow(other, found)
    return (roomier, other) if is_better else (bounded, found)


def _list_bounds(
    module: torch.nn.Module,
    bounded: BoundedCalls,
    find: Find,
    does: Callable[[Scaling], bool],
    find_late: Find | None = None,
) -> Iterator[Candidate[Scaling]]:
    before = None
    for bits in LOOSEST_BITS:
        calls = bounded.mix(bits)
        ranges = [call.ranges for call in calls]
        if ranges != before:  # else no bound is that loose
            late = partial(_find_wide, find_late or find, module, calls)
            yield Candidate(partial(_find_wide, find, module, calls), does, late)
        before = ranges


def _find_wide(find: Find, module: torch.nn.Module, calls: Sequence[MeasuredCall]) -> Scaling:
    """Apply `find_visible` to mixed ranges; count the `CALIBRATED_BITS` in measured ones as headroom."""
    scaling = find_visible(find, module, calls)
    bits = scaling.measured_bits
    return replace(scaling, measured_bits=None if bits is None else bits + CALIBRATED_BITS)


def find_visible(find: Find, module: torch.nn.Module, calls: Sequence[MeasuredCall]) -> Scaling:
    """Find exponents with `find`; refuse those that make parameters or activations vanish in fp16."""
    scaling = find(module, calls)
    lowest, path = min(
        ((min(pair), path) for path, pair in scaling.layers.items()), default=(0, "")
    )
    if lowest < VANISHING_BITS:
        raise ScalingError(
            f"Its bounds are so loose that the values of {path} would vanish in fp16: they would be "
            f"computed times 2**{lowest}, and those of size 1 would be 0 or nearly so."
        )
    for name, bits, fold in _list_stored(scaling, calls):
        if fold and bits < VANISHING_BITS:
            raise ScalingError(
                f"Its bounds are so loose that {name} would vanish in fp16: it is at most "
                f"{2.0 ** (bits - fold):.3g}, and would be stored times 2**{fold}."
            )
    return scaling


def _list_stored(
    scaling: Scaling, calls: Sequence[MeasuredCall]
) -> Iterator[tuple[str, float, int]]:
    """Yield each parameter, the log2 of its largest magnitude after scaling, and its lowest exponent."""
    for call in calls:
        for node, name in call.capture.parameters.items():
            largest = max((part.amax for part in call.ranges.get(node, ())), default=0.0)
            fold = min(_list_folds(scaling, name), default=0)
            if largest > 0:
                yield name, log2_of(largest) + fold, fold


def _list_folds(scaling: Scaling, name: str) -> list[int]:
    return [e for n, e in scaling.exponents.items() if n.partition("[")[0] == name]


def is_visible(found: Scaling, best: Scaling, calls: Sequence[MeasuredCall]) -> bool:
    """Return whether a scaling has no more fp32 than the best one, and loses few bits of its weights."""
    more = _measure_strain(found, calls) - _measure_strain(best, calls)
    return _is_as_narrow(found, best) and more <= MOST_STRAIN_BITS


def is_free(found: Scaling, best: Scaling, calls: Sequence[MeasuredCall]) -> bool:
    """Return whether a scaling costs almost nothing more than the best one: no fp32, few lost bits."""
    more = _measure_strain(found, calls) - _measure_strain(best, calls)
    of_tables = _measure_tables(found, calls) - _measure_tables(best, calls)
    return (
        _is_as_narrow(found, best)
        and len(found.multiplies) <= len(best.multiplies) + MORE_MULTIPLIES
        and read_headroom(found) >= min(ASKED_BITS, read_headroom(best))
        and more <= MORE_STRAIN_BITS
        and of_tables <= MORE_TABLE_BITS
    )


def _is_as_narrow(found: Scaling, best: Scaling) -> bool:
    few = len(found.fp32_modules) <= len(best.fp32_modules)
    return few and found.fp32_flops <= best.fp32_flops


def _measure_strain(scaling: Scaling, calls: Sequence[MeasuredCall]) -> float:
    """Return the mean number of bits by which the typical sizes of folded weights are too low.

    Biases are left out: the bits that they lose are below the last place of the sum to which they are
    added.
    """
    lost = [
        _measure_lost(scaling, call, node)
        for call in calls
        for node, name in call.capture.parameters.items()
        if not name.endswith("bias")
    ]
    return sum(lost) / max(len(lost), 1)


def _measure_tables(scaling: Scaling, calls: Sequence[MeasuredCall]) -> float:
    """Return the most bits by which the typical size of an embedding table is too low."""
    tables = [
        (call, strip_casts(arguments(node)["weight"]).name)
        for call in calls
        for node in call.capture.graph.graph.nodes
        if is_kind(node, "table")
    ]
    lost = [_measure_lost(scaling, x, node) for x, node in tables if node in x.capture.parameters]
    return max(lost, default=0.0)


def _measure_lost(scaling: Scaling, call: MeasuredCall, node: str) -> float:
    sizes = [part.rms for part in call.ranges.get(node, ()) if part.rms > 0]
    folds = _list_folds(scaling, call.capture.parameters[node])
    if not sizes or not folds:
        return 0.0
    return max(0.0, LOW_WEIGHT_BITS - min(folds) - log2_of(min(sizes)))


# strategies for the calls of a module


def scale_calls(
    module: torch.nn.Module,
    kinds: Sequence[Sequence[PlainCall]],
    residual: str = "native",
    ranges: str = "measured",
    *,
    verify: bool = True,
) -> Scaling:
    """Find exponents and test them by running the calls, first with the requested residual dtype.

    If that fails, the other dtype is tried, and then forward hooks, which find the weight matrices that
    fp16 can represent. These serve modules that can't be captured or whose code doesn't run with
    exponents.

    Args:
        kinds: calls in groups; those in one group run the same graph.
        residual: dtype of the residual stream, `native` or `fp32`.
        ranges: `measured`, `bound` or `auto`.
        verify: run the first call of each group with the exponents, as `try_scaling` does.

    Raises:
        CaptureError: if the code can't be traced, and hooks don't suffice either.
        ScalingError: if there are no exponents, they are not exact, or the module doesn't run with
            them.

    Cost: a capture for each group (two or three with an fp32 residual), a forward in fp32 for each
    call, and those of `try_scaling`.

    Examples:
        >>> linear = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
        >>> linear.weight[:] = 1e5 * torch.eye(4)
        >>> module = torch.nn.Sequential(linear, torch.nn.LayerNorm(4))
        >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> scaling = scale_calls(module, [[(module, (x,), {})]])
        >>> scaling.exponents, float(linear.weight.max())  # found, not folded
        ({'0.weight': -7}, 100000.0)
    """
    search = _CallSearch(module, kinds, ranges, verify)
    return take_first(search.list_strategies(residual), left=search.left)


@dataclass
class _CallSearch:
    """Search for the scaling of one module's calls.

    Attributes:
        left: errors of the strategies that failed.
        captures: cache of captures.
        unsolved: error of a problem without a solution, after which hooks are tried.
    """

    module: torch.nn.Module
    kinds: Sequence[Sequence[PlainCall]]
    ranges: str
    verify: bool
    left: list[StopReason] = field(default_factory=list)
    captures: Captures = field(default_factory=Captures)
    unsolved: ScalingError | None = None

    def list_strategies(self, residual: str) -> Iterator[Candidate[Scaling]]:
        """Yield the strategies that can still succeed after the failures of earlier ones."""
        if residual == "fp32":
            yield Candidate(self._find_streamed)
        if not self._failed(CaptureError):
            yield Candidate(self._find_native)
        if residual != "fp32" and self._failed(TrialError):
            yield Candidate(self._find_streamed)
        if self._failed(CaptureError, TrialError) or self.unsolved is not None:
            yield Candidate(self._find_by_hooks)

    def _failed(self, *kinds: type[StopReason]) -> list[StopReason]:
        return [x for x in self.left if isinstance(x, kinds)]

    @cached_property
    def _reference(self) -> Reference:
        return run_reference(self.module, [kind[0] for kind in self.kinds])

    def _find_streamed(self) -> Scaling:
        stream = plan_stream(self.module, [kind[0] for kind in self.kinds], self.captures)
        found = self._try(self._scale(stream))
        why = f"The residual stream is kept in fp32: {self.left[0].what}" if self.left else ""
        return replace(found, note=why)

    def _find_native(self) -> Scaling:
        found = self._try(self._scale(None))
        why = f"The residual stream is not kept in fp32: {self.left[0].what}" if self.left else ""
        return replace(found, note=why)

    def _find_by_hooks(self) -> Scaling:
        calls = [call for kind in self.kinds for call in kind]
        reason = self.unsolved or self._failed(CaptureError, TrialError)[0]
        reference = (lambda: self._reference) if self.verify else None
        return scale_by_hooks(self.module, calls, reason, reference)

    def _try(self, scaling: Scaling) -> Scaling:
        if not self.verify:
            return scaling
        return replace(scaling, trial=try_scaling(self.module, scaling, self._reference))

    def _scale(self, stream: ResidualStream | None) -> Scaling:
        """Find exponents with whole modules in fp32, or only parts of them if that is less fp32."""
        kinds = measure_kinds(self.module, self.kinds, self.captures, stream)
        if not self.verify:
            check_underflow(self.module, kinds, stream)
        whole = self._solve(kinds, stream)
        strategies = [
            Candidate(lambda: whole, lambda found: not found.fp32_modules),
            Candidate(
                partial(self._open, kinds, stream, whole),
                lambda found: found.fp32_flops < whole.fp32_flops,
            ),
        ]
        return take_first(strategies)

    def _open(
        self, kinds: Sequence[MeasuredCall], stream: ResidualStream | None, whole: Scaling
    ) -> Scaling:
        captures = [x.capture for x in kinds]
        opened = open_fp32_modules(self.module, stream, whole.fp32_modules, captures)
        if opened is None:
            raise ScalingError("No module that is kept in fp32 has products inside.")
        again = measure_kinds(self.module, self.kinds, self.captures, opened)
        for one, other in zip(kinds, again, strict=True):
            demand_agreement(one.capture, other.capture)
        inside = self._solve(again, opened)
        wide = [max(measure_wide_flops(x.capture) for x in y) for y in (kinds, again)]
        return replace(inside, fp32_flops=inside.fp32_flops + max(wide[1] - wide[0], 0.0))

    def _solve(self, kinds: Sequence[MeasuredCall], stream: ResidualStream | None) -> Scaling:
        try:
            return self._find(kinds, stream)
        except ScalingError as error:
            self.unsolved = error if self.ranges != "bound" else None  # hooks can't certify
            raise

    def _find(self, kinds: Sequence[MeasuredCall], stream: ResidualStream | None) -> Scaling:
        if self.ranges == "measured":
            return find_scaling(self.module, kinds, stream)
        find = partial(find_scaling, stream=stream, statements=Statements())
        in_fp16 = partial(find, fp32_modules=False)
        return scale_by_bounds(self.module, kinds, self.ranges, find, in_fp16)


def plan_stream(
    module: torch.nn.Module, calls: Sequence[PlainCall], captures: Captures
) -> ResidualStream:
    """Choose the casts of an fp32 residual stream with which these calls of a module can run.

    Args:
        captures: cache that receives the captures with and without the stream.

    Raises:
        CaptureError: if the code can't be traced, whatever the stream.
        ScalingError: if the stream can't be fp32; its text has the reason.

    Cost: two to five captures for each call (seconds).
    """
    plain = [captures.take_short(call) for call in calls]

    def find(rows: bool, attention: bool) -> ResidualStream:
        stream = find_stream(module, plain, attention=attention, rows=rows)
        for bare, call in zip(plain, calls, strict=True):
            demand_agreement(bare, captures.take(call, stream))
        return stream

    left: list[StopReason] = []
    ways = itertools.product((True, False), (False, True))
    try:
        return take_first((Candidate(partial(find, *way)) for way in ways), left=left)
    except (CaptureError, ScalingError) as error:
        raise ScalingError(left[0].what) from error
