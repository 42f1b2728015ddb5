"""Search for exponents that rest on proven bounds, with measured ranges where a bound is too loose.

All bounds are tried first, then fewer and fewer loose ones (`LOOSEST_BITS`). Beside measured ranges, a
solution is used if it has no more work in fp32 than theirs, and hardly lowers the typical sizes of weights
(`is_free`, `is_visible`). From the weights alone, the first without fp32 is used, or else that with the
least.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from stopdown.errors import ScalingError
from stopdown.fold_names import Folds, list_folds, split_fold_name
from stopdown.mapped_weights import Load
from stopdown.module_calls.call_inputs import is_encoded
from stopdown.scaling.bounds.input_limits import HIDDEN_STATES
from stopdown.scaling.bounds.propagation import LEAST_STORED_LOOSE
from stopdown.scaling.certificate import BoundedCalls, bound_kinds, leave_unmeasured
from stopdown.scaling.exponents.problem import VANISHING_BITS, MeasuredCall, measure_layers
from stopdown.scaling.exponents.solver import ASKED_BITS, CALIBRATED_BITS
from stopdown.scaling.folding.folds import read_headroom
from stopdown.scaling.graph.capture import Capture
from stopdown.scaling.graph.nodes import arguments, is_kind, strip_casts
from stopdown.scaling.graph.range_measurement import log2_of
from stopdown.scaling.trials.search import PostponedError, find_scaling, take_first
from stopdown.scaling_records import Scaling

LOOSEST_BITS = (math.inf, 40.0, 30.0, 24.0, 20.0, 17.0, 14.0, 11.0, 8.0, 5.0, 2.0)
"""Limits, in bits, on how far a bound may exceed the measured range and still be used; tried in this
order."""

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

Find = Callable[[torch.nn.Module, Sequence[MeasuredCall]], Scaling]


def scale_by_bounds(
    module: torch.nn.Module,
    kinds: Sequence[MeasuredCall],
    ranges: str,
    find: Find = find_scaling,
    find_in_fp16: Find | None = None,
) -> Scaling:
    """Find scale exponents that rest on proven bounds where possible, or only where these cost almost
    nothing.

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

        bounds = _list_bounds(module, bounded, narrow)
        return take_first(itertools.chain([lambda: best], bounds), does=does)

    bind = partial(bound_kinds, module, kinds, None)
    return _give_room(bind, bind(), search)


def scale_unmeasured(
    module: torch.nn.Module,
    calls: Sequence[tuple[Capture, tuple[Any, ...], Mapping[str, Any]]],
    load: Load,
    find: Callable[..., Scaling] = find_scaling,
    *,
    hands_over: bool = False,
) -> Scaling:
    """Find scale exponents from the weights alone, by proven bounds, without running the module.

    Typical sizes of activations are estimates. The result has the least work in fp32 and, among equals, the
    most bounds.

    Args:
        module: fake module; only its submodules and their attributes are used.
        calls: captures, each with the arguments that it was made with.
        load: returns a parameter or buffer by name.
        find: finds exponents for calls, as `find_scaling`.
        hands_over: an encoder of the pipeline returns hidden states, which no norm has made small.
            Outputs of encoders are then assumed to have any fp16 value, if exponents for that cost
            nothing.

    Cost: one or two passes over the weights for each call, and up to a dozen solutions after each.
    """

    def search(bounded: BoundedCalls) -> Scaling:
        return take_first(
            _list_bounds(module, bounded, partial(find, postpones=True)),
            does=lambda found: not found.fp32_modules,
            price=lambda found: (found.fp32_flops, len(found.fp32_modules)),
        )

    bind = partial(bound_kinds, module, leave_unmeasured(calls), load)
    bounded = bind()
    found = _give_room(bind, bounded, search)
    if not hands_over or not any(map(is_encoded, found.limits)):
        return found
    bind_wide = partial(bind, encoded=HIDDEN_STATES)
    with suppress(ScalingError):
        wide = _give_room(bind_wide, bind_wide(before=bounded), search)
        return min(wide, found, key=_price)
    return found


def _price(scaling: Scaling) -> tuple[float, ...]:
    """Return the cost of a scaling as a sort key; the lower one is preferred.

    In order: FLOPs and modules in fp32, multiplies, values without a bound, and bits scaled down.
    """
    lowest = min((entry for pair in scaling.layers.values() for entry in pair), default=0)
    rest = scaling.values - scaling.bounded
    return (scaling.fp32_flops, len(scaling.fp32_modules), len(scaling.multiplies), rest, -lowest)


def _give_room(
    bind: Callable[..., BoundedCalls],
    bounded: BoundedCalls,
    search: Callable[[BoundedCalls], Scaling],
) -> Scaling:
    """Search scale exponents with bounds; do it again with a larger error allowance for weights stored
    small.

    How small a weight is stored is known only with its exponent, which depends on the bounds. The second
    result is used if more of it is proven.

    Args:
        bind: computes bounds; given names of parameters and earlier bounds, with the larger allowance for
            these.
        bounded: bounds with the usual allowance.
        search: finds exponents with bounds.
    """
    found = search(bounded)
    low = [
        name
        for name, bits, _ in _list_stored(found, bounded.kinds)
        if name in found.uncertain and bits >= math.log2(LEAST_STORED_LOOSE)
    ]
    if low:
        with suppress(ScalingError):
            roomier = bind(low, bounded)
            other = search(roomier)
            if other.bounded > found.bounded and _is_as_narrow(other, found):
                return roomier.describe(other)
    return bounded.describe(found)


