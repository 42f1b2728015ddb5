"""What running out of memory taught, kept in a plan for the next run.

An entry counts where the same may happen again: on the same device, within the same limit or a
smaller one, for the same size or a larger one. Then the strategies that failed are passed over, with
all that are predicted to take as much.
"""

from __future__ import annotations

import dataclasses

from stopdown.plans.plan_files import seal_plan
from stopdown.records import OutOfMemory, Plan

MOST_KEPT = 16
"""Entries that a plan holds; the oldest go first."""


def find_failed(plan: Plan | None, device: str, limit_bytes: int, pixels: int) -> tuple[str, ...]:
    """Strategies that have run out of memory where this run would be no smaller.

    Args:
        device: where it is to run.
        limit_bytes: what it is to stay within.
        pixels: frames times height times width.
    """
    names = [
        name
        for entry in (plan.out_of_memory if plan is not None else ())
        if entry.device == device and limit_bytes <= entry.limit_bytes and pixels >= entry.pixels
        for name in entry.failed
    ]
    return tuple(dict.fromkeys(names))


def add_out_of_memory(plan: Plan, entry: OutOfMemory) -> Plan:
    """The plan with one more entry, sealed."""
    kept = [one for one in plan.out_of_memory if one != entry]
    return seal_plan(dataclasses.replace(plan, out_of_memory=(*kept, entry)[-MOST_KEPT:]))
