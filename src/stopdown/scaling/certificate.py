"""Decide how large each activation can be, from proven bounds and measurements, and how much of it is
proven.

Exponents are chosen for these ranges. A bound holds for every input, so exponents that fit it never
overflow. If a bound is much looser than the measured range (a group norm over a whole video), it would
cost precision. So `auto` uses bounds only if the exponents stay about those of measured ranges, and
otherwise keeps `CALIBRATED_BITS` above the measurement. A solution is described as plain data:
exponents by the names of parameters and modules, and what is certified. `docs/certificates.md` has the
argument.

Not covered: inputs beyond the limits in the note.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.fx import Node

from stopdown.fold_names import name_parameters, split_fold_name
from stopdown.mapped_weights import Load, bring_home, find_stored
from stopdown.module_calls.mixed_dtypes import merge_operands
from stopdown.number_formats import FP16
from stopdown.numerics import headroom_bits
from stopdown.operations import list_with
from stopdown.scaling.bounds.input_limits import (
    EMBEDDINGS,
    InputStatement,
    list_limits,
    list_sizes,
    note_limits,
    state_calls,
)
from stopdown.scaling.bounds.known_values import Bounds
from stopdown.scaling.bounds.propagation import bound_call
from stopdown.scaling.exponents.problem import CallFacts, Limit, MeasuredCall, Problem, split_values
from stopdown.scaling.exponents.solver import CALIBRATED_BITS, Solution
from stopdown.scaling.graph.capture import Capture
from stopdown.scaling.graph.nodes import has_trait, is_float, is_kind
from stopdown.scaling.graph.range_measurement import Range, Ranges, log2_of
from stopdown.scaling_records import Operands, Scaling, describe_count, describe_least

PEAK = 8.0
"""Estimated ratio of the largest magnitude of an unmeasured value to its typical size."""


@dataclass(frozen=True)
class BoundedCalls:
    """Calls of a module, each with measured or estimated magnitudes of its activations and with proven
    bounds.

    Attributes:
        kinds: the calls with their ranges.
        stated: names, limits and sizes of each call's inputs.
        bounds: bounds of each call.
        guessed: whether nothing was measured, so that ranges are estimates.
    """

    kinds: Sequence[MeasuredCall]
    stated: Sequence[InputStatement]
    bounds: Sequence[Bounds]
    guessed: bool = False

    def state(self) -> list[MeasuredCall]:
        """Return the calls with measured ranges for choosing scale exponents, and the bounds noted beside
        them.
        """
        return [
            replace(kind, ranges=state_bounds(kind.ranges, found.ranges))
            for kind, found in zip(self.kinds, self.bounds, strict=True)
        ]

    def mix(self, bits: float) -> list[MeasuredCall]:
        """Return the calls with proven bounds in place of measured ranges where these cost at most
        `bits` of precision.

        A range whose bound is looser than that, or missing, is widened instead (`mix_ranges`).
        """
        return [
            replace(kind, ranges=mix_ranges(kind.ranges, found.ranges, bits))
            for kind, found in zip(self.kinds, self.bounds, strict=True)
        ]

    def describe(self, scaling: Scaling) -> Scaling:
        """Return a scaling that was solved for these calls with a sentence on how much is proven, and
        for which inputs.
        """
        rest = _MEASURED
        if self.guessed:
            scaling, rest = replace(scaling, measured_bits=None), _GUESSED
        elif scaling.measured_bits is not None:
            rest += f" and have {describe_least(scaling.measured_bits)}"
        said = [
            describe_share(scaling.values, scaling.bounded, rest, note_limits(self.stated)),
            *_describe_scores(self.bounds),
        ]
        limits, sizes = list_limits(self.stated), list_sizes(self.stated)
        return replace(scaling, range_note=" ".join(said), limits=limits, sizes=sizes)


def leave_unmeasured(
    calls: Sequence[tuple[Capture, tuple[Any, ...], Mapping[str, Any]]],
) -> list[MeasuredCall]:
    """Make calls for `bound_kinds` from captures and their arguments, without measured ranges."""
    return [MeasuredCall(x, split_values(x), {}, args, kwargs) for x, args, kwargs in calls]


def bound_kinds(
    module: torch.nn.Module,
    kinds: Sequence[MeasuredCall],
    load: Load | None = None,
    loose: Collection[str] = (),
    before: BoundedCalls | None = None,
    encoded: float = EMBEDDINGS,
) -> BoundedCalls:
    """Prove upper bounds of all activations and weights in calls; estimate ranges if no call was measured.

    Args:
        module: the module; if `load` is given, only its submodules and their attributes are used.
        kinds: captured calls, with or without measured ranges.
        load: returns a parameter or buffer by name; None uses the module's own.
        loose: names of parameters with the larger error allowance for fp16 subnormals.
        before: the result without loose parameters, or with another `encoded`.
        encoded: largest magnitude to assume for a text or image encoder's outputs.

    Cost: one pass over the weights for each kind; with `before`, over the affected ones only.
    """
    load = load or bring_home(partial(_load_own, name_parameters(module)))
    given, seen = [kind.call for kind in kinds], [kind.seen for kind in kinds]
    stated = state_calls(module, given, seen, encoded)
    bounds = []
    for number, (kind, one) in enumerate(zip(kinds, stated, strict=True)):
        known = None if before is None else before.bounds[number]
        capture, blocks = kind.capture, kind.blocks
        bounds.append(bound_call(capture, load, one.limits, blocks, loose, known))
    if is_guessed := not any(kind.ranges for kind in kinds):
        kinds = [_guess(kind, found) for kind, found in zip(kinds, bounds, strict=True)]
    return BoundedCalls(kinds, stated, bounds, is_guessed)


def _load_own(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return the tensor with a name; one that is still in a file is read in its stored dtype."""
    stored = find_stored(tensors[name])
    if stored is None:
        return tensors[name]
    return stored.read() if stored.folds else stored.values