def _list_bounds(
    module: torch.nn.Module,
    bounded: BoundedCalls,
    find: Find,
) -> Iterator[Callable[[], Scaling]]:
    """Yield searches for exponents: with all proven bounds, then with fewer and fewer loose ones.

    Measured ranges replace the bounds that are left out.

    Args:
        find: finds exponents for calls.
    """
    before = None
    for bits in LOOSEST_BITS:
        calls = bounded.mix(bits)
        ranges = [call.ranges for call in calls]
        if ranges != before:  # else no bound is that loose
            yield partial(_find_wide, find, module, calls)
        before = ranges


def _find_wide(find: Find, module: torch.nn.Module, calls: Sequence[MeasuredCall]) -> Scaling:
    """Find scale exponents for calls whose measured ranges were widened by `CALIBRATED_BITS`; count
    these as headroom.
    """
    try:
        scaling = find_visible(find, module, calls)
    except PostponedError as postponed:
        later = postponed.go_on
        go_on = partial(_find_wide, lambda *_: later(), module, calls)
        raise PostponedError(go_on, postponed.can_beat) from None
    bits = scaling.measured_bits
    return replace(scaling, measured_bits=None if bits is None else bits + CALIBRATED_BITS)


def find_visible(find: Find, module: torch.nn.Module, calls: Sequence[MeasuredCall]) -> Scaling:
    """Find scale exponents by `find`; raise an error if they make parameters or activations vanish in fp16.

    Loose bounds could scale these so far down that fp16 rounds them to 0.

    Raises:
        ScalingError: if so, or if `find` raises it.
    """
    scaling, sizes = find(module, calls), measure_layers(calls)
    for path, pair in scaling.layers.items():
        for exponent, size in zip(pair, sizes[split_fold_name(path)[0]], strict=True):
            if exponent + log2_of(size) < VANISHING_BITS:
                raise ScalingError(
                    f"Its bounds are so loose that the values of {path} would vanish in fp16: they "
                    f"would be computed times 2**{exponent}, and those of size {size:.3g} would be 0 or "
                    "nearly so."
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
    """Yield the name of each parameter, the log2 of its largest magnitude after scaling, and its lowest
    scale exponent.
    """
    folds = list_folds(scaling.exponents)
    for call in calls:
        for node, name in call.capture.parameters.items():
            largest = max((part.amax for part in call.ranges.get(node, ())), default=0.0)
            fold = min((x for _, x in folds.get(name, ())), default=0)
            if largest > 0:
                yield name, log2_of(largest) + fold, fold


def is_visible(found: Scaling, best: Scaling, calls: Sequence[MeasuredCall]) -> bool:
    """Return whether a scaling with bounds has no more work in fp32 than the measured one, and loses
    few bits of weights.

    Args:
        found: with bounds.
        best: from measured ranges alone.
    """
    more = _measure_strain(found, calls) - _measure_strain(best, calls)
    return _is_as_narrow(found, best) and more <= MOST_STRAIN_BITS


def is_free(found: Scaling, best: Scaling, calls: Sequence[MeasuredCall]) -> bool:
    """Return whether a scaling with bounds costs almost nothing more than the measured one.

    It has no more work in fp32, at most one more multiply, and loses hardly any bits of weights and tables.

    Args:
        found: with bounds.
        best: from measured ranges alone.
    """
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
    """Return by how many bits scaled weights are too small for fp16's precision, in the mean over all
    weights.

    Biases are left out: the bits that they lose are below the last place of the sum to which they are
    added.
    """
    folds = list_folds(scaling.exponents)
    lost = [
        _measure_lost(folds, call, node)
        for call in calls
        for node, name in call.capture.parameters.items()
        if not name.endswith("bias")
    ]
    return sum(lost) / max(len(lost), 1)


def _measure_tables(scaling: Scaling, calls: Sequence[MeasuredCall]) -> float:
    """Return by how many bits the worst scaled embedding table is too small for fp16's precision."""
    tables = [
        (call, strip_casts(arguments(node)["weight"]).name)
        for call in calls
        for node in call.capture.graph.graph.nodes
        if is_kind(node, "table")
    ]
    folds = list_folds(scaling.exponents)
    lost = [_measure_lost(folds, x, node) for x, node in tables if node in x.capture.parameters]
    return max(lost, default=0.0)


def _measure_lost(folds: Mapping[str, Folds], call: MeasuredCall, node: str) -> float:
    sizes = [part.rms for part in call.ranges.get(node, ()) if part.rms > 0]
    exponents = [x for _, x in folds.get(call.capture.parameters[node], ())]
    if not sizes or not exponents:
        return 0.0
    return max(0.0, LOW_WEIGHT_BITS - min(exponents) - log2_of(min(sizes)))
