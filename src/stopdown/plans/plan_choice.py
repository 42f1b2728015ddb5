"""Choose the plan by which a model runs: a named one, a cached one, one made now, or precisions without
exponents.

Components of a model on the Hub are certified while the others are still downloaded
(`certified_on_arrival`).

Not covered while it is downloaded: single files, LoRAs, and models whose headers cannot be read from the
Hub.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from stopdown.devices.device_choice import Device
from stopdown.devices.format_support import probe_formats
from stopdown.errors import PlanError, warn_user
from stopdown.pipelines.class_selection import select_class
from stopdown.pipelines.requests import Request
from stopdown.plans.applier import check_source
from stopdown.plans.certified import Scope, certify_plan, list_planned
from stopdown.plans.certifier import WORTH_BYTES, Certifier
from stopdown.plans.plan_files import (
    describe_no_plan,
    keep_plan,
    read_cached_plan,
    read_plan,
    seal_plan,
)
from stopdown.plans.planned_loader import (
    decide,
    gather_facts,
    widest_by_component,
)
from stopdown.plans.precision import (
    PLAIN_FP16,
    ComponentFacts,
    choose_precision,
    explain_plan,
    find_plan_path,
    leave_components,
    list_rescaled,
    parse_request,
)
from stopdown.records import ComponentPlan, MemoryPlan, Plan
from stopdown.scaling import ComponentCall
from stopdown.sources.hub import PLAN_BESIDE, Progress
from stopdown.sources.library_messages import quiet_libraries
from stopdown.sources.source import Source, narrow_source
from stopdown.sources.sources import count_download, fingerprint


def choose_plan(
    source: Source,
    precision: str,
    device: Device,
    *,
    memory: MemoryPlan | None = None,
    request: Request | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Choose or make the plan by which a source runs on a device, from a `--precision`.

    `fp16` always needs exponents. So does `auto` on a device that is fast in fp16 but not in bf16. A plan
    without exponents only states the precision of each call.

    Args:
        precision: `auto`, a precision, a list by component, or the path of a plan, ending in `.json`.
        memory: the memory limit of runs, from `ask_memory`; None for no limit.
        request: sizes and prompt of the run, in case a plan has to be made.

    Cost: the first time that a checkpoint needs exponents here, `certify_plan`: one pass over the weights.
    """
    if (path := find_plan_path(precision)) is not None:
        named = read_plan(path)
        check_source(named, source)
        return dataclasses.replace(named, chosen=Path(path).name, memory=memory)
    need = find_need(source, precision, device)
    if not need.why:
        return Plan(source.name, precision=precision, components=need.decided, memory=memory)
    plan = find_or_certify(source, device, request=request, progress=progress, others=need.others)
    why = f"an automatic plan, because {need.why}"
    return dataclasses.replace(plan, chosen=why, memory=memory)


@dataclasses.dataclass(frozen=True)
class ExponentNeed:
    """Whether a run needs exponents, with the reason.

    Attributes:
        why: the reason as a clause; "" if it needs none.
        decided: how each call runs without exponents.
        others: component → precision of each component that runs without exponents although others
            have some.
    """

    why: str
    decided: tuple[ComponentPlan, ...]
    others: Mapping[str, str]


