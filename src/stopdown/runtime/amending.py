"""Repairs and plans: a plan's entry as what is in force from the start, and repairs as its new entry.

**Catches** exponents, islands and casts that a guard put on.
**Does not catch** ranges of the calls that the plan was measured on: a plan holds what was solved, not
what was seen. An amended plan is watched like any other, and repaired again where that is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from stopdown.planning.applying import read_scaling
from stopdown.planning.plans import describe_scaling
from stopdown.records import ComponentPlan
from stopdown.runtime.repairs import Applied


def prescribe(entry: ComponentPlan) -> tuple[Applied, ...]:
    """A plan's entry as what is in force on its component."""
    if entry.precision == "as loaded":
        return ()
    if entry.precision == "fp16":
        return (Applied("rescaled", "fp16", scaling=read_scaling(entry)),)
    return (Applied("cast", entry.precision),)


def amend_entry(
    entry: ComponentPlan, applied: tuple[Applied, ...], calls: int, reasons: Iterable[str]
) -> ComponentPlan:
    """A plan's entry with the repairs that are in force in its place.

    Args:
        applied: all that is in force on the component.
        calls: how many failing calls new exponents rest on.
        reasons: why, in whole sentences.
    """
    bare = ComponentPlan(entry.component, entry.class_name, entry.weights, entry.precision)
    found = dataclasses.replace(bare, prompts=entry.prompts)
    notes = tuple(reasons)
    for one in applied:
        if one.scaling is not None:
            measured = entry.calls + calls
            found = describe_scaling(found, one.scaling, one.precision, measured, notes)
        elif one.action == "cast":
            found = dataclasses.replace(bare, precision=one.precision, reasons=notes)
        else:
            islands = tuple(dict.fromkeys((*found.islands, one.path)))
            found = dataclasses.replace(found, islands=islands, reasons=(*found.reasons, *notes))
    return found
