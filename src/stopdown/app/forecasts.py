"""Forecasts on the command line: whether and how a run fits into memory, before weights are downloaded.

`stopdown fit` makes them for any device, and `generate` for its own, from configurations and the headers
of weights.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stopdown.app.display import Display
from stopdown.app.registration import describe_command
from stopdown.devices.device_profiles import Profile, find_device_target, is_profile
from stopdown.doctor import has_fused_attention
from stopdown.number_formats import format_bytes, format_range, parse_bytes
from stopdown.pipelines.allowed_sizes import find_grid, read_configs
from stopdown.pipelines.requests import (
    MEDIA,
    Request,
    build_arguments,
    find_frames,
    find_steps,
    list_needed_fields,
)
from stopdown.records import MemoryForecast, Plan, Reduction
from stopdown.sources.source import Source
from stopdown.sources.sources import count_download

if TYPE_CHECKING:
    from stopdown.memory.forecast import Fit
    from stopdown.memory.speed import Speed
    from stopdown.memory.strategies import Prediction
    from stopdown.pipelines.dry_run import Answers


def fit_source(
    options: Any,
    source: Source,
    read: Request,
    display: Display,
    limit: int,
    host_limit: int,
    plan: Plan | None = None,
) -> MemoryForecast:
    """Predict whether a run of a source stays within a limit, from configurations and headers alone.

    Args:
        options: options of `fit` or of `generate`.
        source: the completed source; its weights need not be there.
        read: the request; inputs that it lacks and the pipeline needs are generated.
        limit: device memory for the run, in bytes.
        host_limit: host memory for weights that are not in use, in bytes.
        plan: the plan that `options.precision` names.
    """
    from stopdown.memory.forecast import count_disk
    from stopdown.pipelines.class_selection import select_class
    from stopdown.pipelines.drawn_inputs import complete_request
    from stopdown.plans.precision_and_memory import (
        build_way,
        choose_way,
        count_significant_bits,
        describe_choices,
        describe_remark,
        find_ways,
        list_rows,
        read_formats,
    )
    from stopdown.sources.library_messages import quiet_libraries

    profile = find_device_target(options.device or "auto")[1]
    with quiet_libraries():
        source = select_class(source, read)
        first, *others = find_ways(source, profile.supports, options.precision, plan)
        pipe = build_way(source, first)
        needed, request = list_needed_fields(type(pipe)), complete_request(pipe, read)
        answers: Answers = {}
        predict = functools.partial(
            _try_way, source, profile=profile, options=options, display=display, answers=answers
        )

        def try_way(way: Plan, **given: Any) -> Fit:
            return count_disk(predict(way, **given), host_limit)

        shows_all = options.verbose or options.json
        tried = [try_way(first, request=request, limit=0 if shows_all else limit)]
        chosen, reduced = choose_way(tried, limit), None
        if options.verbose or chosen is None:
            tried += [try_way(way, request=request) for way in others]
            chosen = choose_way(tried, limit)
        sizes = _describe(read)
        if chosen is None:
            nearest = _shrink(tried[0], source, profile, options, request, display, limit)
            if nearest is not None:
                reduced, sizes = nearest[0], _describe(nearest[1])
    way, prediction = chosen or (first, None)
    made = MemoryForecast(
        source=options.source,
        device=f"{profile.name} ({profile.title})",
        precisions=read_formats(way),
        request={**_describe(read), "steps": request.steps or find_steps(pipe, {})},
        limit_bytes=limit,
        rows=list_rows(tried),
        chosen=prediction.strategy.name if prediction is not None else "",
        reasons=_explain(tried, chosen, limit, profile),
        reduced=reduced,
        elapsed_s=0.0,
        precision=way.chosen if prediction is not None else "",
        flag=way.precision,
        bits={x.plan.chosen: count_significant_bits(x.plan) for x in tried},
        remarks={x.plan.chosen: said for x in tried if (said := describe_remark(x.plan))},
        fits=prediction is not None,
        peak_bytes=prediction.peak_bytes if prediction is not None else 0,
        reserved_bytes=prediction.reserved_bytes if prediction is not None else 0,
        host_bytes=_count_host(prediction, profile, host_limit),
        host_limit_bytes=0 if profile.kind == "cpu" else host_limit,
        seconds=prediction.seconds if prediction is not None else None,
        download_bytes=count_download(source),
        decisions=describe_choices(way),
    )
    speed = next((x.speed for x in tried if x.plan is way), None)
    error = speed.error if speed is not None else (1.0, 1.0)
    answer = _answer(made, prediction, error) if prediction else _refuse(made, tried)
    can_run = made.fits or reduced is not None
    command = _name_command(made, options, needed, sizes) if can_run else ""
    return dataclasses.replace(made, answer=answer, command=command)


def _count_host(prediction: Prediction | None, profile: Profile, host_limit: int) -> int:
    """Return the bytes of weights in host memory; 0 if they stay in files or the device is the CPU."""
    if prediction is None or profile.kind == "cpu" or prediction.stored_bytes > host_limit:
        return 0
    return prediction.stored_bytes


def _answer(
    made: MemoryForecast, prediction: Prediction, error: tuple[float, float] = (1.0, 1.0)
) -> str:
    """Return the answer for a run that fits.

    Example: `Yes, it fits: 13.0 of 15 GiB on the device, component+tiling, …`.

    Args:
        error: the lowest and highest ratio of measured to estimated times.
    """
    taken = _compare_bytes(max(made.peak_bytes, made.reserved_bytes), made.limit_bytes)
    strategy = made.chosen.replace("resident+", "with all weights on it and ")
    strategy = strategy.replace("resident", "with all weights on it")
    parts = [f"{taken} on the device", strategy]
    if made.host_bytes:
        parts.append(f"{format_bytes(made.host_bytes)} of host memory")
    elif made.host_limit_bytes and prediction.stored_bytes:
        parts.append(f"{format_bytes(prediction.stored_bytes)} of weights in files")
    if made.download_bytes:
        parts.append(f"{format_bytes(made.download_bytes)} to download")
    if made.seconds is not None:
        parts.append(f"about {format_range(*(made.seconds * x for x in error))} per run")
    from_disk = made.host_limit_bytes and not made.host_bytes and prediction.stored_bytes
    steps = made.request["steps"] or 1
    if from_disk and prediction.moved_bytes > 2 * prediction.stored_bytes:
        read = format_bytes(prediction.moved_bytes // steps)
        return f"It fits only from disk, about {read} read at every step: {', '.join(parts)}."
    return f"Yes, it fits: {', '.join(parts)}."


def _refuse(made: MemoryForecast, tried: Sequence[Fit]) -> str:
    """Return the answer for a run that does not fit, with the nearest size that does."""
    from stopdown.memory.forecast import USABLE_SHARE

    way, least = _find_smallest(tried)
    no = (
        f"No, it doesn't fit. The smallest strategy, {least.strategy.name} in "
        f"{way.chosen}, needs {format_bytes(least.needed_bytes)}, and at most "
        f"{100 * USABLE_SHARE:.0f} % of {format_bytes(made.limit_bytes)} may be used."
    )
    if made.reduced is None:
        return f"{no} Stopdown also tried smaller pictures and fewer frames, but none of them fit."
    return f"{no} The nearest size that fits is {made.reduced.made}."


def _name_command(
    made: MemoryForecast, options: Any, needed: Sequence[str], sizes: Mapping[str, Any]
) -> str:
    """Return the `stopdown generate` command of the forecast run; missing inputs are in capitals."""
    asked: dict[str, Any] = {name: sizes.get(name) for name in _SIZES}
    names = {entry.name for entry in dataclasses.fields(options)}
    device = getattr(options, "device", None)
    left_out = {
        "device": None if device in (None, "auto") or is_profile(device) else device,
        "host_memory": "auto",
        "prompt": None,
    }
    is_limit = options.memory not in (None, "auto", "none")
    own = dataclasses.replace(
        options,
        memory=options.memory
        if is_limit and parse_bytes(options.memory) == made.limit_bytes
        else None,
        precision=made.flag,
        **asked,
        **{name: value for name, value in left_out.items() if name in names},
    )
    command, source = describe_command("generate", own), shlex.quote(made.source)
    given = {name: getattr(options, name, None) for name in ("prompt", *MEDIA)}
    inputs = [shlex.quote(given["prompt"] or "PROMPT")] if "prompt" in needed else []
    inputs += [
        f"--{name.replace('_', '-')} {name.upper()}"
        for name in MEDIA
        if name in needed and given[name] is None
    ]
    return command.replace(f" {source}", " ".join([f" {source}", *inputs]), 1)


def _compare_bytes(count: int, limit: int) -> str:
    """Return two sizes for comparison: `13.0 of 15.0 GiB`, or each with its unit if the units differ."""
    first, second = format_bytes(count).split(), format_bytes(limit).split()
    return " ".join([first[0], *first[1:] * (first[1] != second[1]), "of", *second])


def _find_smallest(tried: Sequence[Fit]) -> tuple[Plan, Prediction]:
    from stopdown.memory.forecast import find_smallest

    smallest = [(one.plan, find_smallest(one)) for one in tried]
    return min(smallest, key=lambda pair: pair[1].needed_bytes)


def _try_way(
    source: Source,
    way: Plan,
    *,
    profile: Profile,
    options: Any,
    request: Request,
    display: Display,
    answers: Answers,
    limit: int = 0,
) -> Fit:
    """Predict the memory of every strategy with one plan; the fastest come first.

    Args:
        limit: bytes; if the model fits into them without a strategy, no other is tried.
        answers: cache of dry-run results, which is extended.
    """
    from stopdown.memory.caching_allocator import find_workspace
    from stopdown.memory.forecast import Room, predict_all, sort_by_time
    from stopdown.plans.precision_and_memory import (
        build_way,
        find_fp32_share,
        read_formats,
        weigh_speed,
    )

    formats = set(read_formats(way).values())
    pipe = build_way(source, way)
    arguments = build_arguments(pipe, request)
    fit = predict_all(
        pipe,
        arguments,
        steps=find_steps(pipe, arguments),
        fused=has_fused_attention(profile, formats),
        on_cpu=profile.kind == "cpu",
        answers=answers,
        room=Room(limit, find_workspace(profile)),
        progress=lambda done, total: display.progress("predict", f"in {way.chosen}", done, total),
    )
    device = options.device or "auto"
    wide = _find_speed(device, {"fp32"}) if find_fp32_share(way) else None
    speed = weigh_speed(way, _find_speed(device, formats), wide)
    return dataclasses.replace(sort_by_time(fit, speed), plan=way)


def _find_speed(name: str, formats: set[str]) -> Speed | None:
    """Return the measured speed of a device of this machine, or the speed that its profile states."""
    from stopdown.memory.speed import find_speed, measure_speed

    device, profile = find_device_target(name)
    return find_speed(profile, formats) if is_profile(name) else measure_speed(device, formats)


def _explain(
    tried: Sequence[Fit],
    chosen: tuple[Plan, Prediction] | None,
    limit: int,
    profile: Profile,
) -> tuple[str, ...]:
    """Return the reasons for a forecast's precision and strategy, and against the others, as sentences."""
    from stopdown.memory.forecast import USABLE_SHARE
    from stopdown.memory.smaller_calls import CHUNKS_DIFFER

    usable = f"{100 * USABLE_SHARE:.0f} % of {format_bytes(limit)}"
    reasons = [_explain_choice(tried, chosen, usable)]
    if chosen is not None:
        reasons += [CHUNKS_DIFFER] if chosen[1].strategy.frames else []
        others = (one for one in tried if one.plan is not chosen[0])
        reasons += [_explain_other(one, tried, limit) for one in others]
    if profile.kind != "cpu":
        reasons.append("The driver and the workspaces of convolutions take some more memory.")
    if profile.kind == "mps" and chosen is not None and chosen[1].stored_bytes:
        prediction = chosen[1]
        reasons.append(
            "CPU and GPU share the memory of a Mac: with the weights that aren't in use, the run takes "
            f"{format_bytes(prediction.needed_bytes + prediction.stored_bytes)}."
        )
    said = dict.fromkeys(one.speed.reason for one in tried if one.speed is not None)
    if said:
        reasons.append(_explain_times([x.rstrip(".") for x in said]))
    return tuple(reasons)


