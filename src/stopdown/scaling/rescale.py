"""From a module and its arguments to folded exponents: capture, measure, solve, fold.

**Catches** overflow and underflow of every 16-bit value in the calls that it is given.
**Does not catch** larger ranges in other calls (the result is calibrated, not certified), and
what a fused kernel keeps to itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from stopdown.errors import CaptureError, OptionError, ScalingError, TrialError
from stopdown.graph.capture import Answers, Capture, capture_call, note_answers, owner_of
from stopdown.graph.ranges import measure_ranges, merge_ranges
from stopdown.numerics import headroom_bits
from stopdown.records import ResidualStream, Scaling
from stopdown.scaling.certificate import Kind, check_ranges, find_uncertain, scale_by_bounds
from stopdown.scaling.fallback import scale_by_hooks
from stopdown.scaling.folds import Rescaling, cast_, check_casts, fold_scaling
from stopdown.scaling.linear_system import ZERO
from stopdown.scaling.problem import (
    Measured,
    Problem,
    find_kept_clamps,
    find_wide_outputs,
    split_values,
    state_problem,
)
from stopdown.scaling.residual import (
    demand_agreement,
    find_stream,
    measure_wide_flops,
    open_fp32_modules,
    with_stream,
)
from stopdown.scaling.solver import HARD_TOPS_BITS, Solution, explain_failure, solve_problem
from stopdown.scaling.symmetry import find_used, keep_multiplies, merge_alike, name_likenesses
from stopdown.scaling.trial import Call, run_reference, try_scaling
from stopdown.scaling.weights import check_weights, refuse_quantised

RESIDUALS = ("native", "fp32")
"""What a residual stream can be kept in: as the model has it, or in fp32."""

_NOT_WIDE = "The residual stream is not kept in fp32:"
_CHEAP = 200.0
"""A solution by folding alone that costs less is taken without trying multiplies."""
_FEW = 100
"""Up to this many modules are searched for multiplies one by one."""


def rescale_(
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float16,
    calls: Sequence[Call] = (),
    residual: str | None = None,
    ranges: str | None = None,
    verify: bool = True,
    cast: bool = False,
) -> Rescaling:
    """Fold exponents into a module so that these calls run in `dtype` without overflow.

    The module's function stays what it was, to the last bit in fp32; no dtype changes. So the whole way is
    `rescale_`, then `cast_`, then a call in `dtype`:

        rescaling = rescale_(transformer, (), call)
        cast_(transformer, torch.float16, rescaling)
        output = transformer(**call_in_fp16)

    `.half()` does not do where the result has fp32 layers, an fp32 stream, multiplies or fp32 buffers: the
    next call refuses a module that was cast so.

    Args:
        args: positional arguments of a call of the module itself.
        kwargs: its keyword arguments.
        calls: further calls, or calls of its methods: (module.decode, (latents,), {}).
        dtype: what the module is to run in.
        residual: `fp32` keeps sums and norms in fp32 once the module is cast, its matrix products
            in `dtype`; where its architecture does not allow it, `.residual` of the result is
            `native`, and its scaling's `note` says why. None is `native`.
        ranges: `measured` trusts these calls; `bound` takes ranges that hold for every input where
            there are some, and `.certified` is True when there are for every fp16 value; `auto` takes
            bounds where they cost nothing. None is `measured`.
        verify: run the calls before and after, in fp32 to compare every bit when the module is in
            fp32, and once as `cast_` leaves it: `.trial` of the result has the error, beside bf16's,
            and what could not be run. Code that does not run with its exponents in place is tried
            with as much of it in fp16 as hooks show that fp16 holds; the scaling's `note` says so.
        cast: also cast it, as `cast_` does; undoing the result takes both back.

    Raises:
        CaptureError: the code cannot be traced.
        TrialError: cast to `dtype`, a call raises, or returns NaN, Inf, other shapes or other values.
        ScalingError: no exponents keep it in range; weights are quantised, or NaN or Inf, each
            named; a value is NaN or Inf in fp32; the module would not be what it was. The module was
            not changed.
        OptionError: there is no call; the residual is none of `RESIDUALS`, the ranges none of theirs.

    Cost: for each call a capture (seconds; three with an fp32 residual), three forwards in fp32, one
    in bf16 and one in `dtype`; both casts hold a second copy of the weights.
    """
    refuse_quantised(module)
    check_weights(module)
    given = list(calls)
    if args or kwargs:
        given.insert(0, (module, args, kwargs or {}))
    if not given:
        raise OptionError(
            f"rescale_ was given a {type(module).__name__} and no call of it.",
            expected="Exponents are found for calls: without one there is nothing to bring into range.",
            remedy="Give its arguments, rescale_(module, args, kwargs), or calls=[(module, args, kwargs)].",
        )
    stream, basis = check_residual(residual), check_ranges(ranges)
    scaling = scale_anyhow(module, [[x] for x in given], dtype, stream, basis, verify=verify)
    rescaling = fold_scaling(module, scaling)
    check_casts(rescaling)
    if cast:
        cast_(module, dtype, rescaling)
    return rescaling


def check_residual(residual: str | None) -> str:
    """`native` or `fp32`.

    Raises:
        OptionError: it is neither.
    """
    if residual is None or residual in RESIDUALS:
        return residual or "native"
    raise OptionError(
        f"The residual stream was asked for in {residual!r}.",
        expected=f"It is one of {', '.join(RESIDUALS)}.",
        remedy="Use residual='fp32', or leave it out.",
    )


def scale_calls(
    module: torch.nn.Module,
    kinds: Sequence[Sequence[Call]],
    dtype: torch.dtype,
    residual: str = "native",
    ranges: str = "measured",
) -> Scaling:
    """Exponents for calls of a module, its residual stream as asked for, or as it was and why.

    Args:
        kinds: calls by kind: those of one kind share a graph.
        residual: one of `RESIDUALS`.
        ranges: `measured`, `bound` or `auto`.

    Raises:
        CaptureError, ScalingError: there are none, with the stream or without.

    Cost: a capture for each kind (three with an fp32 residual), a forward in fp32 for each call.
    """
    stream, note = None, ""
    if residual == "fp32":
        stream, note = plan_stream(module, [kind[0] for kind in kinds], dtype)
    try:
        found = _scale_streamed(module, kinds, dtype, stream, ranges)
        return replace(found, note=note)
    except ScalingError as error:
        if stream is None:
            raise
        note = f"{_NOT_WIDE} {error.what}"
        found = _scale_streamed(module, kinds, dtype, None, ranges)
        return replace(found, note=note)


def scale_anyhow(
    module: torch.nn.Module,
    kinds: Sequence[Sequence[Call]],
    dtype: torch.dtype,
    residual: str = "native",
    ranges: str = "measured",
    *,
    verify: bool = True,
) -> Scaling:
    """As `scale_calls`, tried: exponents with the stream asked for, else without, else by hooks.

    What hooks find is what fp16 can hold of a module without a graph, or whose code does not run with
    its exponents in place.

    Args:
        verify: run the first call of each kind with what was found, as `try_scaling` does.

    Raises:
        CaptureError: there is no graph, and hooks do not do either.
        ScalingError: there are no exponents, they are not exact, or the module does not run with them.
    """
    calls = [kind[0] for kind in kinds]
    reference = cache(partial(run_reference, module, calls))
    failure: CaptureError | ScalingError | None = None
    for stream in dict.fromkeys((residual, "native")):
        try:
            found = scale_calls(module, kinds, dtype, stream, ranges)
            trial = try_scaling(module, found, dtype, reference()) if verify else None
        except CaptureError as error:
            failure = failure or error
            break
        except TrialError as error:
            failure = failure or error
            continue
        note = found.note if failure is None else f"{_NOT_WIDE} {failure.what} {found.note}"
        return replace(found, trial=trial, note=note.strip())
    assert failure is not None
    every = [call for kind in kinds for call in kind]
    return scale_by_hooks(module, every, dtype, failure, reference if verify else None)


def _scale_streamed(
    module: torch.nn.Module,
    kinds: Sequence[Sequence[Call]],
    dtype: torch.dtype,
    stream: ResidualStream | None,
    ranges: str,
) -> Scaling:
    found = _measure_kinds(module, kinds, dtype, stream)
    scaling = _scale_measured(module, found, stream, ranges)
    opened = open_fp32_modules(
        module, stream, scaling.fp32_modules, [x.measured.capture for x in found]
    )
    if opened is None:
        return scaling
    try:
        again = _measure_kinds(module, kinds, dtype, opened)
        for one, other in zip(found, again, strict=True):
            demand_agreement(one.measured.capture, other.measured.capture)
        inside = _scale_measured(module, again, opened, ranges)
    except (CaptureError, ScalingError):
        return scaling
    before, after = (max(measure_wide_flops(x.measured.capture) for x in y) for y in (found, again))
    share = inside.fp32_flops + max(after - before, 0.0)
    return replace(inside, fp32_flops=share) if share < scaling.fp32_flops else scaling


def _scale_measured(
    module: torch.nn.Module, found: Sequence[Kind], stream: ResidualStream | None, ranges: str
) -> Scaling:
    if ranges == "measured":
        return find_scaling(module, [x.measured for x in found], stream)
    return scale_by_bounds(module, found, ranges, partial(find_scaling, stream=stream))


def _measure_kinds(
    module: torch.nn.Module,
    kinds: Sequence[Sequence[Call]],
    dtype: torch.dtype,
    stream: ResidualStream | None,
) -> list[Kind]:
    return [
        Kind(x, kind[0][1], kind[0][2] or {})
        for kind in kinds
        for x in _measure_kind(module, kind, dtype, stream)
    ]


def _measure_kind(
    module: torch.nn.Module, kind: Sequence[Call], dtype: torch.dtype, stream: ResidualStream | None
) -> list[Measured]:
    """One capture with the merged ranges of a kind's calls; more where its path depends on values."""
    found: list[Measured] = []
    for call, args, kwargs in kind:
        answers = note_answers(call, args, kwargs) if found and found[0].capture.answers else ()
        same = (i for i, known in enumerate(found) if known.capture.answers == answers)
        if (known := next(same, None)) is not None:
            found[known] = measure_again(found[known], module, args, kwargs)
        else:
            found.append(measure_call(call, args, kwargs, dtype=dtype, stream=stream))
    return found


