"""Ranges that rest on bounds, on measurements, or on each where it is better; and what is certified.

A bound holds for every input, so exponents that fit it never overflow. Where a bound is much looser
than what was measured (a group norm over a whole video), taking it would cost precision: `auto` takes
it only where exponents stay about what measured ranges give, and keeps `CALIBRATED_BITS` more above
what it measured elsewhere. `docs/certificates.md` has the argument.

**Catches** by what a value's range is stated, and whether it is stored where the bound's room for
rounding is enough.
**Does not catch** inputs beyond the limits that the note names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from stopdown.bounds.input_limits import Stated, list_limits, note_limits, state_calls
from stopdown.bounds.propagation import (
    LEAST_STORED,
    LEAST_STORED_WEIGHT,
    Bounds,
    Load,
    bound_call,
)
from stopdown.errors import OptionError, ScalingError
from stopdown.graph.blocks import Blocks
from stopdown.graph.capture import Capture, name_parameters
from stopdown.graph.nodes import is_float
from stopdown.graph.operations import list_with
from stopdown.graph.ranges import Range, Ranges, log2_of
from stopdown.number_formats import FP16
from stopdown.records import Scaling
from stopdown.scaling.folds import read_headroom
from stopdown.scaling.problem import Measured, Problem, split_values

RANGES = ("measured", "bound", "auto")
"""What the exponents of a component can rest on."""

CALIBRATED_BITS = 4.0
"""Headroom over what was measured, where a bound is not taken although there are bounds."""

LOOSEST_BITS = (math.inf, 40.0, 30.0, 24.0, 20.0, 17.0, 14.0, 11.0, 8.0, 5.0, 2.0)
"""How much looser than measured a bound may be, tried one after the other."""

LOW_WEIGHT_BITS = -12.0
"""A weight of typical size below this loses bits in fp16."""

PEAK = 8.0
"""Largest over typical size of a value that was not measured."""

MORE_STRAIN_BITS = 0.05
"""What bounds may cost: bits that are lost so, in the mean over the weights. A tenth of a bit shows in
the output (a CogVideoX 9 % further from fp32, a Wan 25 %), a twentieth does not."""

MOST_STRAIN_BITS = 0.5
"""The same where bounds are asked for: beyond it fp16 falls behind bf16."""

MORE_MULTIPLIES = 1
"""What bounds may cost besides: one output of a module multiplied, which no bit is lost by."""

VANISHING_BITS = -22
"""A parameter whose largest value is stored below 2 to this has two bits left in fp16, or none."""

Find = Callable[[torch.nn.Module, Sequence[Measured]], Scaling]


@dataclass(frozen=True)
class Kind:
    """A captured and measured call, and the arguments that it was captured with."""

    measured: Measured
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def call(self) -> tuple[Capture, tuple[Any, ...], Mapping[str, Any]]:
        """The capture with its arguments."""
        return self.measured.capture, self.args, self.kwargs

    @property
    def seen(self) -> dict[str, float]:
        """Placeholder name of each input to the largest magnitude that was measured."""
        ranges = self.measured.ranges
        inputs = [name for name in self.measured.capture.inputs if name in ranges]
        return {name: max(part.amax for part in ranges[name]) for name in inputs}


def check_ranges(ranges: str | None) -> str:
    """`measured`, `bound` or `auto`.

    Raises:
        OptionError: it is none of them.
    """
    if ranges is None or ranges in RANGES:
        return ranges or "measured"
    raise OptionError(
        f"Ranges were asked for as {ranges!r}.",
        expected=f"They are one of {', '.join(RANGES)}.",
        remedy="Use ranges='auto', or leave it out.",
    )


def scale_by_bounds(
    module: torch.nn.Module, kinds: Sequence[Kind], ranges: str, find: Find
) -> Scaling:
    """Exponents that rest on bounds: wherever there are some, or where they cost nothing.

    Args:
        kinds: what was captured and measured.
        ranges: `bound` or `auto`.
        find: finds exponents for calls.

    Raises:
        ScalingError: there are none.

    Cost: one pass over the weights for each kind, and up to a dozen solutions.
    """
    find = partial(_find_visible, find)
    named = name_parameters(module)
    stated = state_calls(module, [kind.call for kind in kinds], [kind.seen for kind in kinds])
    bounds = [
        bound_call(kind.measured.capture, named.__getitem__, one.limits, kind.measured.blocks)
        for kind, one in zip(kinds, stated, strict=True)
    ]
    mixes = [_mix_all(kinds, bounds, bits) for bits in LOOSEST_BITS]
    plain = [kind.measured for kind in kinds]
    scaling, taken = _find_most(module, plain, mixes, find, free=ranges == "auto")
    if not taken:
        return replace(scaling, values=0, bounded=0, uncertain=(), range_note=_NONE_TAKEN)
    return _describe(scaling, stated, bounds)


def _find_visible(find: Find, module: torch.nn.Module, calls: Sequence[Measured]) -> Scaling:
    """As `find`, refused where bounds are so loose that parameters would vanish in fp16.

    Raises:
        ScalingError: there are no exponents, or they would round a whole parameter away.
    """
    scaling = find(module, calls)
    for call in calls:
        for node, name in call.capture.parameters.items():
            largest = max((part.amax for part in call.ranges.get(node, ())), default=0.0)
            folds = [e for n, e in scaling.exponents.items() if n.partition("[")[0] == name]
            if largest > 0 and folds and log2_of(largest) + min(folds) < VANISHING_BITS:
                raise ScalingError(
                    f"Its bounds are so loose that {name} would vanish in fp16: it is at most "
                    f"{largest:.3g}, and would be stored times 2**{min(folds)}."
                )
    return scaling


def _mix_all(kinds: Sequence[Kind], bounds: Sequence[Bounds], bits: float) -> list[Measured]:
    return [
        replace(kind.measured, ranges=mix_ranges(kind.measured.ranges, found.ranges, bits))
        for kind, found in zip(kinds, bounds, strict=True)
    ]


def scale_unmeasured(
    module: torch.nn.Module,
    calls: Sequence[tuple[Capture, tuple[Any, ...], Mapping[str, Any]]],
    load: Load,
    find: Find,
) -> Scaling:
    """Exponents from the weights alone: no value was measured, typical sizes are guessed.

    Args:
        module: fake; only its modules and their attributes are looked at.
        calls: captured calls and the arguments that they were captured with.
        load: gives a parameter or buffer by name.

    Raises:
        ScalingError: there are none.

    Cost: one pass over the weights for each call, and up to a dozen solutions.
    """
    find = partial(_find_visible, find)
    stated, kinds, bounds = state_calls(module, calls), [], []
    for (capture, args, kwargs), one in zip(calls, stated, strict=True):
        blocks = split_values(capture)
        bounds.append(bound_call(capture, load, one.limits, blocks))
        ranges = _guess_ranges(capture, bounds[-1], blocks)
        kinds.append(Kind(Measured(capture, blocks, ranges), args, kwargs))
    mixes = [_mix_all(kinds, bounds, bits) for bits in LOOSEST_BITS]
    scaling = _find_narrowest(module, mixes, find)
    return _describe(scaling, stated, bounds, _GUESSED)


def _guess_ranges(
    capture: Capture, found: Bounds, blocks: Mapping[Node, Blocks]
) -> dict[str, tuple[Range, ...]]:
    """Stand-ins for what was not measured: a few times the typical size; 0 for what is unknown."""
    guessed: dict[str, tuple[Range, ...]] = {}
    for node in capture.graph.graph.nodes:
        if not is_float(node) or node.op == "output":
            continue
        parts = found.ranges.get(node.name)
        if parts is None:
            parts = (Range(0.0, 0.0, 0.0),) * (len(blocks[node]) if node in blocks else 1)
        elif node.name not in capture.parameters:
            parts = tuple(replace(x, amax=min(x.amax, PEAK * x.rms), certain=False) for x in parts)
        guessed[node.name] = parts
    return guessed


def _find_narrowest(
    module: torch.nn.Module, mixes: Sequence[Sequence[Measured]], find: Find
) -> Scaling:
    """The exponents with the most bounds that leave the least in fp32."""
    best: Scaling | None = None
    for mixed in mixes:
        try:
            found = find(module, mixed)
        except ScalingError:
            continue
        if best is None or (found.fp32_flops, len(found.fp32_modules)) < (
            best.fp32_flops,
            len(best.fp32_modules),
        ):
            best = found
        if not found.fp32_modules:
            return found
    return best if best is not None else find(module, mixes[0])


def _find_most(
    module: torch.nn.Module,
    plain: Sequence[Measured],
    mixes: Sequence[Sequence[Measured]],
    find: Find,
    *,
    free: bool,
) -> tuple[Scaling, bool]:
    """The exponents with the most bounds that need no more fp32, or cost no more in any way.

    And whether there are any: else those are given that rest on measurements.
    """
    best = find(module, plain)
    for mixed in mixes:
        try:
            found = find(module, mixed)
        except ScalingError:
            continue
        if _is_free(found, best, plain) if free else _is_visible(found, best, plain):
            return found, True
    return best, False


def _is_as_narrow(found: Scaling, best: Scaling) -> bool:
    few = len(found.fp32_modules) <= len(best.fp32_modules)
    return few and found.fp32_flops <= best.fp32_flops


def _is_visible(found: Scaling, best: Scaling, calls: Sequence[Measured]) -> bool:
    """No more in fp32, and weights keep most of their bits."""
    more = _measure_strain(found, calls) - _measure_strain(best, calls)
    return _is_as_narrow(found, best) and more <= MOST_STRAIN_BITS


def _is_free(found: Scaling, best: Scaling, calls: Sequence[Measured]) -> bool:
    """No more in fp32, a multiply more at most, about as many bits of weights lost, a bit to spare."""
    more = _measure_strain(found, calls) - _measure_strain(best, calls)
    return (
        _is_as_narrow(found, best)
        and len(found.multiplies) <= len(best.multiplies) + MORE_MULTIPLIES
        and read_headroom(found) >= min(1.0, read_headroom(best))
        and more <= MORE_STRAIN_BITS
    )


def _measure_strain(scaling: Scaling, calls: Sequence[Measured]) -> float:
    """Bits by which the typical sizes of folded weights lie too low, in the mean.

    Biases are left out: what they lose is below the last place of the sum that they are added to.
    """
    lost, count = 0.0, 0
    for call in calls:
        for node, name in call.capture.parameters.items():
            if name.endswith("bias"):
                continue
            sizes = [part.rms for part in call.ranges.get(node, ()) if part.rms > 0]
            folds = [e for n, e in scaling.exponents.items() if n.partition("[")[0] == name]
            count += 1
            if sizes and folds:
                lost += max(0.0, LOW_WEIGHT_BITS - min(folds) - log2_of(min(sizes)))
    return lost / max(count, 1)


def mix_ranges(
    measured: Ranges, bounds: Ranges, loosest_bits: float
) -> dict[str, tuple[Range, ...]]:
    """Bounds where they are there and no looser than this, else what was measured with room.

    Typical sizes are those that were measured.
    """
    mixed = {}
    for name, parts in measured.items():
        stated = bounds.get(name)
        if stated is None or len(stated) != len(parts):
            mixed[name] = tuple(map(_widen, parts))
        else:
            pairs = zip(parts, stated, strict=True)
            mixed[name] = tuple(_choose(seen, bound, loosest_bits) for seen, bound in pairs)
    return mixed


def _choose(seen: Range, bound: Range, loosest_bits: float) -> Range:
    if seen.amax > bound.amax or log2_of(bound.amax) - log2_of(seen.amax) > loosest_bits:
        return _widen(seen)
    return replace(seen, amax=bound.amax, certain=True)


def _widen(seen: Range) -> Range:
    return replace(seen, amax=seen.amax * 2.0**CALIBRATED_BITS)


def find_uncertain(
    problem: Problem, exponent: Callable[[int], int], fp32_modules: Sequence[str]
) -> tuple[int, tuple[str, ...]]:
    """How many fp16 values there are, and the places of those that rest on no bound.

    A bound has room for what is subnormal only where the value's largest is not tiny as it is
    stored; it counts as uncertain otherwise, and so does a weight. What only moves values rounds none.
    """
    count, uncertain = 0, []
    for limit in problem.limits:
        if limit.dtype != torch.float16 or set(limit.interiors) & set(fp32_modules):
            continue
        stored = limit.range.amax * 2.0 ** exponent(limit.unknown)
        is_bias = limit.weight > 0 and limit.place.endswith("bias")  # rounds as what it is added to
        keeps = is_bias or limit.place.rpartition("(")[2].rstrip(")") in list_with("unrounded")
        least = LEAST_STORED_WEIGHT if limit.weight else LEAST_STORED
        count += 1
        if not (limit.range.certain or limit.weight) or (0 < stored < least and not keeps):
            uncertain.append(limit.place)
    return count, tuple(uncertain)


_NONE_TAKEN = (
    "No bound is taken: each choice of them would cost precision, multiplies or fp32. Every fp16 value "
    "rests on what was measured."
)
_MEASURED = f"the rest calibrated with {CALIBRATED_BITS:g} bits of headroom"
_GUESSED = (
    "the rest guessed: measure it, stopdown plan SOURCE --ranges auto, or let the guard watch it"
)


def _describe(
    scaling: Scaling, stated: Sequence[Stated], bounds: Sequence[Bounds], rest: str = _MEASURED
) -> Scaling:
    share = describe_share(scaling.values, scaling.bounded, rest, note_limits(stated))
    scores = sorted(
        {p for found in bounds for p, size in found.scores.items() if size > FP16.largest}
    )
    said = [share]
    if scores:
        said.append(
            f"The scores of {len(scores)} attention{'s' * (len(scores) != 1)} can leave fp16 where a "
            f"backend keeps them in it ({scores[0]})."
        )
    return replace(scaling, range_note=" ".join(said), limits=list_limits(stated))


def describe_share(values: int, bounded: int, rest: str = _MEASURED, limits: str = "") -> str:
    """`100 % of 253 fp16 values certified.`, or what share and what the rest rests on.

    Args:
        limits: `, for latents up to 64`: what the certificate assumes.
    """
    if not values:
        return "No value is in fp16."
    if bounded == values:
        return f"100 % of {values} fp16 values certified{limits}."
    share = math.floor(1000 * bounded / values) / 10
    return f"{share:g} % of {values} fp16 values certified{limits}; {rest}."
