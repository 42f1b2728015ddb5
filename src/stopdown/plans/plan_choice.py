"""Whether a run has a plan, and which: one that was named, one that was kept, or one made now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stopdown.environment import Device, probe_formats
from stopdown.errors import OutputError, warn_user
from stopdown.pipelines.hub import Progress
from stopdown.pipelines.requests import Request
from stopdown.pipelines.sources import Source, fingerprint
from stopdown.plans.applier import check_source, load_planned
from stopdown.plans.certified import certify_plan
from stopdown.plans.plan_files import read_cached_plan, read_plan, write_cached_plan
from stopdown.plans.planned_loader import Loaded, decide, gather_facts, load_decided
from stopdown.plans.precision import explain_plan, parse_request
from stopdown.records import Plan


@dataclass(frozen=True)
class Chosen:
    """A plan, and what reasons call it."""

    plan: Plan
    name: str


def choose_loader(
    source: Source,
    precision: str,
    device: Device,
    *,
    request: Request | None = None,
    progress: Progress | None = None,
) -> Callable[..., Loaded]:
    """What loads a source in the precision that was asked for: call it with `progress`.

    Args:
        precision: `auto`, a precision, a list by component, or a plan's path that ends in `.json`.
        request: sizes and prompt of the run, for a plan that has to be made.

    Raises:
        OptionError: the precision is unknown or does not work here.
        PlanError: the plan is damaged or belongs to another checkpoint.
    """
    chosen = choose_plan(source, precision, device, request=request, progress=progress)
    if chosen is not None:
        return partial(load_planned, source, chosen.plan, chosen.name, device)
    decisions = decide(gather_facts(source), probe_formats(device), precision)
    return partial(load_decided, source, decisions, device)


def choose_plan(
    source: Source,
    precision: str,
    device: Device,
    *,
    request: Request | None = None,
    progress: Progress | None = None,
) -> Chosen | None:
    """Return the plan that was named, or that `auto` needs on this device; None if it needs none.

    `auto` wants fp16 on a device that computes fast in it and not in bf16.

    Raises:
        PlanError: the named plan is damaged or belongs to another checkpoint.

    Cost: the first time that a checkpoint is met here, `certify_plan`: one pass over the weights.
    """
    asked = parse_request(precision)
    if asked.plan is not None:
        named = read_plan(asked.plan)
        check_source(named, source)
        return Chosen(named, Path(asked.plan).name)
    if not asked.is_auto or device.type == "cpu":
        return None
    why = explain_plan(gather_facts(source), probe_formats(device))
    if not why:
        return None
    plan = read_cached_plan(fingerprint(source))
    if plan is None:
        plan = certify_plan(
            source, residual="fp32", device=device, request=request, progress=progress
        )
        try:
            write_cached_plan(plan)
        except OutputError as error:
            warn_user(f"The plan was not kept for the next run. {error.what}")
    return Chosen(plan, f"a plan of its own, because {why}")