def plan_stream(
    module: torch.nn.Module, calls: Sequence[Call], dtype: torch.dtype
) -> tuple[ResidualStream | None, str]:
    """Where a module's residual stream becomes fp32 in these calls; None, and why it cannot.

    Raises:
        CaptureError: the code cannot be traced, whatever the stream.

    Cost: two to five captures for each call (seconds).
    """
    plain = [capture_call(call, args, kwargs, dtype=dtype) for call, args, kwargs in calls]
    note = ""
    for rows, attention in itertools.product((True, False), (False, True)):
        try:
            stream = find_stream(module, plain, attention=attention, rows=rows)
            for bare, call in zip(plain, calls, strict=True):
                demand_agreement(bare, _capture_streamed(*call, dtype, stream))
        except (CaptureError, ScalingError) as error:
            note = note or f"{_NOT_WIDE} {error.what}"
        else:
            return stream, ""
    return None, note


def _capture_streamed(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dtype: torch.dtype,
    stream: ResidualStream | None,
) -> Capture:
    if stream is None:
        return capture_call(call, args, kwargs, dtype=dtype)
    answers: Answers = ()
    try:
        with with_stream(owner_of(call), stream, dtype) as wide:
            return capture_call(call, args, kwargs, dtype=dtype, wide=wide, answers=answers)
    except CaptureError:  # under the hooks of a stream the module itself cannot be asked
        answers = note_answers(call, args, kwargs or {})
        if not answers:
            raise
    with with_stream(owner_of(call), stream, dtype) as wide:
        return capture_call(call, args, kwargs, dtype=dtype, wide=wide, answers=answers)