def _explain_times(speeds: Sequence[str]) -> str:
    """Say from which speeds the times are estimated, and once if all were measured here."""
    if all(x.endswith(_MEASURED) for x in speeds):
        listed = "; ".join(x.removesuffix(_MEASURED) for x in speeds)
        return f"Times are estimated from speeds measured here: {listed}."
    return f"Times are estimated from {'; '.join(speeds)}."


_MEASURED = ", measured here"
"""Ending of the reasons of `measure_speed`."""


def _explain_choice(
    tried: Sequence[Fit],
    chosen: tuple[Plan, Prediction] | None,
    usable: str,
) -> str:
    if chosen is not None:
        way, prediction = chosen
        return (
            f"Chosen: {way.chosen}, {prediction.strategy.name}, "
            f"{format_bytes(prediction.needed_bytes)}: the fastest that stays within {usable}."
        )
    way, least = _find_smallest(tried)
    return (
        f"No strategy stays within {usable}: the smallest, {way.chosen} with {least.strategy.name}, is "
        f"predicted to take {format_bytes(least.needed_bytes)}."
    )


def _explain_other(one: Fit, tried: Sequence[Fit], limit: int) -> str:
    """Describe the best strategy of a plan that was not chosen."""
    from stopdown.memory.forecast import choose_prediction
    from stopdown.plans.precision_and_memory import list_rows

    found = choose_prediction(one, limit)
    if found is None:
        return f"{one.plan.chosen}: nothing fits."
    row = next(
        row
        for row in list_rows(tried)
        if row.precision == one.plan.chosen and row.strategy == found.strategy.name
    )
    time_taken = "" if row.time_ratio is None else f", taking {row.time_ratio:.2f} times as long"
    needed = format_bytes(found.needed_bytes)
    return f"{one.plan.chosen} would also fit: {row.strategy}, {needed}{time_taken}."


