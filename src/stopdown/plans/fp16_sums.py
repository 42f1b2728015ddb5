"""Which linear layers of a plan sum in fp16: those whose sums cannot leave it, and lose no more than bf16.

Where fp16 sums are twice as fast (consumer cards), no source says when they are safe. A bound of the
output of a linear layer is one of each of its partial sums, in any order; roundings on the way make them
larger by a factor that depends on their number alone (`bound_rounded_sum`). What they lose grows
with the length: m independent roundings of 2**-11 are off by their root, so 64 of them, `LONGEST` terms,
by 2**-8, as one of bf16. Longer sums are summed in pieces, and the pieces in fp32.

**Catches** overflow on the way, for every input within the limits of the certificate.
**Does not catch** sums whose roundings all go one way (at most m times 2**-11 of the largest partial sum),
kernels that round after fewer than 16 products, attention, convolutions and plain matrix products:
they stay in fp32.
"""

from __future__ import annotations

import dataclasses
import math

from stopdown.errors import OptionError
from stopdown.interception.accumulation import GROUP, bound_rounded_sum
from stopdown.number_formats import FP16
from stopdown.plans.plan_files import seal_plan
from stopdown.records import Accumulation, ComponentPlan, Plan, Scaling, SumBound

MODES = ("auto", "fp32", "fp16")

LONGEST = 1024
"""Terms of a sum in fp16 that is expected to be no further off than 2**-8 of its size."""


def choose_sums(plan: Plan, mode: str) -> Plan:
    """The same plan with its sums as asked for, sealed.

    Args:
        plan: what of it rests on no bound is summed in fp32, and its reasons say so.
        mode: `auto`: in fp16 where that is safe, in pieces of at most `LONGEST` terms. `fp16`: where it is
            safe, in one piece if a whole sum is. `fp32`: nowhere.
    """
    if mode not in MODES:
        raise OptionError(
            f"The mode of sums {mode!r} is unknown.",
            expected=f"Known values are {', '.join(MODES)}.",
            remedy='Use "auto".',
        )
    entries = tuple(_choose(x, mode) if x.precision == "fp16" else x for x in plan.components)
    return seal_plan(dataclasses.replace(plan, components=entries))


def _choose(entry: ComponentPlan, mode: str) -> ComponentPlan:
    before = entry.accumulation or Accumulation()
    found = (
        {p: find_terms(x, mode) for p, x in entry.in_force.sums.items()} if mode != "fp32" else {}
    )
    taken = {path: terms for path, terms in found.items() if terms}
    made = dataclasses.replace(before, fp16_accumulation=False, fp16_sums=taken)
    return dataclasses.replace(
        entry, accumulation=made, reasons=(*entry.reasons, _describe(entry, taken, mode))
    )


def find_terms(bound: SumBound, mode: str) -> int:
    """How many terms of a layer may be summed in fp16 at a time; 0 for none."""
    pieces = math.ceil(bound.terms / LONGEST)
    piece = GROUP * math.ceil(bound.terms / pieces / GROUP)
    lengths = (bound.terms, piece) if mode == "fp16" else (min(piece, bound.terms),)
    if bound.largest is None:
        return 0
    return next((x for x in lengths if bound_rounded_sum(bound.largest, x) <= FP16.largest), 0)


def list_refused(entry: ComponentPlan) -> dict[str, str]:
    """Path of each linear layer that is summed in fp32 to the reason."""
    taken = entry.accumulation.fp16_sums if entry.accumulation is not None else {}
    return {
        path: "its sums rest on no bound"
        if bound.largest is None
        else f"its sums may reach {bound_rounded_sum(bound.largest, min(bound.terms, LONGEST)):.4g}"
        for path, bound in entry.in_force.sums.items()
        if path not in taken
    }


def describe_whole_sums(scaling: Scaling) -> str:
    """What exponents promise where a program sums every product in fp16; "" without a bound of a sum.

    A file cannot say which layers are summed in fp16, or in pieces: a whole sum has to fit.
    """
    if not scaling.sums:
        return ""
    whole = [path for path, x in scaling.sums.items() if find_terms(x, "fp16") == x.terms]
    other = next((path for path in scaling.sums if path not in whole), "")
    return (
        "If a program sums in fp16, as ComfyUI with fp16_accumulation, bounds keep the sums of "
        f"{len(whole)} of its {len(scaling.sums)} linear layers in range"
        f"{f', but not those of {other}' if other else ''}. For sums of convolutions and attention there "
        "is no bound."
    )


def _describe(entry: ComponentPlan, taken: dict[str, int], mode: str) -> str:
    total = len(entry.in_force.sums)
    if mode == "fp32":
        return "Its products are summed in fp32."
    if not total:
        return "Its products are summed in fp32: it has no linear layer in fp16 whose sums are bounded."
    pieces = sum(terms < entry.in_force.sums[path].terms for path, terms in taken.items())
    said = f"{len(taken)} of its {total} linear layers are summed in fp16"
    said += (
        f", {pieces} of them in pieces of at most {max(taken.values())} terms." if pieces else "."
    )
    refused = list_refused(dataclasses.replace(entry, accumulation=Accumulation(fp16_sums=taken)))
    path, why = next(iter(refused.items()), ("", ""))
    return f"{said} {len(refused)} are not, as {path}: {why}." if refused else said
