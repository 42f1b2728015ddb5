"""Findings from outside the operations: device formats, schedules, models' needs, fp16 with no plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from stopdown.devices.device_profiles import DeviceFault, Profile
from stopdown.devices.model_needs import read_needs
from stopdown.dtype_rules.findings import make_finding
from stopdown.dtype_rules.inspection import CallStats, Examination
from stopdown.number_formats import list_all, name_dtype
from stopdown.numerics import HALVES
from stopdown.records import Finding

_KINDS = {"emulated": "format-emulated", "slow": "format-slow", "broken": "format-broken"}


def check_device(seen: Examination, profile: Profile) -> Iterator[Finding]:
    """Find formats in use that the device lacks, emulates, computes wrongly or runs slowly."""
    used: dict[str, list[CallStats]] = {}
    for callee in seen.callees.values():
        if callee.main is not None:
            used.setdefault(name_dtype(callee.main), []).append(callee)
    for name, callees in used.items():
        fact = profile.formats.get(name)
        if fact is None or fact.state == "native":
            continue
        kind = _KINDS.get(fact.state, "format-missing")
        called = ", ".join(callee.name for callee in callees)
        evidence = f"{called} in {name}. {profile.describe_format(name)}"
        first = callees[0].component_name
        yield make_finding(kind, first, evidence, component=first)
    for fault in profile.faults:
        yield from _check_fault(fault, seen, profile)


def _check_fault(fault: DeviceFault, seen: Examination, profile: Profile) -> Iterator[Finding]:
    for (operation, name), module_path in seen.operations.items():
        is_format = not fault.formats or name in fault.formats
        if is_format and operation in fault.operations:
            evidence = f"{operation} in {name}: {fault.what} ({fault.source})"
            by_kernels = fault.accumulates == "fp16" and profile.formats[name].accumulates != "fp16"
            kind = "kernel-fault" if by_kernels else "device-fault"
            yield make_finding(kind, module_path, evidence, remedy=fault.remedy)
            return


def check_schedule(seen: Examination) -> Iterator[Finding]:
    """Find timesteps and scheduler tables whose values collapse in 16 bits."""
    schedule = getattr(seen.scheduler, "timesteps", None)
    for callee in seen.callees.values():
        yield from _check_times(callee, schedule)
    if seen.scheduler is not None:
        yield from _check_tables(seen.scheduler)


def _check_times(callee: CallStats, schedule: Any) -> Iterator[Finding]:
    given = [time for time in callee.times if time.numel()]
    if not given or given[0].dtype not in HALVES or not isinstance(schedule, torch.Tensor):
        return
    left = len({float(time) for time in given})
    wanted = len({float(time) for time in schedule})
    if left < min(wanted, len(given)):
        evidence = (
            f"{callee.name} gets its timestep in {name_dtype(given[0].dtype)}: of {wanted} different "
            f"timesteps {left} are left."
        )
        yield make_finding("timesteps-collapse", callee.component_name, evidence)


def _check_tables(scheduler: Any) -> Iterator[Finding]:
    for name, table in vars(scheduler).items():
        if not isinstance(table, torch.Tensor) or table.dtype not in HALVES or table.dim() != 1:
            continue
        left = int(table.unique().numel())
        if table.numel() > 2 and left < table.numel():
            evidence = (
                f"{type(scheduler).__name__}.{name} is {name_dtype(table.dtype)}: of "
                f"{table.numel()} entries {left} differ."
            )
            yield make_finding("sigmas-collapse", "scheduler", evidence)


def check_upcast(seen: Examination) -> Iterator[Finding]:
    """Find autoencoders with `force_upcast` in their config that run in fp16 anyway.

    If a pipeline upcasts one direction (encode or decode), it has read the config and chosen fp16 for the
    other, which is no fault.
    """
    wide = {d.component_name for d in seen.callees.values() if d.main == torch.float32}
    unread: dict[str, CallStats] = {}
    for callee in seen.callees.values():
        is_answered = callee.is_rescaled or callee.component_name in wide
        if callee.force_upcast and callee.main == torch.float16 and not is_answered:
            unread.setdefault(callee.component_name, callee)
    for name, callee in unread.items():
        evidence = f"The config sets force_upcast, but {callee.name} would run in fp16."
        yield make_finding("force-upcast-unread", name, evidence)


def check_needs(seen: Examination) -> Iterator[Finding]:
    """Find models that would run in a format in which their class does not work."""
    for callee in seen.callees.values():
        for need in read_needs():
            main = name_dtype(callee.main) if callee.main is not None else ""
            if (
                callee.kind.startswith(need.begins)
                and main in need.refused
                and not callee.is_rescaled
            ):
                evidence = f"{callee.name} is a {callee.kind} in {main}."
                module_path = callee.component_name
                reason = f"{need.reason} ({need.source})."
                yield make_finding(
                    "model-needs", module_path, evidence, reason=reason, remedy=need.remedy
                )


def check_range(seen: Examination, stored: Mapping[str, str]) -> Iterator[Finding]:
    """Find components that are stored in bf16 and would run in fp16 without a plan.

    Args:
        stored: format of most of the weights on disk, by component.
    """
    names = [
        callee.component_name
        for callee in seen.callees.values()
        if callee.main == torch.float16 and not callee.is_rescaled
    ]
    unplanned = [name for name in dict.fromkeys(names) if stored.get(name) == "bf16"]
    if unplanned:
        evidence = (
            f"{list_all(unplanned)} {'is' if len(unplanned) == 1 else 'are'} stored in bf16, and would run "
            "in fp16 without a plan."
        )
        yield make_finding("range-unplanned", unplanned[0], evidence)


def check_unseen(seen: Examination) -> Iterator[Finding]:
    for component, reason in seen.unseen:
        yield make_finding("unchecked", component, f"Its code stopped without values: {reason}")
