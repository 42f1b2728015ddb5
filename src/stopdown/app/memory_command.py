"""`stopdown plan --memory`, as plain functions: a source and a limit in, the table of strategies out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from stopdown.app.request_options import read_allowed
from stopdown.errors import OptionError
from stopdown.records import MemoryPlan, MemoryRow

if TYPE_CHECKING:
    from rich.console import Console

    from stopdown.app.commands import Display
    from stopdown.app.plan_command import PlanOptions
    from stopdown.memory.fitting import Fit
    from stopdown.memory.speed import Speed
    from stopdown.pipelines.requests import Request
    from stopdown.pipelines.sources import Source
    from stopdown.profiles import Profile

_BY_HOW_MUCH = "the picture changes, by how much was not measured for this checkpoint."
ROUNDED = {
    "fp8": "fp8 rounds weights to 4 significant bits with a power of two for each row: "
    + _BY_HOW_MUCH,
    "int8": "int8 rounds weights to 255 steps for each row: " + _BY_HOW_MUCH,
}
"""What formats of 8 bits do."""

_PROMPT = "a red circle moving left on a grey background"


def plan_memory(options: PlanOptions, request: Request, display: Display) -> MemoryPlan:
    """Predict what every strategy takes on a device, and choose; no weights are read.

    Raises:
        StopdownError: anything that went wrong, with what to type.
    """
    from stopdown.memory.fitting import sort_by_time
    from stopdown.pipelines import sources
    from stopdown.pipelines.loading import complete_source
    from stopdown.pipelines.quiet import quiet_libraries
    from stopdown.profiles import find_target

    begun = time.perf_counter()
    allowed = read_allowed(options.allow, options.memory)
    profile = find_target(options.device or "auto")[1]
    limit = _read_limit(str(options.memory), profile)
    found = sources.resolve_source(options.source, revision=options.revision, with_weights=False)
    if found.kind != "file":
        sources.verify_index(found)
    with quiet_libraries():
        source, _ = complete_source(found, config=options.config)
        precisions, is_planned = _choose_precisions(source, options.precision, profile)
        fit = _predict(source, precisions, is_planned, profile, options, request, display)
        speed = _find_speed(options.device or "auto", set(precisions.values()))
    rows, chosen, reasons = _judge(sort_by_time(fit, speed), limit, profile, speed, allowed)
    return MemoryPlan(
        source=options.source,
        device=f"{profile.name} ({profile.title})",
        precisions=precisions,
        request=_describe(options),
        limit_bytes=limit,
        rows=rows,
        chosen=chosen,
        reasons=reasons,
        elapsed_s=round(time.perf_counter() - begun, 3),
    )


def _read_limit(text: str, profile: Profile) -> int:
    from stopdown.memory.fitting import parse_bytes

    if text != "auto":
        return parse_bytes(text)
    if not profile.memory_bytes:
        raise OptionError(
            f"How much memory {profile.title} has is not known.",
            remedy="Say how much: --memory 8GiB.",
        )
    return profile.memory_bytes


def _choose_precisions(source: Source, asked: str, profile: Profile) -> tuple[dict[str, str], bool]:
    """Format of each component as a run would have it, and whether by a plan."""
    from stopdown.pipelines.sizes import read_configs
    from stopdown.planning.loading import decide, gather_facts
    from stopdown.planning.precision import explain_plan

    facts = gather_facts(source, read_configs(source.path))
    if asked == "fp16" or (asked == "auto" and explain_plan(facts, profile.supports)):
        return {fact.name: "fp16" for fact in facts}, True
    decisions = decide(facts, profile.supports, asked)
    return {d.component.partition(".")[0]: d.precision for d in decisions}, False


def _predict(
    source: Source,
    precisions: Mapping[str, str],
    is_planned: bool,
    profile: Profile,
    options: PlanOptions,
    request: Request,
    display: Display,
) -> Fit:
    import dataclasses

    from stopdown.formats import FORMATS
    from stopdown.memory.fitting import list_storages, predict_all
    from stopdown.pipelines.requests import build_arguments
    from stopdown.pipelines.stand_ins import build_stand_in
    from stopdown.planning.examining import has_fused_attention

    dtypes = {name: FORMATS[entry].torch_dtype for name, entry in precisions.items()}
    pipe = build_stand_in(source, dtypes, keep_fp32=not is_planned)
    request = dataclasses.replace(request, prompt=request.prompt or _PROMPT, steps=options.steps)
    return predict_all(
        pipe,
        build_arguments(pipe, request),
        steps=options.steps,
        fused=has_fused_attention(profile, set(precisions.values())),
        on_cpu=profile.kind == "cpu",
        storages=list_storages(profile.kind),
        progress=lambda done, total: display.progress("plan", "rehearsing", done, total),
    )


def _find_speed(name: str, formats: set[str]) -> Speed | None:
    """Timed on a device of this machine, else what its profile says."""
    from stopdown.memory.speed import find_speed, measure_speed
    from stopdown.profiles import find_target, is_profile

    device, profile = find_target(name)
    return find_speed(profile, formats) if is_profile(name) else measure_speed(device, formats)


def _judge(
    fit: Fit, limit: int, profile: Profile, speed: Speed | None, allowed: tuple[str, ...]
) -> tuple[tuple[MemoryRow, ...], str, tuple[str, ...]]:
    from stopdown.formats import format_bytes
    from stopdown.memory.fitting import HEADROOM, choose, find_smallest, make_rows

    chosen = choose(fit, limit, allowed)
    usable = f"{HEADROOM:.0%} of {format_bytes(limit)}"
    if chosen is not None:
        peak = format_bytes(chosen.peak_bytes)
        reasons: tuple[str, ...] = (
            f"{chosen.strategy.name} is predicted to take {peak}, and is the first in the order of "
            f"time that stays within {usable}.",
        )
        reasons += (ROUNDED[chosen.strategy.storage],) * (chosen.strategy.storage in ROUNDED)
    else:
        least = find_smallest(fit, allowed)
        reasons = (
            f"Nothing stays within {usable}: the smallest, {least.strategy.name}, is predicted to "
            f"take {format_bytes(least.peak_bytes)}. Use a smaller --height and --width or fewer "
            "--frames.",
        )
    if profile.kind != "cpu":
        reasons += ("Workspaces of the device's kernels and its allocator's rounding come on top.",)
    if speed is not None:
        reasons += (f"Times are estimated from {speed.reason}",)
    return make_rows(fit, speed), chosen.strategy.name if chosen else "", reasons


def _describe(options: PlanOptions) -> dict[str, Any]:
    names = ("steps", "frames", "height", "width", "guidance")
    return {name: v for name in names if (v := getattr(options, name)) is not None}


def print_memory(plan: MemoryPlan, console: Console) -> None:
    """Print the table of strategies, and what was chosen and why."""
    from rich.table import Table

    formats = ", ".join(f"{name} {entry}" for name, entry in plan.precisions.items())
    console.print(f"{plan.source} on {plan.device}: {formats}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, show_edge=False)
    for heading in ("strategy", "peak", "in", "time", "moved"):
        is_text = heading in ("strategy", "in")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    shown = list_worthwhile(plan.rows, plan.chosen)
    for row in shown:
        mark = "bold" if row.strategy == plan.chosen else ""
        table.add_row(*_describe_row(row), style=mark)
    console.print(table)
    console.print("Strategies that take longer and no less are left out; --json has them all.")
    if any(row.changes for row in shown):
        console.print(
            "Those with fp8 or int8 change the picture: only with --allow fp8 or --allow int8."
        )
    for reason in plan.reasons:
        console.print(reason, soft_wrap=True)
    if plan.chosen:
        limit = f"{math.ceil(plan.limit_bytes / 2**20)}MiB"
        allow = "".join(f" --allow {name}" for name in ROUNDED if f"+{name}" in plan.chosen)
        console.print(f"Use it: stopdown generate {plan.source} PROMPT --memory {limit}{allow}")


def list_worthwhile(rows: tuple[MemoryRow, ...], chosen: str) -> list[MemoryRow]:
    """Those that take less than all before them, which take less time; and the chosen one.

    What changes the picture does not put others out.
    """
    shown: list[MemoryRow] = []
    for row in rows:
        rivals = [one for one in shown if not one.changes or row.changes]
        is_less = not rivals or row.peak_bytes < min(one.peak_bytes for one in rivals)
        if is_less or row.strategy == chosen:
            shown.append(row)
    return shown


def _describe_row(row: MemoryRow) -> tuple[str, ...]:
    from stopdown.formats import format_bytes

    show: Callable[[int], str] = format_bytes
    return (
        row.strategy,
        show(row.peak_bytes),
        row.component or "between",
        "not measured" if row.time_ratio is None else f"x {row.time_ratio:.2f}",
        show(row.moved_bytes),
    )
