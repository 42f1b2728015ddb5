"""What running out of memory taught, kept in a plan for the next run.

A lesson holds where it may teach again: on the same device, within the same limit or a smaller one, for
the same size or a larger one. Then the strategies that failed are passed over, with all that are
predicted to take as much.
"""

from __future__ import annotations

import dataclasses

from stopdown.plans.plan_files import seal_plan
from stopdown.records import MemoryLesson, Plan

MOST_LESSONS = 16
"""Lessons that a plan holds; the oldest go first."""


def find_failed(plan: Plan | None, device: str, limit_bytes: int, pixels: int) -> tuple[str, ...]:
    """Strategies that have run out of memory where this run would be no smaller.

    Args:
        device: where it is to run.
        limit_bytes: what it is to stay within.
        pixels: frames times height times width.
    """
    names = [
        name
        for lesson in (plan.lessons if plan is not None else ())
        if lesson.device == device and limit_bytes <= lesson.limit_bytes and pixels >= lesson.pixels
        for name in lesson.failed
    ]
    return tuple(dict.fromkeys(names))


def add_lesson(plan: Plan, lesson: MemoryLesson) -> Plan:
    """The plan with one more lesson, sealed."""
    kept = [one for one in plan.lessons if one != lesson]
    return seal_plan(dataclasses.replace(plan, lessons=(*kept, lesson)[-MOST_LESSONS:]))
