"""Values that a plan can hold: what Stopdown writes lies within them, whoever sealed the file.

**Catches** exponents beyond fp32's own range, precisions and components that there are not, names that are
no path, blocks of rows that are none, shares and counts that are none.
**Does not catch** values in range that do not belong together: `apply_plan` compares what it folds with
the weights, and the guard watches the run.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from stopdown.number_formats import FORMATS
from stopdown.records import Accumulation, ComponentPlan, Plan, ResidualStream, Scaling

LARGEST_EXPONENT = 252
"""From fp32's smallest normal number, 2^-126, to beyond its largest, 2^127."""

MOST_OUTPUTS = 10**4
"""More than a component returns."""

_COMPONENT = re.compile(
    r"(?!__)[\w -]{1,100}(\.(?!__)[\w -]{1,100}){0,15}", re.ASCII
)  # a path in a program
_PATH = re.compile(r"[^\x00-\x1f\x7f./\\\[\]]{1,200}(\.[^\x00-\x1f\x7f./\\\[\]]{1,200}){0,63}")
_FOLD = re.compile(r"(?P<name>[^\[]+)(\[(:,)?(?P<start>\d{1,9}):(?P<stop>\d{1,9})\])?", re.ASCII)


def list_faults(plan: Plan) -> Iterator[str]:
    """What no plan holds, each as the part of a sentence."""
    if plan.precision not in FORMATS:
        yield f"the precision {plan.precision[:40]!r}"
    if not (0 <= plan.steps <= 10**6 and plan.elapsed_s >= 0):
        yield f"{plan.steps} steps in {plan.elapsed_s:g} s"
    names = [entry.component for entry in plan.components]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"the component {name[:40]!r} twice"
    for entry in plan.components:
        for fault in _list_entry(entry):
            yield f"{entry.component[:40]!r} with {fault}"


def _list_entry(entry: ComponentPlan) -> Iterator[str]:
    if not _COMPONENT.fullmatch(entry.component):
        yield "a name that is no component's"
    if entry.precision not in (*FORMATS, "as loaded"):
        yield f"the precision {entry.precision[:40]!r}"
    scaling = entry.scaling
    yield from _list_exponents(scaling)
    yield from _list_names(scaling)
    if not 0 <= scaling.fp32_flops <= 1:
        yield f"{scaling.fp32_flops:g} of its work in fp32"
    if scaling.headroom_bits is not None and not abs(scaling.headroom_bits) <= 512:
        yield f"{scaling.headroom_bits:g} bits of headroom"
    counts = (scaling.values, scaling.bounded, entry.calls, entry.prompts)
    if min(counts) < 0 or max(counts) > 2**53 or scaling.bounded > scaling.values:
        yield f"the counts {', '.join(str(count)[:20] for count in counts)}"
    yield from _list_limits(scaling)
    if entry.accumulation is not None:
        yield from _list_accumulation(entry.accumulation)


def _list_limits(scaling: Scaling) -> Iterator[str]:
    for name, limit in scaling.limits.items():
        if not (math.isfinite(limit) and limit >= 0):
            yield f"the limit {limit} of {name[:40]!r}"
    for name, sizes in scaling.sizes.items():
        if not all(0 <= x <= 2**53 for size in sizes for x in size):
            yield f"a size of {name[:40]!r} that no tensor has"


def _list_accumulation(accumulation: Accumulation) -> Iterator[str]:
    for path, terms in accumulation.fp16_sums.items():
        if not _PATH.fullmatch(path):
            yield f"the module {path[:40]!r}"
        if not 0 < terms <= 2**31:
            yield f"sums of {str(terms)[:20]} terms"


def _list_exponents(scaling: Scaling) -> Iterator[str]:
    outputs = {str(number): exponent for number, exponent in scaling.outputs.items()}
    inputs = {path: ends[0] for path, ends in scaling.layers.items()}
    results = {path: ends[1] for path, ends in scaling.layers.items()}
    for table in (scaling.exponents, scaling.eps, scaling.multiplies, outputs, inputs, results):
        for name, exponent in table.items():
            if abs(exponent) > LARGEST_EXPONENT:
                yield f"the exponent {str(exponent)[:20]} of {name[:40]!r}"
    for number in scaling.outputs:
        if not 0 <= number < MOST_OUTPUTS:
            yield f"the output {str(number)[:20]}"


def _list_names(scaling: Scaling) -> Iterator[str]:
    """Names that are no paths; the component itself is "" where a module is meant."""
    for name in scaling.exponents:
        if not _is_parameter(name):
            yield f"the parameter {name[:40]!r}"
    attributes = (*scaling.eps, *scaling.operands.fp32_parameters)
    for name in (*attributes, *(scaling.kept_buffers or ())):
        if not _PATH.fullmatch(name):
            yield f"the attribute {name[:40]!r}"
    for name in scaling.layers:
        if not _is_parameter(name):
            yield f"the layer {name[:40]!r}"
    modules = (*scaling.multiplies, *scaling.fp32_modules, *scaling.operands.cast_inputs)
    for name in (*modules, *_list_stream(scaling.stream)):
        if name and not _PATH.fullmatch(name):
            yield f"the module {name[:40]!r}"


def _is_parameter(name: str) -> bool:
    """Whether this is `path`, or `path[0:64]` or `path[:,0:64]`, rows or columns that are not empty."""
    fold = _FOLD.fullmatch(name)
    if fold is None or not _PATH.fullmatch(fold["name"]):
        return False
    return fold["start"] is None or int(fold["start"]) < int(fold["stop"])


def _list_stream(stream: ResidualStream | None) -> Iterator[str]:
    for field in dataclasses.fields(ResidualStream) if stream is not None else ():
        if field.name != "returns":
            yield from getattr(stream, field.name)
