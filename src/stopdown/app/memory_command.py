"""`stopdown plan --memory`, as plain functions: a source and a limit in, the table of strategies out."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stopdown.app.display import Display, load_libraries
from stopdown.app.request_options import RequestOptions, find_source, read_allowed
from stopdown.device_profiles import Profile, find_target, is_profile
from stopdown.doctor import has_fused_attention
from stopdown.errors import OptionError
from stopdown.number_formats import format_bytes, parse_bytes
from stopdown.pipelines.allowed_sizes import read_configs
from stopdown.pipelines.requests import PROMPTS, Request, build_arguments
from stopdown.pipelines.sources import Source
from stopdown.plans.plan_files import read_plan
from stopdown.plans.precision import parse_request
from stopdown.records import MemoryPlan, MemoryRow, Plan, Reduction

if TYPE_CHECKING:
    from rich.console import Console

    from stopdown.memory.forecast import Fit
    from stopdown.memory.speed import Speed
    from stopdown.memory.strategies import Prediction
    from stopdown.pipelines.dry_run import Answers
    from stopdown.plans.precision_and_memory import Budgeted, Way

_BY_HOW_MUCH = "the picture changes; how much was not measured for this checkpoint."
ROUNDED = {
    "fp8": "fp8 rounds weights to 4 significant bits with a power of two for each row: "
    + _BY_HOW_MUCH,
    "int8": "int8 rounds weights to 255 steps for each row: " + _BY_HOW_MUCH,
}
"""What formats of 8 bits do."""

_MARGIN = (
    " A strategy that changes the picture is used only if no component fits as it is, and if it saves a "
    "fifth of the time."
)


def plan_memory(options: RequestOptions, request: Request, display: Display) -> MemoryPlan:
    """Predict what every strategy takes on a device in every precision, and choose; no weights are
    read.

    Raises:
        StopdownError: anything that went wrong, with what to type.
    """
    begun = time.perf_counter()
    request = dataclasses.replace(request, prompt=request.prompt or PROMPTS[0], steps=options.steps)
    allowed = read_allowed(options.allow, options.memory)
    path = parse_request(options.precision).plan
    plan = read_plan(path) if path is not None else None
    found = find_source(options, display, with_weights=False)
    load_libraries(display)
    from stopdown.pipelines.library_messages import quiet_libraries
    from stopdown.pipelines.loader import complete_source
    from stopdown.plans.precision_and_memory import choose_way, list_rows

    profile = find_target(options.device or "auto")[1]
    limit = _read_limit(str(options.memory), profile)
    with quiet_libraries():
        source = complete_source(found)
        ways = find_ways(source, options.precision, profile, plan)
        answers: Answers = {}
        tried = [_try_way(source, way, profile, options, request, display, answers) for way in ways]
        chosen, reduced = choose_way(tried, limit, allowed), None
        if chosen is None and "smaller" in allowed:
            found_smaller = _shrink(tried[0], source, profile, options, request, display, limit)
            if found_smaller is not None:
                reduced, request, one = found_smaller
                tried, ways = [one], ways[:1]
                chosen = choose_way(tried, limit, allowed)
    way = chosen[0] if chosen is not None else ways[0]
    return MemoryPlan(
        source=options.source,
        device=f"{profile.name} ({profile.title})",
        precisions=dict(way.precisions),
        request=_describe(request),
        limit_bytes=limit,
        rows=list_rows(tried),
        chosen=chosen[1].strategy.name if chosen is not None else "",
        reasons=(
            *((reduced.reason,) if reduced is not None else ()),
            *_explain(tried, chosen, limit, profile, allowed),
        ),
        reduced=reduced,
        elapsed_s=round(time.perf_counter() - begun, 3),
        precision=way.name if chosen is not None else "",
        flag=way.flag,
        bits={one.name: one.bits for one in ways},
        remarks={one.name: one.remark for one in ways if one.remark},
    )


def _read_limit(text: str, profile: Profile) -> int:
    if text != "auto":
        return parse_bytes(text)
    if not profile.memory_bytes:
        raise OptionError(
            f"How much memory {profile.title} has is not known.",
            remedy="Say how much: --memory 8GiB.",
        )
    return profile.memory_bytes


def find_ways(source: Source, asked: str, profile: Profile, plan: Plan | None) -> list[Way]:
    """The ways to compute that are compared, the one that was asked for first."""
    from stopdown.plans.applier import check_source
    from stopdown.plans.planned_loader import gather_facts
    from stopdown.plans.precision_and_memory import list_ways

    if plan is not None:
        check_source(plan, source)
    facts = gather_facts(source)
    return list_ways(facts, profile.supports, asked, plan)


def _try_way(
    source: Source,
    way: Way,
    profile: Profile,
    options: RequestOptions,
    request: Request,
    display: Display,
    answers: Answers,
) -> Budgeted:
    """What every strategy takes in one precision, those that cost the least time first."""
    from stopdown.memory.forecast import list_storages, predict_all, sort_by_time
    from stopdown.plans.precision_and_memory import Budgeted, build_way, weigh_speed

    formats = set(way.precisions.values())
    pipe = build_way(source, way)
    fit = predict_all(
        pipe,
        build_arguments(pipe, request),
        steps=request.steps or 1,
        fused=has_fused_attention(profile, formats),
        on_cpu=profile.kind == "cpu",
        storages=list_storages(profile.kind),
        answers=answers,
        progress=lambda done, total: display.progress("plan", f"in {way.name}", done, total),
    )
    device = options.device or "auto"
    wide = _find_speed(device, {"fp32"}) if way.fp32_share else None
    speed = weigh_speed(way, _find_speed(device, formats), wide)
    return Budgeted(way, sort_by_time(fit, speed), speed)


def _find_speed(name: str, formats: set[str]) -> Speed | None:
    """Timed on a device of this machine, else what its profile says."""
    from stopdown.memory.speed import find_speed, measure_speed

    device, profile = find_target(name)
    return find_speed(profile, formats) if is_profile(name) else measure_speed(device, formats)


def _explain(
    tried: Sequence[Budgeted],
    chosen: tuple[Way, Prediction] | None,
    limit: int,
    profile: Profile,
    allowed: tuple[str, ...],
) -> tuple[str, ...]:
    """Why this one and not another, as whole sentences."""
    from stopdown.memory.forecast import USABLE_SHARE

    usable = f"{USABLE_SHARE:.0%} of {format_bytes(limit)}"
    reasons = [_explain_choice(tried, chosen, usable, allowed)]
    if chosen is not None:
        way, prediction = chosen
        reasons += [ROUNDED[name] for name in ROUNDED if name == prediction.strategy.storage]
        others = (one for one in tried if one.way is not way)
        reasons += [_explain_other(one, tried, limit, allowed) for one in others]
    if profile.kind != "cpu":
        reasons.append("The device's kernels and its allocator take some memory in addition.")
    if profile.kind == "mps" and chosen is not None and chosen[1].stored_bytes:
        prediction = chosen[1]
        reasons.append(
            "CPU and GPU share the memory of a Mac: with the weights that are not in use, the run takes "
            f"{format_bytes(prediction.peak_bytes + prediction.stored_bytes)}."
        )
    said = dict.fromkeys(one.speed.reason for one in tried if one.speed is not None)
    return (*reasons, *(f"Times are estimated from {reason}" for reason in said))


def _explain_choice(
    tried: Sequence[Budgeted],
    chosen: tuple[Way, Prediction] | None,
    usable: str,
    allowed: tuple[str, ...],
) -> str:
    from stopdown.memory.forecast import find_smallest

    if chosen is not None:
        way, prediction = chosen
        return (
            f"{way.name} with {prediction.strategy.name} is predicted to take "
            f"{format_bytes(prediction.peak_bytes)}, and is the fastest that stays within "
            f"{usable}.{_MARGIN if allowed else ''}"
        )
    smallest = [(one.way, find_smallest(one.fit, allowed)) for one in tried]
    way, least = min(smallest, key=lambda pair: pair[1].peak_bytes)
    return (
        f"No strategy stays within {usable}: the smallest, {way.name} with {least.strategy.name}, is "
        f"predicted to take {format_bytes(least.peak_bytes)}. Use a smaller --height and --width or "
        "fewer --frames, or --allow smaller."
    )


def _explain_other(
    one: Budgeted, tried: Sequence[Budgeted], limit: int, allowed: tuple[str, ...]
) -> str:
    """What another way would have come to."""
    from stopdown.memory.forecast import choose
    from stopdown.plans.precision_and_memory import list_rows

    found = choose(one.fit, limit, allowed)
    if found is None:
        return f"{one.way.name}: nothing fits."
    row = next(
        row
        for row in list_rows(tried)
        if row.precision == one.way.name and row.strategy == found.strategy.name
    )
    time_taken = "" if row.time_ratio is None else f", x {row.time_ratio:.2f} in time"
    return (
        f"{one.way.name}: {row.strategy} would fit with {format_bytes(row.peak_bytes)}{time_taken}."
    )


def _shrink(
    first: Budgeted,
    source: Source,
    profile: Profile,
    options: RequestOptions,
    request: Request,
    display: Display,
    limit: int,
) -> tuple[Reduction, Request, Budgeted] | None:
    """The largest smaller size that fits in the first way to compute; None when none does."""
    from stopdown.plans.precision_and_memory import build_way
    from stopdown.runtime.memory_limits import find_size, find_smaller

    size = find_size(build_way(source, first.way), request, first.fit)
    if size is None:
        return None
    tried: dict[int, Budgeted] = {}

    def predict(smaller: Request) -> Fit:
        made = _try_way(source, first.way, profile, options, smaller, display, {})
        tried[id(made.fit)] = made
        return made.fit

    configs = read_configs(source.described)
    found = find_smaller(request, size, configs, predict, limit, options.allow)
    if found is None:
        return None
    smaller, fit, reduced, _ = found
    return reduced, smaller, tried[id(fit)]


def _describe(request: Request) -> dict[str, Any]:
    """Sizes and steps, with what was made smaller."""
    names = ("frames", "height", "width", "guidance")
    found = {name: v for name in names if (v := getattr(request, name)) is not None}
    return {"steps": request.steps, **found}


def print_memory(plan: MemoryPlan, console: Console) -> None:
    """Print a table of strategies for each precision, and what was chosen and why."""
    formats = ", ".join(f"{name} {entry}" for name, entry in plan.precisions.items())
    console.print(f"{plan.source} on {plan.device}: {formats}", soft_wrap=True)
    changed = False
    for name, bits in plan.bits.items():
        rows = tuple(row for row in plan.rows if row.precision == name)
        shown = list_worthwhile(rows, plan.chosen if name == plan.precision else "")
        changed |= any(row.changes for row in shown)
        remark = plan.remarks.get(name, "")
        console.print(
            f"\n{name}: {bits} significant bits, error not measured. {remark}".rstrip(),
            soft_wrap=True,
        )
        _print_rows(shown, plan, console)
    console.print(
        "\nStrategies that take longer without saving memory are not shown; --json shows all. Errors: "
        f"stopdown compare {plan.source}",
        soft_wrap=True,
    )
    if changed:
        console.print(
            "Those with fp8 or int8 change the picture: only with --allow fp8 or --allow int8."
        )
    for reason in plan.reasons:
        console.print(reason, soft_wrap=True)
    if plan.chosen:
        _print_command(plan, console)


def _print_rows(rows: Sequence[MemoryRow], plan: MemoryPlan, console: Console) -> None:
    from stopdown.app.progress import make_table

    headings, right = ("strategy", "peak", "in", "time", "moved"), ("peak", "time", "moved")
    table = make_table(*headings, right=right, no_wrap=True)
    for row in rows:
        is_chosen = (row.precision, row.strategy) == (plan.precision, plan.chosen)
        table.add_row(*_describe_row(row), style="bold" if is_chosen else "")
    console.print(table)


def _print_command(plan: MemoryPlan, console: Console) -> None:
    """What to type for the run that was chosen."""
    limit = name_limit(plan.limit_bytes)
    allow = "".join(f" --allow {name}" for name in ROUNDED if f"+{name}" in plan.chosen)
    if plan.reduced is not None:
        allow += "".join(
            f" --{name} {plan.request[name]}"
            for name in ("frames", "height", "width")
            if name in plan.request
        )
    flag = "" if plan.flag == "auto" else f" --precision {plan.flag}"
    if plan.precision == "fp16 rescaled" and flag:
        console.print(f"Make its plan: stopdown plan {plan.source} -o {plan.flag}", soft_wrap=True)
    console.print(
        f"Use it: stopdown generate {plan.source} PROMPT --memory {limit}{allow}{flag}",
        soft_wrap=True,
    )


def name_limit(count: int) -> str:
    """An amount that `--memory` takes: `16GiB` where that is it, and else no smaller."""
    whole = count % 2**30 == 0
    size, unit = (2**30, "GiB") if whole else (2**20, "MiB") if count >= 2**24 else (2**10, "KiB")
    return f"{math.ceil(count / size)}{unit}"


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
    show: Callable[[int], str] = format_bytes
    return (
        row.strategy,
        show(row.peak_bytes),
        row.component or "between",
        "not measured" if row.time_ratio is None else f"x {row.time_ratio:.2f}",
        show(row.moved_bytes),
    )