def measure_call(
    call: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float16,
    stream: ResidualStream | None = None,
) -> Measured:
    """One call captured in `dtype` and its ranges measured in fp32.

    Args:
        stream: capture it with its residual stream in fp32.

    Cost: a capture (seconds) and one forward in fp32.
    """
    capture = _capture_streamed(call, args, kwargs, dtype, stream)
    blocks, clamps = split_values(capture), find_kept_clamps(capture)
    ranges = measure_ranges(capture, owner_of(call), args, kwargs or {}, blocks, clamps)
    return Measured(capture, blocks, ranges)


def measure_again(
    known: Measured, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Measured:
    """Another call of a kind that is captured already, its ranges merged with those before.

    Cost: one forward in fp32.
    """
    clamps = find_kept_clamps(known.capture)
    ranges = measure_ranges(known.capture, module, args, kwargs, known.blocks, clamps)
    return replace(known, ranges=merge_ranges(known.ranges, ranges))


def find_scaling(
    module: torch.nn.Module, calls: Sequence[Measured], stream: ResidualStream | None = None
) -> Scaling:
    """The cheapest exponents that keep the measured calls in range.

    Args:
        stream: under which the calls were measured.

    Raises:
        ScalingError: there are none.
    """
    found = _find_cheapest(module, calls, stream or ResidualStream((), ()))
    return replace(found, stream=stream)


def _find_cheapest(
    module: torch.nn.Module, calls: Sequence[Measured], stream: ResidualStream
) -> Scaling:
    state = partial(
        state_problem,
        module,
        calls,
        widened=frozenset((*stream.cast_output_up, *stream.cast_output_down)),
        closed=frozenset(stream.cast_output_down),
        wide_outputs=find_wide_outputs(calls),
    )
    plain, wider = state(), cache(partial(state, multiplies=True))
    for bits in HARD_TOPS_BITS:
        if found := _solve_cheaply(module, plain, wider, bits):
            return _describe(*found)
    for bits in HARD_TOPS_BITS:
        if solution := solve_problem(wider(), hard_top_bits=bits, fp32_modules=True):
            return _describe(wider(), solution)
    raise explain_failure(wider())


def find_folds(
    module: torch.nn.Module,
    calls: Sequence[Measured],
    groups: Sequence[Collection[str]] = (),
    *,
    free: bool = False,
) -> Scaling | None:
    """Exponents by folding alone, as files can hold them; None when there are none.

    Args:
        groups: `module.path.attribute` of eps that only change together.
        free: let each other eps change by itself; otherwise they stay as they are.
    """
    problem = state_problem(module, calls)
    places = {".".join(filter(None, key)): unknown for key, unknown in problem.eps.items()}
    for group in groups:
        problem.system.equate(*[places.pop(name, ZERO) for name in group])
    if not free:
        problem.system.pin(*places.values())
    for bits in HARD_TOPS_BITS:
        if solution := solve_problem(problem, hard_top_bits=bits, fp32_modules=False):
            return _describe(problem, solution)
    return None


def _solve_cheaply(
    module: torch.nn.Module, plain: Problem, wider: Callable[[], Problem], bits: float
) -> tuple[Problem, Solution] | None:
    """Exponents by folding alone when they are cheap, else with multiplies when that is cheaper."""
    best = solve_problem(plain, hard_top_bits=bits, fp32_modules=False)
    if best is not None and best.cost < _CHEAP:
        return plain, best
    searched = _choose_multiplies(module, wider(), bits)
    other = solve_problem(searched, hard_top_bits=bits, fp32_modules=False)
    if other is not None and (best is None or other.cost < best.cost):
        return searched, other
    return (plain, best) if best is not None else None


def _choose_multiplies(module: torch.nn.Module, wider: Problem, bits: float) -> Problem:
    """With many modules, multiplies only where they pay when like modules are scaled alike."""
    if len(wider.multiplies) <= _FEW:
        return wider
    merged = merge_alike(wider, name_likenesses(module))
    found = solve_problem(merged, hard_top_bits=bits, fp32_modules=False)
    return wider if found is None else keep_multiplies(wider, find_used(merged, found.exponents))


def _describe(problem: Problem, solution: Solution) -> Scaling:
    """A solution as plain data, by names instead of unknowns."""
    at = _Reader(problem, solution).exponent
    folds = {_row_name(*key): at(unknown) for key, unknown in problem.parameters.items()}
    eps = {".".join(filter(None, key)): at(unknown) for key, unknown in problem.eps.items()}
    multiplies = {path: at(unknown) for path, unknown in problem.multiplies.items()}
    headroom, tightest = _find_tightest(problem, solution)
    outputs = {number: at(unknown) for number, unknown in problem.outputs.items()}
    values, uncertain = find_uncertain(problem, at, solution.fp32_modules)
    return Scaling(
        exponents=_without_zeros(folds),
        eps=_without_zeros(eps),
        multiplies=_without_zeros(multiplies),
        fp32_modules=solution.fp32_modules,
        headroom_bits=headroom,
        tightest=tightest,
        certified=bool(values) and not uncertain,
        values=values,
        bounded=values - len(uncertain),
        uncertain=uncertain,
        pinned={name: tuple(sorted(set(places))) for name, places in problem.pinned.items()},
        fp32_flops=sum(problem.flops.get(path, 0.0) for path in solution.fp32_modules),
        kept_buffers=tuple(sorted(problem.kept_buffers)),
        outputs=outputs,
    )


class _Reader:
    """Exponents of unknowns in a solution."""

    def __init__(self, problem: Problem, solution: Solution) -> None:
        self._system, self._exponents = problem.system, solution.exponents

    def exponent(self, unknown: int) -> int:
        root = self._system.find(unknown)
        return 0 if root == ZERO else self._exponents[root]


def _find_tightest(problem: Problem, solution: Solution) -> tuple[float | None, str]:
    at = _Reader(problem, solution).exponent
    rooms = [
        (headroom_bits(x.range.amax, x.dtype) - at(x.unknown), x.place)
        for x in problem.limits
        if x.dtype == torch.float16 and not set(x.interiors) & set(solution.fp32_modules)
    ]
    return min(rooms, default=(None, ""))


def _row_name(name: str, start: int, stop: int) -> str:
    return f"{name}[{start}:{stop}]" if stop else name


def _without_zeros(exponents: Mapping[str, int]) -> dict[str, int]:
    return {name: exponent for name, exponent in exponents.items() if exponent}