def _guess(kind: MeasuredCall, found: Bounds) -> MeasuredCall:
    """Return a call that wasn't measured with estimated ranges: a few times the typical size behind
    each bound.

    An activation without a bound gets that of its inputs or 0.
    """
    capture, blocks = kind.capture, kind.blocks
    guessed: dict[str, tuple[Range, ...]] = {}
    for node in capture.graph.graph.nodes:
        if not is_float(node) or node.op == "output":
            continue
        parts = found.ranges.get(node.name)
        if parts is None:
            parts = (_guess_unbounded(node, guessed),) * (
                len(blocks[node]) if node in blocks else 1
            )
        elif node.name not in capture.parameters:
            parts = tuple(replace(x, amax=min(x.amax, PEAK * x.rms), certain=False) for x in parts)
        guessed[node.name] = parts
    return replace(kind, ranges=guessed)


def _guess_unbounded(node: Node, guessed: Mapping[str, tuple[Range, ...]]) -> Range:
    """Estimate the range of an activation without a bound: a sum is as large as its largest known term.

    Args:
        guessed: ranges of the nodes before it.
    """
    if not (is_kind(node, "add", "subtract", "cast") or has_trait(node, "rearranges")):
        return Range(0.0, 0.0, 0.0)
    parts = [x for source in node.all_input_nodes for x in guessed.get(source.name, ())]
    amax, rms = (max((getattr(x, size) for x in parts), default=0.0) for size in ("amax", "rms"))
    return Range(amax, rms, 0.0)


def state_bounds(measured: Ranges, bounds: Ranges) -> dict[str, tuple[Range, ...]]:
    """Return measured ranges with the proven bound of the same tensor noted in each, if there is one.

    Args:
        measured, bounds: map node names to a range for each block.
    """
    return {
        name: tuple(map(_add_bound, parts, bounds[name]))
        if len(bounds.get(name, ())) == len(parts)
        else tuple(replace(x, unbounded=True) for x in parts)
        for name, parts in measured.items()
    }


def mix_ranges(
    measured: Ranges, bounds: Ranges, loosest_bits: float
) -> dict[str, tuple[Range, ...]]:
    """Choose between measurement and proven bound for each tensor: the bound if it's at most some bits
    looser.

    Elsewhere the measured range is widened. Typical sizes stay the measured ones.

    Args:
        measured, bounds: map node names to a range for each block.
        loosest_bits: log2 of the largest ratio of bound to measurement at which the bound is used.
    """
    mixed = {}
    for name, parts in measured.items():
        stated = bounds.get(name)
        if stated is None or len(stated) != len(parts):
            mixed[name] = tuple(replace(_widen(x), unbounded=True) for x in parts)
        else:
            pairs = zip(parts, stated, strict=True)
            mixed[name] = tuple(_choose(seen, bound, loosest_bits) for seen, bound in pairs)
    return mixed


def _choose(seen: Range, bound: Range, loosest_bits: float) -> Range:
    if seen.amax > bound.amax:
        return _widen(seen)
    if log2_of(bound.amax) - log2_of(seen.amax) > loosest_bits:
        return _add_bound(_widen(seen), bound)
    return replace(seen, amax=bound.amax, certain=True, least_stored=bound.least_stored)


def _add_bound(seen: Range, bound: Range) -> Range:
    """Add the proven bound of a tensor to its measured range; leave out a bound that the range exceeds."""
    if seen.amax > bound.amax:
        return seen
    return replace(seen, bound=bound.amax, least_stored=bound.least_stored)


def _widen(seen: Range) -> Range:
    return replace(seen, amax=seen.amax * 2.0**CALIBRATED_BITS)


def find_uncertain(limits: Iterable[Limit], exponent: Callable[[int], int]) -> list[Limit]:
    """List the fp16 activations and weights that no proven bound keeps in range once they are scaled.

    Bounds include an allowance for subnormals that suffices only if the largest magnitude is not tiny
    after scaling. If it is, the tensor counts as uncertain. Operations that only move elements
    don't round.

    Args:
        exponent: maps an unknown to its exponent.
    """
    return [limit for limit in limits if not _is_certain(limit, exponent(limit.unknown))]