def _shrink(
    first: Fit,
    source: Source,
    profile: Profile,
    options: Any,
    request: Request,
    display: Display,
    limit: int,
) -> tuple[Reduction, Request] | None:
    """Find the largest smaller size (frames, height, width) at which a run fits; None if none does.

    Args:
        first: predictions for the requested size, with the precisions to keep.
    """
    from stopdown.memory.smaller_requests import (
        Size,
        find_largest_size,
        list_smaller,
        shrink_request,
    )
    from stopdown.plans.precision_and_memory import build_way

    if first.sides is None:  # nothing is decoded
        return None
    pipe = build_way(source, first.plan)
    size = Size(find_frames(pipe, build_arguments(pipe, request)), *first.sides)

    def predict(smaller: Size) -> Fit:
        return _try_way(
            source,
            first.plan,
            profile=profile,
            options=options,
            request=shrink_request(request, smaller),
            display=display,
            answers={},
        )

    grid = find_grid(read_configs(source.described))
    sizes = list_smaller(size, grid, keeps_frames=request.video is not None)
    found = find_largest_size(sizes, predict, limit)
    if found is None:
        return None
    made, _ = found
    reason = f"No strategy stays within {format_bytes(limit)} at {size}; at {made} one does."
    return Reduction(str(size), str(made), reason), shrink_request(request, made)


_SIZES = ("frames", "height", "width")


def _describe(request: Request) -> dict[str, Any]:
    """Return the frames, height, width and guidance that a request sets, by name."""
    return {name: v for name in (*_SIZES, "guidance") if (v := getattr(request, name)) is not None}
