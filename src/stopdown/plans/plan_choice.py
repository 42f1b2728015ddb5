"""Whether a run has a plan, and which: one that was named, one that was kept, or one made now."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stopdown.component_calls.call import ComponentCall
from stopdown.devices.environment import Device, probe_formats
from stopdown.errors import OutputError, PlanError, warn_user
from stopdown.pipelines.requests import Request
from stopdown.plans.applier import check_source, load_planned
from stopdown.plans.certified import certify_plan
from stopdown.plans.plan_files import (
    describe_no_plan,
    read_cached_plan,
    read_plan,
    seal_plan,
    write_cached_plan,
)
from stopdown.plans.planned_loader import (
    Loaded,
    decide,
    gather_facts,
    load_decided,
    widest_by_component,
)
from stopdown.plans.precision import (
    PLAIN_FP16,
    explain_plan,
    leave_components,
    list_rescaled,
    parse_request,
)
from stopdown.records import Plan
from stopdown.sources.hub import PLAN_BESIDE, Progress
from stopdown.sources.sources import Source, fingerprint, narrow_source


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
    """Return the plan that was named, or that a precision needs on this device; None if it needs none.

    `fp16` always needs one. So does `auto` on a device that computes fast in fp16 and not in bf16.

    Raises:
        OptionError: the precision is unknown or does not work here.
        PlanError: the named plan is damaged or belongs to another checkpoint.

    Cost: the first time that a checkpoint is met here, `certify_plan`: one pass over the weights.
    """
    asked = parse_request(precision)
    if asked.plan is not None:
        named = read_plan(asked.plan)
        check_source(named, source)
        return Chosen(named, Path(asked.plan).name)
    facts, supports = gather_facts(source), probe_formats(device)
    why, others = "fp16 was requested", dict[str, str]()
    if asked.is_auto:
        why = "" if device.type == "cpu" else explain_plan(facts, supports)
    else:
        calls = {entry.name: entry.calls for entry in facts}
        rescaled = list_rescaled(asked, calls)
        formats = widest_by_component(decide(facts, supports, precision))
        plain = {name for name, word in asked.parts.items() if word == PLAIN_FP16}
        others = {
            name: PLAIN_FP16 if name in plain else entry
            for name, entry in formats.items()
            if name not in rescaled
        }
        why = why if rescaled else ""
    if not why:
        return None
    plan = find_or_certify(source, device, request=request, progress=progress, others=others)
    return Chosen(plan, f"a plan of its own, because {why}")


def find_or_certify(
    source: Source,
    device: Device,
    *,
    request: Request | None = None,
    progress: Progress | None = None,
    others: Mapping[str, str] | None = None,
    only: Collection[str] = (),
    calls: Mapping[str, list[ComponentCall]] | None = None,
) -> Plan:
    """Return the plan that lies beside a model, or was kept for it, or one that is certified now and kept.

    Args:
        others: component to the precision that it has in place of its own.
        only: components that are planned; none for all.
        calls: of each component, where no pipeline makes them.

    Warns:
        StopdownWarning: the plan beside the model is not for these weights and these versions; the plan was
            not kept.

    Cost: the first time that a checkpoint is met here, `certify_plan`: one pass over the weights.
    """
    found = _read_plan_beside(source, only) or read_cached_plan(
        fingerprint(narrow_source(source, only))
    )
    if found is None:
        made = certify_plan(
            source,
            precision=",".join(f"{name}={x}" for name, x in (others or {}).items()) or "fp16",
            residual="fp32",
            device=device,
            request=request,
            progress=progress,
            only=only,
            calls=calls,
        )
        if not others:
            _keep(made)
        return made
    if others:
        kept = tuple(leave_components(found.components, others))
        return seal_plan(dataclasses.replace(found, components=kept))
    return found


def _read_plan_beside(source: Source, only: Collection[str]) -> Plan | None:
    """Return the plan in the folder of a model, if it belongs to what lies there."""
    path = source.path / PLAN_BESIDE
    if source.kind == "file" or not path.is_file() or describe_no_plan(path):
        return None  # a converted model's record has that name as well
    try:
        plan = read_plan(path)
        check_source(plan, source)
    except PlanError as error:
        warn_user(f"{path} is not used, and a plan is made instead. {error.what}")
        return None
    entries = tuple(x for x in plan.components if not only or x.component in only)
    return dataclasses.replace(plan, components=entries)


def _keep(plan: Plan) -> None:
    try:
        write_cached_plan(plan)
    except OutputError as error:
        warn_user(f"The plan was not kept for the next run. {error.what}")