def _is_certain(limit: Limit, exponent: int) -> bool:
    """Return whether a proven bound, times `2**exponent`, is in fp16's range and its error allowances
    hold there.
    """
    seen = limit.range
    largest = seen.amax if limit.weight else seen.largest
    if not largest <= FP16.largest * 2.0**-exponent:
        return False
    is_bias = limit.weight > 0 and limit.place.endswith("bias")  # it rounds like its sum
    keeps = is_bias or limit.place.rpartition("(")[2].rstrip(")") in list_with("unrounded")
    return keeps or not 0 < largest * 2.0**exponent < seen.least_stored


_MEASURED = "the rest were measured"


_GUESSED = "the rest are estimated, and watched at run time"


def _describe_scores(bounds: Sequence[Bounds]) -> list[str]:
    beyond = (p for found in bounds for p, size in found.scores.items() if size > FP16.largest)
    if not (scores := sorted(set(beyond))):
        return []
    return [
        f"The scores of {len(scores)} attention layer{'s' * (len(scores) != 1)} may overflow if a "
        f"backend keeps them in fp16 (such as {scores[0]})."
    ]


def describe_share(values: int, bounded: int, rest: str = _MEASURED, limits: str = "") -> str:
    """Describe the proven share: `All 253 activations are certified.`, or less and the rest's evidence.

    Args:
        values, bounded: number of fp16 activations and weights, and of those that are proven.
        rest: evidence for the others.
        limits: the assumptions of the proof: `, for latents up to 64`.
    """
    if not values:
        return "No value is in fp16."
    if bounded == values:
        return f"All {values} activations are certified{limits}."
    return f"{describe_count(values, bounded)} are certified{limits}; {rest}."


Of = TypeVar("Of", int, tuple[int, int])


def describe_solution(problem: Problem, solution: Solution) -> Scaling:
    """Return a solver's solution as a `Scaling` record, with names of parameters and modules for
    unknowns.
    """

    def at(unknown: int) -> int:
        return solution.exponents[problem.system.find(unknown)]

    def room(limit: Limit) -> float:
        return headroom_bits(limit.range.amax, limit.dtype) - at(limit.unknown)

    folds = {name: at(unknown) for name, unknown in problem.parameters.items()}
    eps = {".".join(filter(None, key)): at(unknown) for key, unknown in problem.eps.items()}
    multiplies = {path: at(unknown) for path, unknown in problem.multiplies.items()}
    outputs = {number: at(unknown) for number, unknown in problem.outputs.items()}
    limits = problem.list_fp16_limits(solution.fp32_modules)
    headroom, tightest = min(((room(x), x.place) for x in limits), default=(None, ""))
    values, uncertain = len(limits), find_uncertain(limits, at)
    least, facts = min(map(room, uncertain), default=math.inf), problem.facts
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
        measured_bits=least if math.isfinite(least) else None,
        pinned={name: tuple(sorted(set(places))) for name, places in facts.pinned.items()},
        fp32_flops=sum(facts.flops.get(path, 0.0) for path in solution.fp32_modules),
        kept_buffers=tuple(sorted(facts.kept_buffers)),
        outputs=outputs,
        layers=_list_layers(facts, at),
        operands=_find_operands(facts, solution.fp32_modules),
    )


def _list_layers(facts: CallFacts, at: Callable[[int], int]) -> dict[str, tuple[int, int]]:
    """Return the scale exponents of input and output of the layers for which these are the same in
    every call.

    Args:
        at: maps an unknown to its exponent.
    """
    calls = {
        path: {(at(source), at(result)) for source, result in ends}
        for path, ends in facts.layers.items()
    }
    found = {path: ends.pop() for path, ends in calls.items() if len(ends) == 1}
    return {path: ends for path, ends in _join_columns(found).items() if ends != (0, 0)}


def _find_operands(facts: CallFacts, fp32_modules: tuple[str, ...]) -> Operands:
    """Return the casts for mixed-dtype code, and parameters that must be fp32 since fp32 modules use
    them.
    """
    guests = {name for path in fp32_modules for name in facts.guests.get(path, ())}
    return merge_operands(facts.operands, Operands(fp32_parameters=tuple(guests)))


def _join_columns(named: Mapping[str, Of]) -> dict[str, Of]:
    """Replace a weight's entries for blocks of columns, `name[:,0:64]`, by one entry `name` if all of
    them are equal.
    """
    values: dict[str, set[Of]] = {}
    for name, value in named.items():
        values.setdefault(split_fold_name(name)[0], set()).add(value)
    joined = {}
    for name, value in named.items():
        bare, place = split_fold_name(name)
        joined[bare if len(place) > 1 and len(values[bare]) == 1 else name] = value
    return joined


def _without_zeros(exponents: Mapping[str, int]) -> dict[str, int]:
    return {name: exponent for name, exponent in exponents.items() if exponent}
