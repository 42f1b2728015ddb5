"""Repairs as the new entry of a plan.

**Catches** exponents, fp32 modules and casts that a guard put on.
**Does not catch** casts of inputs, which depend on what a script hands over; ranges of the calls that the
plan was measured on: a plan holds what was solved, not what was seen. An updated plan is watched like any
other, and repaired again where that is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from stopdown.component_call_names import split_module_path
from stopdown.plans.calibrated import describe_scaling
from stopdown.records import ComponentPlan, Scaling
from stopdown.runtime.repairs import name_action

_NOT_BOUNDED = "Its bounds did not hold in a run, so it is no longer certified."


def update_entry(
    entry: ComponentPlan, applied: tuple[ComponentPlan, ...], calls: int, reasons: Iterable[str]
) -> ComponentPlan:
    """A plan's entry with the repairs that are in force in its place.

    Args:
        calls: how many failing calls new exponents rest on.
    """
    bare = dataclasses.replace(entry, scaling=None, calls=0, prompts=0, reasons=())
    found = dataclasses.replace(bare, prompts=entry.prompts)
    notes = tuple(reasons)
    for one in applied:
        action = name_action(one)
        if action == "rescaled" and one.scaling is not None:
            scaling = _withdraw_claims(one.scaling)
            found = describe_scaling(found, scaling, one.precision, entry.calls + calls, notes)
        elif action == "cast":
            found = dataclasses.replace(bare, precision=one.precision, reasons=notes)
        elif action == "fp32-module":
            scaling, path = found.scaling or Scaling(), split_module_path(one.component)[1]
            fp32_modules = tuple(dict.fromkeys((*scaling.fp32_modules, path)))
            scaling = dataclasses.replace(scaling, fp32_modules=fp32_modules)
            said = tuple(dict.fromkeys((*found.reasons, *notes)))
            found = dataclasses.replace(found, scaling=scaling, reasons=said)
    return found


def _withdraw_claims(scaling: Scaling) -> Scaling:
    """Exponents under which a call failed, or that were found since: no bound or trial speaks for them.

    The limits of the inputs stay: calls beyond them are still named.
    """
    note = _NOT_BOUNDED if scaling.certified or scaling.bounded else scaling.range_note
    return dataclasses.replace(
        scaling, certified=False, values=0, bounded=0, uncertain=(), trial=None, range_note=note
    )