def find_need(source: Source, precision: str, device: Device) -> ExponentNeed:
    """Decide whether a source needs exponents for a precision, from its configs and weight headers."""
    asked, facts, supports = parse_request(precision), gather_facts(source), probe_formats(device)
    decided = decide(facts, supports, precision)
    if asked.get("") == "auto":
        why = "" if device.type == "cpu" else explain_plan(facts, supports)
        return ExponentNeed(why, decided, {})
    rescaled = list_rescaled(asked, {entry.name: entry.calls for entry in facts})
    others = {
        name: PLAIN_FP16 if asked.get(name) == PLAIN_FP16 else widest
        for name, widest in widest_by_component(decided).items()
        if name not in rescaled
    }
    return ExponentNeed("you asked for fp16" if rescaled else "", decided, others)


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
    """Return a model's plan with exponents: that in its folder, else the cached one, else one made and
    cached now.

    Args:
        request: sizes and prompt of the run, in case a plan has to be made.
        others: component → precision that replaces the plan's.
        only: components to plan; empty for all.
        calls: component → its calls, if no pipeline makes them.

    Warns:
        StopdownWarning: the plan in the model's folder isn't for these weights or versions; the new plan
            could not be cached.

    Cost: the first time for each checkpoint, `certify_plan`: one pass over the weights.
    """
    if (found := find_plan(source, only)) is None:
        made = certify_plan(
            source,
            precision=",".join(f"{name}={x}" for name, x in (others or {}).items()) or "fp16",
            residual="fp32",
            device=device,
            request=request,
            progress=progress,
            scope=Scope(only, calls, keeps=True),
        )
        if not others:
            keep_plan(made)
        return made
    found = _suit_device(found, device)
    if others:
        kept = tuple(leave_components(found.components, others))
        return seal_plan(dataclasses.replace(found, components=kept))
    return found


def find_plan(source: Source, only: Collection[str] = ()) -> Plan | None:
    """Return the plan in a model's folder, else the cached one; None without either.

    Args:
        only: the planned components; empty for all.

    Warns:
        StopdownWarning: the plan in the folder isn't for these weights or versions.
    """
    return _read_plan_beside(source, only) or read_cached_plan(
        fingerprint(narrow_source(source, only))
    )


def _suit_device(plan: Plan, device: Device) -> Plan:
    """Return a stored plan with another precision for what it runs in bf16, if this device is slow in bf16.

    The plan may have been made for another device.
    """
    entries = []
    for entry in plan.components:
        if entry.precision == "bf16":
            facts = ComponentFacts(entry.component, (entry.component,), {"bf16": 1})
            precision, reason = choose_precision(facts, probe_formats(device))
            if precision != entry.precision:
                reasons = (*entry.reasons, reason)
                entry = dataclasses.replace(entry, precision=precision, reasons=reasons)
        entries.append(entry)
    if tuple(entries) == plan.components:
        return plan
    return seal_plan(dataclasses.replace(plan, components=tuple(entries)))


def _read_plan_beside(source: Source, only: Collection[str]) -> Plan | None:
    """Return the plan in a model's folder, if it belongs to this model; else warn and return None."""
    path = source.path / PLAN_BESIDE
    if source.kind == "file" or not path.is_file() or describe_no_plan(path):
        return None  # a converted model's record has that name as well
    try:
        plan = read_plan(path)
        check_source(plan, source)
    except PlanError as error:
        warn_user(f"{path} isn't used, and a plan is made instead. {error.what}")
        return None
    entries = tuple(x for x in plan.components if not only or x.component in only)
    return dataclasses.replace(plan, components=entries)


@contextlib.contextmanager
def certified_on_arrival(
    source: Source,
    precision: str | Plan,
    device: Device,
    *,
    request: Request | None = None,
    progress: Progress | None = None,
) -> Iterator[None]:
    """Certify a source's weights in a second process while the `with` block downloads them.

    At the end of the block, wait until the process is done.

    Args:
        source: without its weights, from `resolve_source(..., with_weights=False)`.
        precision: of the run, as for `choose_plan`; for a plan nothing is certified.
    """
    components = list[str]()
    if isinstance(precision, str):
        with quiet_libraries():
            source, components = _list_worth(source, precision, device, request)
    with Certifier(source, components, "fp32") as certifier:
        yield
        certifier.wait(progress)


def _list_worth(
    source: Source, precision: str, device: Device, request: Request | None
) -> tuple[Source, list[str]]:
    """Return the source with its pipeline class, and the components worth planning while the rest is
    downloaded.
    """
    if source.kind != "hub" or source.loras or find_plan_path(precision) is not None:
        return source, []
    if count_download(source) < WORTH_BYTES:
        return source, []
    need = find_need(source, precision, device)
    if not need.why or (source.path / PLAN_BESIDE).is_file():
        return source, []
    left = [name for name in list_planned(source) if name not in need.others]
    return select_class(source, request), left
